"""What every part of the stand-in hands its calls to."""

from __future__ import annotations

import torch  # noqa: F401 - the session begins when torch is imported

from mpx.engine.session import Session

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
    session().tell(f"apex-{part}", f"apex.{part} is mpx's: {text}")
