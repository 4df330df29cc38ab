"""`mpx watch`: a run while it goes on, from another shell. It only reads what the run writes."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import click

from mpx.record import RunDirectory, RunRecord, find_run
from mpx.record.life import is_going_on
from mpx.report import Options, render, with_findings
from mpx.report.progress import progress_line

__all__ = ["watch"]

INTERRUPTED = 130
LOOK_EVERY_S = 1.0


@click.command()
@click.argument("run", required=False, metavar="[RUN]")
@click.option(
    "--every",
    type=click.FloatRange(min=0.1),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to print a line where stdout is no terminal.",
)
def watch(*, run: str | None, every: float) -> None:
    """Watch RUN until it ends; without a name the latest run here.

    On a terminal the report is shown anew as its numbers come, elsewhere a line every few seconds. What is shown is at
    most as old as the preset's `flush_interval_s`. Watching changes nothing: end it with Ctrl-C when you like.
    """
    directory = find_run(run, Path.cwd())
    options = Options.for_stream(sys.stdout, os.environ, run_path=directory.path)
    try:
        if options.color:
            _live(directory, options)
        else:
            _lines(directory, every)
            _line(render(with_findings(directory.record()), replace(options, verbosity=-1)))
    except KeyboardInterrupt:
        raise click.exceptions.Exit(INTERRUPTED) from None


def _lines(directory: RunDirectory, every: float) -> None:
    told = None
    while True:
        record = directory.record()
        line = progress_line(record)
        if line != told:
            told = line
            _line(f"mpx  {line}\n")
        if not _sleep(directory, record, every):
            return


def _live(directory: RunDirectory, options: Options) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=sys.stdout)
    with Live(console=console, auto_refresh=False) as view:
        while True:
            record = directory.record()
            view.update(Text.from_ansi(render(with_findings(record), options)), refresh=True)
            if not _sleep(directory, record, LOOK_EVERY_S):
                return


def _sleep(directory: RunDirectory, record: RunRecord, seconds: float) -> bool:
    """Wait while the run goes on; return whether it did."""
    until = time.monotonic() + seconds
    while is_going_on(directory, record):
        left = until - time.monotonic()
        if left <= 0:
            return True
        time.sleep(min(left, LOOK_EVERY_S))
        record = directory.record()
    return False


def _line(text: str) -> None:
    click.echo(text, nl=False)
    sys.stdout.flush()
