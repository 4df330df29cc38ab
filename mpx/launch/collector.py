"""Python's collector of cycles and the 160,000 objects that it has to walk because torch is there.

While torch is imported each full collection walks what there is so far, and finds nothing; when the process ends some
more walk everything. Together they take a quarter of the time of a script that only imports torch. So old objects are
left alone during the import, and frozen after it: they are modules and live as long as the process anyway.
"""

from __future__ import annotations

import atexit
import gc
import sys
from _thread import _count as count_threads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

__all__ = ["Rest"]

# The import's own garbage is young, and a MiB if it is left. Young objects are few, to look at them costs little.
YOUNG, MIDDLING, NEVER = 5_000, 1_000, 1_000_000


class Rest:
    """Lets the collector rest while torch is imported, and leaves it nothing of that to walk.

    What the script made before is frozen with it, so nothing is if that may be more than modules: when a function or a
    second thread imports torch. An object with a finalizer (an open file in a cycle) has it called as the process ends,
    as it would be under plain python: then everything thaws before.
    """

    def __init__(self) -> None:
        """Look at what there is; the frames that call this are those of the import."""
        self._thresholds = gc.get_threshold()
        self._freezes = not count_threads() and _is_at_top(sys._getframe(1))  # noqa: SLF001
        self._thaws = self._freezes and _has_finalizers()

    def __enter__(self) -> None:
        if self._thresholds[0]:
            gc.set_threshold(YOUNG, MIDDLING, NEVER)

    def __exit__(self, failed: type[BaseException] | None, *rest: object) -> None:
        gc.set_threshold(*self._thresholds)
        if failed is not None or gc.get_freeze_count():  # what the script froze is not ours to thaw
            return
        # It makes everything old, at no cost; thawed again, the next full collection does not come earlier for it.
        gc.freeze()
        if not self._freezes:
            gc.unfreeze()
        elif self._thaws:
            atexit.register(_thaw, [gc])


def _thaw(made_after: list[object]) -> None:
    """Undo the freeze, unless what was made after it is frozen too: by the script, and not for us to undo."""
    if any(one is made_after for one in gc.get_objects()):
        gc.unfreeze()


def _is_at_top(frame: FrameType | None) -> bool:
    """Whether only bodies of modules, and the import system, are on the way to a frame."""
    while frame is not None:
        code = frame.f_code
        if code.co_name != "<module>" and not code.co_filename.startswith("<frozen "):
            return False
        frame = frame.f_back
    return True


def _has_finalizers() -> bool:
    """Whether anything but the three standard streams has one."""
    objects = gc.get_objects()
    # not by `hasattr`, which runs what a stranger's metaclass does for it
    kinds = {
        kind for kind in set(map(type, objects)) if any("__del__" in vars(base) for base in kind.__mro__)
    }
    streams = [stream for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__) if stream is not None]
    own = {id(layer) for stream in streams for layer in _layers(stream)}
    return any(type(one) in kinds and id(one) not in own for one in objects)


def _layers(stream: object) -> list[object]:
    """Return a text stream, its buffer and its file."""
    layers = [stream]
    for name in ("buffer", "raw"):
        layers.append(getattr(layers[-1], name, None))
    return layers
