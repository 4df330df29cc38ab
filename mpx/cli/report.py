"""`mpx report`: the report of a run, again, whenever and in whatever form."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from mpx.record import find_run
from mpx.report import FORMATS, Options, render, with_findings

__all__ = ["report"]


@click.command()
@click.argument("run", required=False, metavar="[RUN]")
@click.option(
    "--format",
    "format_name",
    type=click.Choice(list(FORMATS)),
    default="terminal",
    show_default=True,
    help="What to write on stdout.",
)
@click.option("-q", "--quiet", is_flag=True, help="One line.")
@click.option("-v", "--verbose", is_flag=True, help="The whole report, with tables.")
def report(*, run: str | None, format_name: str, quiet: bool, verbose: bool) -> None:
    """Report what the precision did in RUN.

    RUN is a run directory or a part of its name; without it, the latest run here. The report is made anew from what
    the processes left, so it works while a run goes on, and after one that was killed.
    """
    if quiet and verbose:
        raise click.UsageError("`--quiet` and `--verbose` contradict each other. Expected one of them")
    directory = find_run(run, Path.cwd())
    verbosity = -1 if quiet else int(verbose)
    options = Options.for_stream(sys.stdout, os.environ, verbosity=verbosity, run_path=directory.path)
    click.echo(render(with_findings(directory.record()), options, format_name=format_name), nl=False)
