"""torchrun below `mpx run`: it knows which of its ranks failed first, and of what, so the record learns it there."""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

__all__ = ["wrap_wait"]


def wrap_wait(original: Callable[..., Any], emit: Callable[..., None]) -> Callable[..., Any]:
    """Return the `PContext.wait` of the session, which tells of the rank that failed first."""
    told: weakref.WeakSet[Any] = weakref.WeakSet()

    @wraps(original)
    def wait(context: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(context, *args, **kwargs)
        failures = list((getattr(result, "failures", None) or {}).values())
        if failures and context not in told:
            told.add(context)  # the next answer names those as well that torchrun has ended since
            first = min(failures, key=lambda failure: failure.timestamp)
            signal = first.signal_name() if first.exitcode < 0 else None
            code = None if first.exitcode < 0 else first.exitcode
            emit("failure", host=socket.gethostname(), pid=first.pid, exit_code=code, signal=signal)
        return result

    return wait
