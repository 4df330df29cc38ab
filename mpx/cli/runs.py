"""`mpx runs`: the runs that lie here: which there are, what they take, and being rid of them."""

from __future__ import annotations

import re
import time
from pathlib import Path

import click

from mpx.errors import MpxError, RecordError, UsageError
from mpx.record import RunDirectory, RunRecord, find_run
from mpx.record.find import all_runs_here
from mpx.record.life import is_going_on, remove_run, size_of, strangers
from mpx.report import wording
from mpx.report.facts import last_loss, level, program
from mpx.report.headline import ending
from mpx.report.wording import printable

__all__ = ["runs"]

_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


@click.group()
def runs() -> None:
    """List, show and delete the runs below `.mpx/runs`."""


@runs.command("list")
@click.option("--paths", is_flag=True, help="Only the paths, one a line.")
def list_command(*, paths: bool) -> None:
    """List the runs here, the newest last."""
    rows: list[tuple[str, ...]] = [("run", "level", "script", "steps", "last loss", "ended", "size")]
    for directory in _known():
        if paths:
            click.echo(str(directory.path))
        else:
            rows.append(_row(directory))
    if paths:
        return
    if len(rows) == 1:
        click.echo("mpx: no runs here", err=True)
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@runs.command("show")
@click.argument("run", required=False, metavar="[RUN]")
def show_command(*, run: str | None) -> None:
    """Show what RUN was, and the files that it left; `mpx report RUN` shows what the precision did."""
    directory = find_run(run, Path.cwd())
    record = directory.record()
    facts = {
        "path": str(directory.path),
        "command": " ".join(record.command),
        "level": level(record),
        "started": record.started or "?",
        "folder": record.cwd or "?",
        "ended": _ended(directory, record),
        "steps": f"{record.steps.attempted:,}",
        "size": wording.bytes_(size_of(directory)),
    }
    for name, value in facts.items():
        click.echo(f"{name:<8} {printable(value)}")
    for path in sorted(path for path in directory.path.rglob("*") if path.is_file()):
        click.echo(f"file     {path.relative_to(directory.path)}  {wording.bytes_(path.stat().st_size)}")


@runs.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--force", is_flag=True, help="Also a run that goes on, or a folder with files that are not mpx's."
)
def rm_command(*, names: tuple[str, ...], force: bool) -> None:
    """Delete runs by name or path."""
    found = [find_run(name, Path.cwd()) for name in names]  # all of them, before one is deleted
    for directory in found:
        if not force:
            _require_removable(directory)
    for path in dict.fromkeys(directory.path for directory in found):
        remove_run(RunDirectory(path))
        click.echo(f"mpx: deleted `{path}`", err=True)


@runs.command("prune")
@click.option("--keep", type=click.IntRange(0), metavar="N", help="Keep the newest N.")
@click.option("--older-than", metavar="AGE", help="Delete only what is older than this: `12h`, `30d`, `8w`.")
@click.option("--dry-run", is_flag=True, help="Say what would be deleted.")
def prune_command(*, keep: int | None, older_than: str | None, dry_run: bool) -> None:
    """Delete old runs below `.mpx/runs`; never one that goes on, nor a folder with files that are not mpx's."""
    if keep is None and older_than is None:
        raise UsageError(
            "nothing says which runs to delete. Expected `--keep N`, `--older-than AGE` or both",
            hint="`mpx runs prune --keep 20`",
        )
    age = _age(older_than) if older_than is not None else 0.0
    known = _known()
    old = [directory for directory in known[: len(known) - (keep or 0)] if _seconds_old(directory) >= age]
    freed = 0
    for directory in old:
        try:
            _require_removable(directory)
        except MpxError as error:
            click.echo(f"mpx: kept: {error.message}", err=True)
            continue
        freed += size_of(directory)
        if not dry_run:
            remove_run(directory)
        click.echo(f"mpx: {'would delete' if dry_run else 'deleted'} `{directory.path.name}`", err=True)
    click.echo(f"mpx: {wording.bytes_(freed)} {'would be freed' if dry_run else 'freed'}", err=True)


def _known() -> list[RunDirectory]:
    """Return the runs here, the oldest first."""
    paths = sorted(all_runs_here(Path.cwd()), key=lambda path: (path.stat().st_mtime, path.name))
    return [RunDirectory(path) for path in paths]


def _row(directory: RunDirectory) -> tuple[str, ...]:
    try:
        record = directory.record()
    except RecordError as error:
        return directory.path.name, "", "", "", "", f"damaged: {error.message}", ""
    last = last_loss(record)
    return (
        directory.path.name,
        level(record),
        printable(program(record)),
        f"{record.steps.attempted:,}",
        "" if last is None else wording.loss(last),
        _ended(directory, record),
        wording.bytes_(size_of(directory)),
    )


def _ended(directory: RunDirectory, record: RunRecord) -> str:
    return "goes on" if is_going_on(directory, record) else ending(record)


def _require_removable(directory: RunDirectory) -> None:
    name = directory.path.name
    if others := strangers(directory):
        named = ", ".join(f"`{other}`" for other in others[:3])
        raise RecordError(
            f"`{name}` holds files that mpx did not write: {named}", hint="`--force` deletes them too"
        )
    try:
        record = directory.record()
    except RecordError:
        return
    if is_going_on(directory, record):
        raise RecordError(f"`{name}` goes on", hint="`--force` deletes it all the same")


def _seconds_old(directory: RunDirectory) -> float:
    return time.time() - directory.path.stat().st_mtime


def _age(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text.strip())
    if match is None:
        raise UsageError(f"`{text}` is no age. Expected for example `12h`, `30d` or `8w`")
    return float(match[1]) * _UNITS[match[2]]
