"""One record of several run directories: nodes that each had an `mpx run` of their own and no folder in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpx.errors import RecordError
from mpx.record.directory import RunDirectory
from mpx.record.fold import fold
from mpx.record.model import RunRecord
from mpx.record.retention import Event

__all__ = ["combine"]

_OF_THE_RUN = frozenset({"run", "preset", "exit", "gates"})


def combine(directories: Sequence[RunDirectory]) -> RunRecord:
    """Return the record of a job whose nodes left a run directory each.

    Raises:
        RecordError: They ran at different presets.
    """
    return fold(_events(directories))


def _events(directories: Sequence[RunDirectory]) -> Iterator[Event]:
    """Yield the events of all; what is said once a run comes from the first, the ending from the worst."""
    first, *others = directories
    preset, _ = first.read_preset()
    for other in others:
        if other.read_preset()[0] != preset:
            raise RecordError(
                f"`{other.path}` and `{first.path}` ran at different presets. Expected the nodes of one run",
                hint="`mpx compare` compares runs",
            )
    endings: list[Event] = []
    for directory in directories:
        for event in directory.events():
            if event.get("event") == "exit":
                endings.append(event)
            elif directory is first or event.get("event") not in _OF_THE_RUN:
                yield event
    if endings:
        yield max(endings, key=lambda event: (event.get("status") != "completed", event.get("t") or 0.0))
