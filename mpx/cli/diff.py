"""`mpx diff`: two runs that there are, held against each other."""

from __future__ import annotations

from pathlib import Path

import click

from mpx.cli.comparing import comparison_options, settings_from_options, write_comparison
from mpx.record import RunRecord, find_run
from mpx.report.compare import Trial
from mpx.report.facts import level

__all__ = ["diff"]


@click.command()
@click.argument("run_a", metavar="RUN_A")
@click.argument("run_b", metavar="RUN_B")
@comparison_options
def diff(*, run_a: str, run_b: str, format_name: str, **limits: float | str) -> None:
    """Compare RUN_B with RUN_A, the baseline.

    A run is a run directory, a part of its name, or `latest`. Two runs do not tell how far the baseline is from itself:
    `mpx compare --repeat 2` makes runs that do.
    """
    cwd = Path.cwd()
    first, second = find_run(run_a, cwd), find_run(run_b, cwd)
    records = first.record(), second.record()
    names = _names(records, (first.path, second.path))
    trials = [Trial(name, record) for name, record in zip(names, records, strict=True)]
    write_comparison(trials, settings_from_options(limits), None, format_name)


def _names(records: tuple[RunRecord, RunRecord], paths: tuple[Path, Path]) -> tuple[str, str]:
    """Return the levels where they differ, else the names of the folders, else what still tells them apart."""
    for a, b in (tuple(map(level, records)), tuple(path.name for path in paths)):
        if a != b:
            return a, b
    return "A", "B"
