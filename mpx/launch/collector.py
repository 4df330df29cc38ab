"""Python's collector of cycles while torch is imported.

Each full collection walks what there is so far, up to 160,000 objects that live as long as the process, and finds next
to nothing: together a tenth of the time that `import torch` takes. So they wait until it is there.
"""

from __future__ import annotations

import gc

__all__ = ["Rest"]

# The import's own garbage is young, and a MiB if it is left. Young objects are few, to look at them costs little.
YOUNG, MIDDLING, NEVER = 5_000, 1_000, 1_000_000


class Rest:
    """Lets the collector look at young objects only."""

    def __enter__(self) -> None:
        self._thresholds = gc.get_threshold()
        if self._thresholds[0]:
            gc.set_threshold(YOUNG, MIDDLING, NEVER)

    def __exit__(self, *error: object) -> None:
        gc.set_threshold(*self._thresholds)
        if not gc.get_freeze_count():  # what the script froze is not ours to thaw
            # Both together make everything old, at no cost, and without the next full collection coming earlier for it.
            gc.freeze()
            gc.unfreeze()
