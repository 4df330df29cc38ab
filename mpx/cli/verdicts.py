"""Gates on the command line: read before anything starts, judged at the end, told to whoever runs the job."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mpx.errors import Problem, UsageError
from mpx.gates import Gate, GateError, parse_gate
from mpx.record import RunDirectory, find_run
from mpx.values import frozen

if TYPE_CHECKING:
    from mpx.record import RunRecord

__all__ = ["GATE_FAILED", "Gates", "gates_of_option", "read_gates", "tell_github"]

GATE_FAILED = 96
_SUMMARY = "GITHUB_STEP_SUMMARY"


@frozen
class Gates:
    """Gates with the runs that they compare with, and where they were asked for."""

    gates: tuple[Gate, ...] = ()
    baselines: Mapping[str, RunRecord] = field(default_factory=dict)
    origin: str = ""

    def judged(self, record: RunRecord) -> RunRecord:
        """Return the record with the verdicts of these gates after those that it has."""
        if not self.gates:
            return record
        from mpx.report.gates import judge

        verdicts = judge(self.gates, record, baselines=self.baselines, origin=self.origin)
        return replace(record, gates=[*record.gates, *verdicts])

    def write(self, record: RunRecord, directory: RunDirectory) -> None:
        """Write the verdicts where the record is folded from: what they compared with may change or go."""
        if self.gates:
            directory.shard("supervisor").write({"event": "gates", "verdicts": record.gates})


def read_gates(texts: Iterable[str], cwd: Path, *, origin: str) -> Gates:
    """Return the gates of a preset, with the runs that they compare with as these are now.

    Raises:
        RecordError: A gate names a run that there is not.
    """
    gates = tuple(parse_gate(text) for text in texts)
    named = {gate.run for gate in gates if gate.run is not None}
    return Gates(gates, {name: find_run(name, cwd).record() for name in sorted(named)}, origin)


def gates_of_option(texts: Iterable[str], cwd: Path, *, option: str = "--fail-on") -> Gates:
    """Return the gates that an option asks for, where there is no preset to hold them.

    Raises:
        UsageError: An expression is none.
        RecordError: A gate names a run that there is not.
    """
    texts = list(texts)
    problems = [problem for text in texts if (problem := _problem(text, option)) is not None]
    if problems:
        raise UsageError("\n".join(str(problem) for problem in problems))
    return read_gates(texts, cwd, origin=option)


def tell_github(
    record: RunRecord,
    directory: RunDirectory,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    *,
    quiet: bool,
) -> None:
    """Add the report to the summary of the job and annotate its log.

    Workflow commands are read from both streams; stdout is the script's.
    """
    from mpx.report import Options, render
    from mpx.report.github import workflow_commands

    if not quiet:
        for line in workflow_commands(record):
            click.echo(line, err=True)
    path = environ.get(_SUMMARY)
    if not path:
        return
    text = render(record, Options(verbosity=0, unicode=True, run_path=directory.path), format_name="markdown")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        with os.fdopen(descriptor, "a", encoding="utf-8") as summary:
            summary.write(f"{text}\n")
    except OSError as error:
        say(f"the summary of the job cannot be written: `{path}`: {error.strerror or error}")


def _problem(text: str, option: str) -> Problem | None:
    try:
        parse_gate(text)
    except GateError as error:
        caret = error.position + 1
        return Problem(option, "", error.what, error.expected, None, error.suggestion, text, caret)
    return None
