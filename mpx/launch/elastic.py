"""A rank that fails tells torchrun why, as torchrun asks of scripts that are written for it.

Without the file that it names in the environment it reports an exit code, and "To enable traceback see ...".
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import suppress
from types import TracebackType

__all__ = ["tell_torchrun"]


def tell_torchrun() -> None:
    """From now on write what ends this process uncaught into the file that torchrun reads; then show it as before."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    show, pid = sys.excepthook, os.getpid()

    def excepthook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        # Not what a child of the rank died of, and not over what the script has written by `@record` itself.
        if issubclass(kind, Exception) and os.getpid() == pid and not os.path.exists(path):
            with suppress(OSError), open(path, "w", encoding="utf-8") as file:
                json.dump(_told(error), file)
        show(kind, error, tb)

    sys.excepthook = excepthook


def _told(error: BaseException) -> dict[str, object]:
    callstack = "".join(traceback.format_exception(error))
    extra = {"py_callstack": callstack, "timestamp": str(int(time.time()))}
    return {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
