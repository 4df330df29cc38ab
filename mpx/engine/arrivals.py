"""Numbers on their way from an accelerator to the host, and what follows once they are here.

The host runs ahead of an accelerator. Whoever reads a number at once lets it stand still until the device has caught
up, and the device stand idle after that. So a copy is started here, and gone on with two passes later, when it has long
arrived, mostly. Always two: did the host go on with what happens to be here, the speed of a device would show in what
is trained. What follows from several is done in the order in which they were asked for.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from mpx.engine.devices import device_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Then = Callable[[list[float]], None]

__all__ = ["Arrivals"]

LAG = 2  # passes
MOST_ON_THEIR_WAY = 256  # what is asked for without a pass is bounded


class Arrivals:
    """A queue: first asked for, first gone on with."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, Callable[[], list[float]], Then]] = deque()
        self._passes = 0
        self._going_on = False  # of the thread that holds the lock
        self._lock = threading.RLock()

    def __bool__(self) -> bool:
        """Whether anything has been asked for that nobody has gone on with."""
        return bool(self._queue)

    def add(self, numbers: Tensor | None, then: Then) -> None:
        """Call `then` with `numbers` once they are on the host, and all that was added before has been gone on with.

        Args:
            numbers: One dimension; copied now. None for what only has to keep the order.
            then: Whatever it raises reaches the script, at a later pass or where somebody waits.
        """
        start = None if numbers is None else device_of(numbers).fetch
        if numbers is not None and start is not None:
            arriving = start(numbers)
        else:
            here: list[float] = [] if numbers is None else numbers.tolist()
            if not self._queue:
                then(here)
                return
            arriving = here.copy
        self._queue.append((self._passes, arriving, then))
        if len(self._queue) > MOST_ON_THEIR_WAY:
            self._go_on_up_to(self._queue[0][0])

    def begin_pass(self) -> None:
        """A pass begins: go on with what was asked for up to the one before the last."""
        self._passes += 1
        if self._queue:
            self._go_on_up_to(self._passes - LAG)

    def _go_on_up_to(self, number: int) -> None:
        if self._lock.acquire(blocking=False):  # another thread does so
            try:
                while self._queue and not self._going_on and self._queue[0][0] <= number:
                    self._go_on()
            finally:
                self._lock.release()

    def wait(self) -> None:
        """Wait for all that is on its way, and go on with it; inside a `then`, which is part of that, do nothing.

        Also for what another thread has begun to go on with: whoever asks acts on it.
        """
        with self._lock:
            while self._queue and not self._going_on:
                self._go_on()

    def forget(self) -> None:
        """Drop all that is on its way: in a forked child it is the parent's, as is a lock that is held."""
        self._queue.clear()
        self._lock = threading.RLock()
        self._going_on = False

    def _go_on(self) -> None:
        _, arriving, then = self._queue.popleft()
        self._going_on = True
        try:
            then(arriving())
        finally:
            self._going_on = False
