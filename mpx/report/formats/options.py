"""How a report is to look: for which stream, how wide, how long."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from mpx.values import frozen

__all__ = ["Options"]

PLAIN_WIDTH = 100
WIDEST = 120
NARROWEST = 60


@frozen
class Options:
    """What a format needs to know besides the record.

    `verbosity` is -1 for one line, 0 for the short report, 1 for the long one. `encoding` is that of the stream: a
    character of the script's that it does not have is written as its escape.
    """

    verbosity: int = 0
    color: bool = False
    unicode: bool = False
    width: int = PLAIN_WIDTH
    encoding: str = "utf-8"
    run_path: Path | None = None

    @classmethod
    def for_stream(
        cls, stream: TextIO, environ: Mapping[str, str], *, verbosity: int = 0, run_path: Path | None = None
    ) -> Options:
        """Return the options that suit `stream`.

        A terminal gets colours, bars and its own width. Anything else, `NO_COLOR`, `CI` and `TERM=dumb` get plain
        ASCII of a fixed width; `FORCE_COLOR` makes a terminal of anything.
        """
        encoding = getattr(stream, "encoding", None) or "ascii"
        forced = bool(environ.get("FORCE_COLOR"))
        plain = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb" or bool(environ.get("CI"))
        if environ.get("NO_COLOR") or not (forced or (stream.isatty() and not plain)):
            return cls(verbosity, encoding=encoding, run_path=run_path)
        import shutil  # it loads all that it can unpack, 2 ms, and most reports are plain

        width = shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns
        return cls(
            verbosity,
            color=True,
            unicode=_has_bars(encoding),
            width=max(NARROWEST, min(WIDEST, width)),
            encoding=encoding,
            run_path=run_path,
        )


def _has_bars(encoding: str) -> bool:
    try:
        "▁█→·×".encode(encoding)  # noqa: RUF001  (these are the characters in question)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
