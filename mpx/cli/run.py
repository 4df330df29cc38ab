"""`mpx run`: from the command line to the exit status of the script."""

from __future__ import annotations

import dataclasses
import importlib
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpx.cli.policy_options import policy_options, resolve_from_options
from mpx.cli.rank_options import rank_options, take_ranks
from mpx.cli.verdicts import GATE_FAILED, Gates, read_gates, tell_github
from mpx.errors import RecordError, UsageError
from mpx.launch.placement import is_disabled, is_first_rank, outer_run, rank_key, require_same
from mpx.launch.run import Order, check_ops, run_as_rank, run_supervised
from mpx.launch.supervise import Beat, child_environment, mirror, replace
from mpx.launch.target import KINDS, Kind, Target, detect, isolation
from mpx.record import RunDirectory

if TYPE_CHECKING:
    from mpx.record import RunRecord
    from mpx.report.files import ReportFile

__all__ = ["TargetCommand", "run"]

# An exit code of ours: only ever in place of the target's 0.
NOTHING_INSTRUMENTED = 97

Say = Callable[[str], None]


class TargetCommand(click.Command):
    """A command that knows whether `--` stood before its target: click itself drops it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = tuple(args)
        rest = super().parse_args(ctx, args)
        before_target = len(words) - len(ctx.params["target"]) - 1
        ctx.params["after_dashes"] = before_target >= 0 and words[before_target] == "--"
        ctx.params["words"] = words
        return rest


@click.command(
    cls=TargetCommand,
    context_settings={"allow_interspersed_args": False},
    epilog="What stands after TARGET is the target's own, options and `--` too. The exit status is the target's. "
    "MPX_DISABLE=1 in the environment turns mpx off; MPX_TRACEBACK=full shows its frames in tracebacks.",
)
@policy_options
@click.option("-m", "--module", is_flag=True, help="TARGET is a module, as for `python -m`.")
@click.option("--as", "as_kind", type=click.Choice(KINDS), help="What TARGET is, whatever it looks like.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the record goes: a new or an empty folder.",
)
@rank_options
@click.option(
    "--require-instrumented",
    is_flag=True,
    help=f"Exit with {NOTHING_INSTRUMENTED} when the target succeeds and mpx has had nothing to do.",
)
@click.option(
    "--ci",
    type=click.Choice(["auto", "github", "off"]),
    default="auto",
    help="Annotate the log and write the job's summary; auto: where GITHUB_STEP_SUMMARY is set.",
)
@click.option(
    "--report",
    "reports",
    metavar="FORMAT[:PATH]",
    multiple=True,
    help="Also write a report at the end, into the record's folder or to PATH; repeatable. "
    "`mpx report --help` lists the formats.",
)
@click.option(
    "--progress",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    help="Say on stderr how far the run is, in a line every so many seconds.",
)
@click.option("-q", "--quiet", count=True, help="Report in one line; -qq: not at all.")
@click.option("-v", "--verbose", count=True, help="Say what is started; report at length.")
@click.argument("target", nargs=-1, type=click.UNPROCESSED, metavar="TARGET [ARGS]...")
def run(
    *,
    target: tuple[str, ...],
    after_dashes: bool,
    words: tuple[str, ...],
    module: bool,
    as_kind: Kind | None,
    out: Path | None,
    require_instrumented: bool,
    ci: str,
    reports: tuple[str, ...],
    progress: float | None,
    quiet: int,
    verbose: int,
    **choices: Any,
) -> None:
    """Run TARGET in mixed precision, then report on stderr what the precision did.

    TARGET is a Python script, a folder or zip with `__main__.py`, a module after -m, or any command after `--`:
    every Python below it is followed.

    \b
      mpx run --opt-level O1 train.py --epochs 3
      mpx run -O O2 --dtype bfloat16 -m pkg.train --lr 3e-4
      mpx run -O O1 --nproc 2 train.py
      mpx run -O O1 -- torchrun --nproc-per-node 2 train.py
    """  # noqa: D301 - click's own sign, the character
    if not target:
        raise UsageError(
            "there is nothing to run. Expected a script, `-m` and a module, or `--` and a command"
        )
    what = detect(target, module=module, after_dashes=after_dashes, as_kind=as_kind)
    what = take_ranks(what, choices)
    wanted = _report_files(reports)

    def say(text: str) -> None:
        if quiet < 2:
            with suppress(OSError):  # nobody reads stderr: no reason to lose the target's exit status
                click.echo(f"mpx: {text}", err=True)

    if verbose:
        say(f"starts the {what.kind} `{shlex.join(what.argv)}`")
    _leave_if_disabled(what, say, required=require_instrumented)
    _leave_if_nested(what, choices, say, wanted)

    resolved = resolve_from_options(choices, Path.cwd())
    isolated = isolation(what)
    order = Order(
        target=what,
        word=target[0],
        command=("mpx", "run", *words),
        preset=resolved.policy.to_dict(),
        origin=resolved.origin,
        op_groups=resolved.op_groups,
        notices=(*resolved.warnings, *([isolated] if isolated else [])),
    )
    if resolved.project_file is not None:
        say(f"uses the project file `{resolved.project_file}`")
    for notice in order.notices:
        say(notice)
    gates = read_gates(resolved.policy.gates, Path.cwd(), origin=resolved.origin["gates"])
    check_ops(resolved.unlisted_ops, os.environ)
    asked = {
        "--require-instrumented": require_instrumented,
        "--fail-on": choices["fail_on"],
        "--report": wanted,
        "--progress": progress,
    }
    needs_an_end = next((option for option, value in asked.items() if value), None)
    _leave_as_rank(order, out, say, needs_an_end=needs_an_end)

    directory = RunDirectory.create(out, cwd=Path.cwd(), target_name=what.name, level=order.level)
    if directory.notice is not None:
        say(directory.notice)
    order.write_to(directory)
    beat = _beat(progress, directory, say)
    ending = run_supervised(order, directory, os.environ, beat=beat, meanwhile=_load_report)
    record = _conclude(directory, gates, wanted, say, quiet=quiet, verbose=verbose)
    if record is not None and (ci == "github" or (ci == "auto" and os.environ.get("GITHUB_STEP_SUMMARY"))):
        tell_github(record, directory, os.environ, say, quiet=quiet > 1)
    if ending.returncode == 0 and (own := _own_exit(record, gates, required=require_instrumented)):
        code, why = own
        say(f"exit code {code}: {why}")
        ending = dataclasses.replace(ending, returncode=code)
    mirror(ending)


def _leave_if_disabled(what: Target, say: Say, *, required: bool) -> None:
    if not is_disabled(os.environ):
        return
    if required:
        raise UsageError(
            "`--require-instrumented` and `MPX_DISABLE` contradict each other. Expected one of the two",
            hint="`unset MPX_DISABLE`",
        )
    say("off, because MPX_DISABLE is set")
    replace(what, os.environ)


def _leave_if_nested(what: Target, choices: dict[str, Any], say: Say, wanted: list[ReportFile]) -> None:
    outer = outer_run(os.environ)
    if outer is None:
        return
    if any(value is not None and value != () for value in choices.values()):
        require_same(resolve_from_options(choices, Path.cwd()).policy.to_dict(), outer)
    if wanted:
        say(f"`--report` is left to the run around this one: `mpx report {outer.path}` writes it")
    replace(what, child_environment(outer.path, os.environ))


def _leave_as_rank(order: Order, out: Path | None, say: Say, *, needs_an_end: str | None) -> None:
    key = rank_key(os.environ)
    if key is None:
        return
    if needs_an_end is not None:
        raise UsageError(
            f"`{needs_an_end}` needs an `mpx run` that outlives the target. Received one rank of a launcher",
            hint=f"put mpx before the launcher: `mpx run {needs_an_end} ... -- torchrun ... train.py`",
        )
    if order.preset["gates"]:
        say("gates are judged when all ranks have ended: `mpx report --fail-on EXPR` does that")
    name, level = order.target.name, order.level
    if out is None:
        directory = RunDirectory.join(key, cwd=Path.cwd(), target_name=name, level=level)
    else:
        try:
            directory = RunDirectory.create(out, cwd=Path.cwd(), target_name=name, level=level)
        except RecordError:
            directory = RunDirectory.open(out)  # another rank was first
    order.write_to(directory)  # the same from every rank, each file in one rename
    if is_first_rank(os.environ):
        say(f"{level} on every rank; when they have ended, `mpx report {directory.path}` reports")
    run_as_rank(order, directory, os.environ)


def _beat(every_s: float | None, directory: RunDirectory, say: Say) -> Beat | None:
    if every_s is None:
        return None
    from mpx.report.progress import progress_line

    return Beat(every_s, lambda: say(progress_line(directory.record())))


def _load_report() -> None:
    """Load what the end of the run will need, while there is time."""
    with suppress(Exception):  # it is told when the report is made
        importlib.import_module("mpx.record.fold")
        importlib.import_module("mpx.report.formats.terminal")


def _report_files(texts: tuple[str, ...]) -> list[ReportFile]:
    if not texts:
        return []
    from mpx.report.files import parse_report

    return [parse_report(text) for text in texts]


def _conclude(
    directory: RunDirectory, gates: Gates, wanted: list[ReportFile], say: Say, *, quiet: int, verbose: int
) -> RunRecord | None:
    """Write the record and show the report; None if that failed, which must not change how the run ends."""
    try:
        from mpx.report import Options, render, with_findings

        record = with_findings(gates.judged(directory.record()))
        gates.write(record, directory)
        directory.write_record(record)
        if quiet < 2:
            verbosity = -1 if quiet else verbose
            options = Options.for_stream(sys.stderr, os.environ, verbosity=verbosity, run_path=directory.path)
            click.echo(render(record, options), nl=False, err=True, color=options.color)
        if wanted:
            from mpx.report.files import write_reports

            for path in write_reports(record, wanted, into=directory.path, say=say):
                say(f"wrote `{path}`")
    except Exception as error:  # noqa: BLE001 - a fault in the report, of whatever kind, must not cost the run
        say(f"the report failed; `mpx report {directory.path}` tries again: {error!r}")
        return None
    return record


def _own_exit(record: RunRecord | None, gates: Gates, *, required: bool) -> tuple[int, str] | None:
    """Return the exit code that takes the place of the target's 0, and why; None to leave it."""
    from mpx.report.facts import working

    if required and (record is None or not working(record)):
        return NOTHING_INSTRUMENTED, "nothing was instrumented, and `--require-instrumented` was given"
    if record is None:
        return (GATE_FAILED, "no gate could be judged") if gates.gates else None
    if record.stopped is not None and record.stopped.reason == "abort-on":
        return GATE_FAILED, "the run was aborted, and the target returned 0 all the same"
    failed = sum(not verdict.passed for verdict in record.gates)
    return (GATE_FAILED, f"{failed} of {len(record.gates)} gates failed") if failed else None
