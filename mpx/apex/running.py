"""What every part of the stand-in hands its calls to."""

from __future__ import annotations

import torch  # noqa: F401 - the session begins when torch is imported

from mpx.engine.session import Session
from mpx.launch.apex_import import refused

__all__ = ["serve", "session"]


def session() -> Session:
    """Return the session of this process.

    Raises:
        RuntimeError: There is none.
    """
    if Session.current is None:
        raise RuntimeError(
            "this `apex` is the stand-in of mpx, which works inside a run of mpx only. Expected `mpx run ...`"
        )
    return Session.current


def serve(part: str, text: str) -> None:
    """Tell the report that the script uses a part of the stand-in, and what it does."""
    tell = session().tell
    tell(f"apex-{part}", f"apex.{part} is mpx's: {text}")
    for library in sorted(refused):
        tell(f"apex-not-for-{library}", f"{library} did not find apex: `--apex on` gives it to libraries too")
    refused.clear()
