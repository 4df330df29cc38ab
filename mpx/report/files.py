"""Reports as files: which were asked for, where they go, and writing them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from mpx.errors import RecordError, UsageError
from mpx.record.model import RunRecord
from mpx.record.shards import write_atomically
from mpx.report.formats import FORMATS, Options, render
from mpx.values import frozen

__all__ = ["ReportFile", "format_of", "parse_report", "write_report", "write_reports"]


@frozen
class ReportFile:
    """A report that is to be written; without a path it goes into the run directory, under its format's name."""

    format_name: str
    path: Path | None = None


def parse_report(text: str) -> ReportFile:
    """Return what `FORMAT` or `FORMAT:PATH` asks for.

    Raises:
        UsageError: There is no such format, or nothing stands after the colon.
    """
    name, colon, path = text.partition(":")
    if name not in FORMATS:
        raise UsageError(f"there is no report format `{name}`. Expected one of: {', '.join(FORMATS)}")
    if colon and not path:
        raise UsageError(
            f"there is no path in `{text}`. Expected `{name}:PATH`, or `{name}` for the run directory"
        )
    return ReportFile(name, Path(path) if path else None)


def format_of(path: Path) -> str | None:
    """Return the format that a file of this name holds, by its suffix; None when none does."""
    suffixes = {Path(row.file_name).suffix: name for name, row in FORMATS.items()}
    return suffixes.get(path.suffix.lower())


def write_report(record: RunRecord, wanted: ReportFile, options: Options, *, into: Path) -> Path:
    """Write one report and return its path, which is inside `into` or inside the folder that was named.

    Raises:
        RecordError: The disk refuses.
    """
    path = wanted.path or into
    if path.is_dir():
        path /= FORMATS[wanted.format_name].file_name
    text = render(record, replace(options, color=False, unicode=True), format_name=wanted.format_name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _put(path, text)
    except OSError as error:
        raise RecordError(f"the report cannot be written: `{path}`: {error.strerror or error}") from None
    return path


def write_reports(
    record: RunRecord, wanted: Iterable[ReportFile], *, into: Path, say: Callable[[str], None]
) -> list[Path]:
    """Write each report and return the paths; one that cannot be written is one line, and the others go on."""
    written = (_written_or_told(record, item, into=into, say=say) for item in wanted)
    return [path for path in written if path is not None]


def _written_or_told(
    record: RunRecord, wanted: ReportFile, *, into: Path, say: Callable[[str], None]
) -> Path | None:
    try:
        return write_report(record, wanted, Options(verbosity=1, run_path=into), into=into)
    except RecordError as error:
        say(error.message)
    except Exception as error:  # noqa: BLE001 - a fault in a report, of whatever kind, must not cost the run
        say(f"the {wanted.format_name} report failed: {error!r}")
    return None


def _put(path: Path, text: str) -> None:
    # Renaming over a device or a link (`/dev/stdout`) would replace it.
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
    else:
        write_atomically(path, text)
