"""`mpx report`: the report of a run, again, whenever and in whatever form."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from mpx.cli.verdicts import GATE_FAILED, gates_of_option
from mpx.record import RunDirectory, find_run
from mpx.record.combine import combine
from mpx.report import FORMATS, Options, render, with_findings
from mpx.report.files import ReportFile, format_of, write_report

__all__ = ["report"]

_FORMATS = "; ".join(f"{name}: {row.holds}" for name, row in FORMATS.items())


def _print_schema(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value:
        from mpx.record.schema import record_schema_text

        click.echo(record_schema_text(), nl=False)
        ctx.exit()


@click.command(epilog=f"Formats: {_FORMATS}.")
@click.argument("run", required=False, metavar="[RUN]")
@click.option(
    "--format",
    "format_name",
    type=click.Choice(list(FORMATS)),
    help="What to write. Default: what the suffix of --output says, else terminal.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Write a file, or into a folder, instead of stdout.",
)
@click.option(
    "--fail-on",
    metavar="EXPR",
    multiple=True,
    help=f"Exit with {GATE_FAILED} when this is true of the run: `overflow_rate>5%`, or a name alone if there must "
    "be none; repeatable.",
)
@click.option(
    "--combine",
    "nodes",
    type=click.Path(path_type=Path),
    metavar="DIR",
    multiple=True,
    help="Count the run in DIR too: that of another node of the same job; repeatable.",
)
@click.option("-q", "--quiet", is_flag=True, help="One line.")
@click.option("-v", "--verbose", is_flag=True, help="The whole report, with tables.")
@click.option(
    "--schema",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_schema,
    help="Print the JSON schema of a record (run.json, and --format json) and exit.",
)
def report(
    *,
    run: str | None,
    format_name: str | None,
    output: Path | None,
    fail_on: tuple[str, ...],
    nodes: tuple[Path, ...],
    quiet: bool,
    verbose: bool,
) -> None:
    """Report what the precision did in RUN.

    RUN is a run directory or a part of its name; without it, the latest run here. The report is made anew from what
    the processes left, so it works while a run goes on, and after one that was killed. --combine makes one report of
    the runs of several nodes.
    """
    if quiet and verbose:
        raise click.UsageError("`--quiet` and `--verbose` contradict each other. Expected one of them")
    others = [RunDirectory.open(path) for path in nodes]
    if nodes and run is not None:
        others.insert(0, find_run(run, Path.cwd()))
    directory = others[0] if others else find_run(run, Path.cwd())
    gates = gates_of_option(fail_on, Path.cwd())
    record = with_findings(gates.judged(combine(others) if len(others) > 1 else directory.record()))
    asked = record.gates[len(record.gates) - len(gates.gates) :]
    verbosity = -1 if quiet else int(verbose)
    options = Options.for_stream(sys.stdout, os.environ, verbosity=verbosity, run_path=directory.path)
    name = format_name or (format_of(output) if output else None) or "terminal"
    if output is not None:
        written = write_report(record, ReportFile(name, output), options, into=directory.path)
        click.echo(f"mpx: wrote `{written}`", err=True)
    else:
        text = render(record, options, format_name=name)
        # Only the terminal format minds the encoding of the stream; the others are files, in UTF-8.
        click.echo(text if name == "terminal" else text.encode(), nl=False)
    if not all(verdict.passed for verdict in asked):
        raise click.exceptions.Exit(GATE_FAILED)
