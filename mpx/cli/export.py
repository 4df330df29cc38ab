"""`mpx export`: the series of a run in the form that another tool reads."""

from __future__ import annotations

from pathlib import Path

import click

from mpx.record import find_run
from mpx.report import Options, render, with_findings
from mpx.report.files import ReportFile, write_report

__all__ = ["export"]


@click.command()
@click.argument("run", required=False, metavar="[RUN]")
@click.option("--to", "form", type=click.Choice(["csv", "tensorboard"]), required=True, help="What to write.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="A file for csv (default: stdout), a folder for tensorboard (default: `tensorboard` in the record's folder).",
)
def export(*, run: str | None, form: str, output: Path | None) -> None:
    """Write the losses, loss scales, step times, memory and overflows of RUN for other tools.

    RUN is a run directory or a part of its name; without it, the latest run here. The csv is that of `mpx report`.
    """
    directory = find_run(run, Path.cwd())
    record = with_findings(directory.record())
    options = Options(verbosity=1, run_path=directory.path)
    if form == "tensorboard":
        from mpx.report.tensorboard import write_events

        folder = output or directory.path / "tensorboard"
        number = write_events(record, folder)
        click.echo(f"mpx: wrote {number:,} points: `tensorboard --logdir {folder}`", err=True)
    elif output is None:
        click.echo(render(record, options, format_name=form).encode(), nl=False)
    else:
        written = write_report(record, ReportFile(form, output), options, into=directory.path)
        click.echo(f"mpx: wrote `{written}`", err=True)
