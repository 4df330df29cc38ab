"""Memory of the host that one training step frees is there for the next one."""

from __future__ import annotations

import ctypes
import os

__all__ = ["HostMemory"]

M_MXFAST, M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = 1, -1, -3  # of glibc's malloc.h
LARGEST_TRIM_THRESHOLD = 2**31 - 1  # bytes; mallopt takes an int
LARGEST_MMAP_THRESHOLD = 32 * 2**20  # bytes; glibc takes no larger one, and adapts to it by itself
CHOSEN_BY = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


class HostMemory:
    """Has glibc keep what is freed from step to step, and give it back now and then.

    What comes from the kernel is filled with zeros, page by page, as it is first written: up to two fifths of a step on
    a CPU. By itself glibc returns each block that is larger than any freed before, and what is free at the end of its
    heap beyond twice that.

    And whenever a block of 64 KiB or more is freed, glibc dissolves its bins of small free blocks, and the next small
    ones are looked for with more effort. A step frees tensors all the time, so it does without those bins: 1 to 4 % of
    the step of a model with small tensors.

    An environment that says otherwise is obeyed; elsewhere than on glibc nothing changes.
    """

    def __init__(self, *, keeps: bool) -> None:
        """Change nothing yet: before it trains, a process may load much that it does not need later."""
        chosen = any(name in os.environ for name in CHOSEN_BY) or "glibc.malloc" in os.environ.get(
            "GLIBC_TUNABLES", ""
        )
        libc = ctypes.CDLL(None)
        self._works = keeps and not chosen and hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")
        self._libc = libc
        self._begun = False

    def tidy(self) -> None:
        """Return what is free; called every few seconds in a process that trains. The first call begins the keeping."""
        if not self._works:
            return
        if not self._begun:
            self._begun = True
            self._libc.mallopt(M_MXFAST, 0)
            self._libc.mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
            self._libc.mallopt(M_TRIM_THRESHOLD, LARGEST_TRIM_THRESHOLD)
        self._libc.malloc_trim(0)
