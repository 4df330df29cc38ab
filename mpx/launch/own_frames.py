"""Keep mpx's frames out of the script's tracebacks, so that they read as under plain python.

An exception that passes through a torch function which mpx replaced carries mpx's frames. They are cut out where
tracebacks are shown: by the interpreter, by `threading`, and by all that formats with `traceback`: a script's
`print_exc`, `logging`, and the workers of `multiprocessing` and of torch, which send their tracebacks home as text.
`MPX_TRACEBACK=full` in the environment keeps the frames, for reports of faults in mpx itself.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["cut", "hide"]

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_KERNELS = tuple(os.path.join(_PACKAGE, "engine", name) for name in ("kernels.py", "reroutes"))
_WAYS_INTO_TORCH = tuple(
    os.path.join("torch", name) for name in ("_ops.py", os.path.join("autograd", "function.py"))
)


def hide() -> Callable[[], None]:
    """Hide mpx's frames from now on; return the function that ends it. Hooks already there are called after ours."""
    if os.environ.get("MPX_TRACEBACK") == "full":
        return lambda: None
    show, show_of_thread = sys.excepthook, threading.excepthook
    prepare = traceback.TracebackException.__init__

    def excepthook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        cut(error)
        show(kind, error, _without_own(tb))

    def thread_excepthook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            cut(args.exc_value)
        tb = _without_own(args.exc_traceback)
        show_of_thread(threading.ExceptHookArgs((args.exc_type, args.exc_value, tb, args.thread)))

    def __init__(  # noqa: N807 - tracebacks that fail show this name
        self: traceback.TracebackException,
        exc_type: type[BaseException],
        exc_value: BaseException,
        exc_traceback: TracebackType | None,
        **options: Any,
    ) -> None:
        # Causes and contexts come through here themselves.
        prepare(self, exc_type, exc_value, _without_own(exc_traceback), **options)

    def undo() -> None:
        if sys.excepthook is excepthook:
            sys.excepthook = show
        if threading.excepthook is thread_excepthook:
            threading.excepthook = show_of_thread
        if traceback.TracebackException.__init__ is __init__:
            traceback.TracebackException.__init__ = prepare  # type: ignore[method-assign]

    sys.excepthook = excepthook
    threading.excepthook = thread_excepthook
    traceback.TracebackException.__init__ = __init__  # type: ignore[method-assign]
    return undo


def cut(error: BaseException) -> None:
    """Take mpx's frames out of the traceback of `error` and of every exception it is chained to or made of."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _without_own(one.__traceback__)
        # `exceptions` by name: ExceptionGroup came with Python 3.11, its backport has the same.
        parts = getattr(one, "exceptions", ())
        waiting += [one.__cause__, one.__context__, *(e for e in parts if isinstance(e, BaseException))]


def _without_own(tb: TracebackType | None) -> TracebackType | None:
    """Return `tb` relinked past mpx's frames. One with none but those is left whole: it is a fault of ours."""
    kept: list[TracebackType] = []
    in_kernel, one = False, tb
    while one is not None:
        file = one.tb_frame.f_code.co_filename
        own = file.startswith(_PACKAGE)
        # the op rules reach torch through a few Python functions of its own, which no script has called
        in_kernel = file.startswith(_KERNELS) or (in_kernel and not own and file.endswith(_WAYS_INTO_TORCH))
        if not own and not in_kernel:
            kept.append(one)
        one = one.tb_next
    if not kept:
        return tb
    for one, following in zip(kept, [*kept[1:], None], strict=True):
        one.tb_next = following
    return kept[0]
