"""`mpx compare`: the same script at several levels, and which of them to take."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mpx.cli.comparing import comparison_options, settings_from_options, write_comparison
from mpx.cli.run import TargetCommand
from mpx.errors import RecordError, UsageError
from mpx.launch.placement import is_disabled
from mpx.launch.target import KINDS, Kind, detect
from mpx.launch.trials import Plan, Turn, run_turn, turns
from mpx.record import RunDirectory

if TYPE_CHECKING:
    from mpx.report.compare import Trial

__all__ = ["compare"]

NO_COMPARISON = 1
INTERRUPTED = 130
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:nan|inf)", re.IGNORECASE)
_LINES_TOLD = 5  # of a failed script's stderr


@click.command(
    cls=TargetCommand,
    context_settings={"allow_interspersed_args": False},
    epilog="What stands after TARGET is the target's own. A script that writes files writes them in every run: give it "
    "a folder that may be overwritten.",
)
@click.option(
    "--levels",
    default="O0,O1,O2,O1-bf16",
    show_default=True,
    metavar="A,B,...",
    help="Presets or YAML files; the first is the baseline.",
)
@click.option(
    "--max-steps",
    type=click.IntRange(0),
    default=100,
    show_default=True,
    help="End each run after so many steps; 0: never.",
)
@click.option(
    "--repeat", type=click.IntRange(1), default=2, show_default=True, help="Runs at each level, in turn."
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    help="PYTHONHASHSEED of every run. It seeds no generator: only the script can do that.",
)
@click.option(
    "--metric",
    metavar="REGEX",
    help="The value in the last line of stdout that matches: its group, else its last number.",
)
@click.option("-m", "--module", is_flag=True, help="TARGET is a module, as for `python -m`.")
@click.option("--as", "as_kind", type=click.Choice(KINDS), help="What TARGET is, whatever it looks like.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where everything goes: a new or an empty folder.",
)
@comparison_options
@click.argument("target", nargs=-1, type=click.UNPROCESSED, metavar="TARGET [ARGS]...")
def compare(
    *,
    target: tuple[str, ...],
    after_dashes: bool,
    words: tuple[str, ...],
    levels: str,
    max_steps: int,
    repeat: int,
    seed: int | None,
    metric: str | None,
    module: bool,
    as_kind: Kind | None,
    out: Path | None,
    format_name: str,
    **limits: float | str,
) -> None:
    r"""Run TARGET at several levels, each in a process of its own, and say which level to take.

    Losses are laid over one another and held against what the baseline differs from itself. The verdict can be to stay
    on the baseline. What the script prints goes into files beside the records.

    \b
      mpx compare train.py --epochs 1
      mpx compare --levels O0,O1,mine.yaml --max-steps 500 --metric 'accuracy: (\S+)' train.py
    """
    del words
    if not target:
        raise UsageError(
            "there is nothing to run. Expected a script, `-m` and a module, or `--` and a command"
        )
    if is_disabled(os.environ):
        raise UsageError(
            "MPX_DISABLE is set, so there would be nothing to compare", hint="`unset MPX_DISABLE`"
        )
    what = detect(target, module=module, after_dashes=after_dashes, as_kind=as_kind)
    pattern = _pattern(metric)
    plan = Plan(
        levels=_levels(levels),
        repeat=repeat,
        words=(
            *(["-m"] if module else []),
            *(["--as", as_kind] if as_kind else []),
            *(["--"] if after_dashes else []),
            *target,
        ),
        max_steps=max_steps,
        folder=_folder(out, what.name),
    )
    environ = dict(os.environ)
    if seed is not None:
        environ["PYTHONHASHSEED"] = str(seed)
    trials = list(_trials(plan, environ, pattern))
    result = write_comparison(trials, settings_from_options(limits), plan.folder, format_name)
    if pattern is not None and all(trial.metric is None for trial in trials):
        _say(f"no line of any run's stdout matches `{metric}`")
    if result.verdict is None:
        raise click.exceptions.Exit(NO_COMPARISON)


def _levels(text: str) -> tuple[str, ...]:
    """Return the levels, each one that resolves: a mistake in the last must not cost the first runs."""
    from mpx.presets import resolve

    levels = tuple(level.strip() for level in text.split(",") if level.strip())
    if len(levels) < 2 or len(set(levels)) < len(levels):
        raise UsageError(
            f"`--levels {text}` compares nothing. Expected at least two different levels, the baseline first",
            hint="for example `--levels O0,O1,O2`",
        )
    for level in levels:
        resolve(level, cwd=Path.cwd(), asked_by="--levels")
    return levels


def _pattern(metric: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(metric) if metric is not None else None
    except re.error as error:
        raise UsageError(f"`--metric {metric}` is no regular expression: {error}") from None


def _folder(out: Path | None, name: str) -> Path:
    if out is not None and out.is_dir() and any(out.iterdir()):
        raise RecordError(f"the folder `{out}` is not empty. Expected a new or an empty one")
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", Path(name).stem)
    folder = (out or Path(".mpx") / "compare" / f"{stamp}-{stem}-{os.urandom(2).hex()}").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if out is None:
            (folder.parent.parent / ".gitignore").write_text("*\n", encoding="utf-8")
    except OSError as error:
        raise RecordError(
            f"cannot write `{folder}`: {error.strerror or error}", hint="name another with `--out`"
        ) from None
    return folder


def _trials(plan: Plan, environ: dict[str, str], pattern: re.Pattern[str] | None) -> Iterable[Trial]:
    from mpx.report.compare import Trial
    from mpx.report.headline import headline

    planned = list(turns(plan))
    for number, turn in enumerate(planned, 1):
        _say(f"[{number}/{len(planned)}] {turn.level}")
        try:
            code = run_turn(plan, turn, environ)
        except KeyboardInterrupt:
            _say(f"interrupted; what there is lies in `{plan.folder}`")
            raise click.exceptions.Exit(INTERRUPTED) from None
        if code:
            _tell_failure(turn, code)
        with suppress(RecordError):
            record = RunDirectory.open(turn.record).record()
            _say("    " + " | ".join(headline(record)))
            yield Trial(turn.level, record, _metric(turn, pattern))


def _tell_failure(turn: Turn, code: int) -> None:
    with suppress(OSError):
        for line in turn.stderr.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES_TOLD:]:
            click.echo(f"    {line}", err=True)
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    _say(f"    ended with {how}; all it said is in `{turn.stderr}`")


def _metric(turn: Turn, pattern: re.Pattern[str] | None) -> float | None:
    """Return the number in the last matching line: the pattern's first group, else the last number of the match."""
    if pattern is None:
        return None
    text = turn.stdout.read_text(encoding="utf-8", errors="replace")
    found = [match for line in text.splitlines() if (match := pattern.search(line))]
    if not found:
        return None
    last = found[-1]
    numbers = _NUMBER.findall(last[1] or "" if last.re.groups else last[0])
    value = float(numbers[-1]) if numbers else math.nan
    return value if numbers else None


def _say(text: str) -> None:
    click.echo(f"mpx: {text}", err=True)
    sys.stderr.flush()
