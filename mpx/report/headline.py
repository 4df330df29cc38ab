"""What a report says first, in every format: what ran at which level, how it ended, whether anything is wrong."""

from __future__ import annotations

from mpx.record.model import RunRecord
from mpx.report import wording
from mpx.report.facts import half_type, level, program
from mpx.report.wording import count, printable

__all__ = ["ALL_CLEAR", "SEVERITY_WORDS", "all_clear", "ending", "headline", "level_and_type"]

ALL_CLEAR = "nothing unusual: there is nothing that you need to do"
SEVERITY_WORDS = {"error": "error", "warning": "warning", "info": "note"}


def level_and_type(record: RunRecord) -> str:
    """Return `O1 float16`: the preset and the type that it computes in."""
    dtype = half_type(record) or ("float32" if record.preset else "")
    return f"{printable(level(record))} {dtype}".strip()


def headline(record: RunRecord) -> list[str]:
    """Return level, program, what was done most, duration and ending: what is known of them."""
    parts = [level_and_type(record), printable(program(record))]
    if record.steps.attempted:
        parts.append(count(record.steps.attempted, "step"))
    elif record.backwards:
        parts.append(count(record.backwards, "backward pass"))
    elif record.forwards:
        parts.append(count(record.forwards, "forward call"))
    if record.wall_s is not None:
        parts.append(wording.seconds(record.wall_s))
    parts.append(ending(record))
    return parts


def ending(record: RunRecord) -> str:
    """Return how the run ended: `exit code 0`, `killed by SIGKILL`."""
    if record.signal:
        return (
            f"{'interrupted' if record.status == 'interrupted' else 'killed'} by {printable(record.signal)}"
        )
    if record.exit_code is not None:
        return f"exit code {record.exit_code}"
    return "ending not recorded"


def all_clear(record: RunRecord) -> bool:
    """Tell whether the run ended well and no finding is more than a note."""
    return record.status == "completed" and all(finding.severity == "info" for finding in record.findings)
