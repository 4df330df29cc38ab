"""Numbers on their way from an accelerator to the host, and what follows once they are here.

The host runs ahead of an accelerator. Whoever reads a number at once lets it stand still until the device has caught
up, and the device stand idle after that. So a copy is started here, and looked at when it has arrived. What follows
from several is done in the order in which they were asked for.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from mpx.engine.devices import device_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from mpx.engine.devices import Arriving

    Then = Callable[[list[float]], None]

__all__ = ["Arrivals"]

MOST_ON_THEIR_WAY = 256  # a host that is further ahead waits for the oldest: what is kept for them is bounded


class Arrivals:
    """A queue: first asked for, first gone on with."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Arriving | None, Then]] = deque()
        self._going_on = False  # of the thread that holds the lock
        self._lock = threading.RLock()

    def __bool__(self) -> bool:
        """Whether anything has been asked for that nobody has gone on with."""
        return bool(self._queue)

    def add(self, numbers: Tensor | None, then: Then) -> None:
        """Call `then` with `numbers` once they are on the host, and all that was added before has been gone on with.

        Args:
            numbers: One dimension; copied now. None for what only has to keep the order.
            then: Whatever it raises reaches the script at its next pass or step.
        """
        start = None if numbers is None else device_of(numbers).fetch
        if numbers is None or start is None:
            here = [] if numbers is None else numbers.tolist()
            if self._queue:
                self._queue.append((None, lambda _: then(here)))
            else:
                then(here)
            return
        self._queue.append((start(numbers), then))
        if len(self._queue) > MOST_ON_THEIR_WAY and self._lock.acquire(blocking=False):
            try:
                if not self._going_on:
                    self._go_on()
            finally:
                self._lock.release()

    def take(self) -> None:
        """Go on with what is here. Waits for nothing, nor for another thread that does so."""
        if not self._queue or not self._lock.acquire(blocking=False):
            return
        try:
            while self._queue and not self._going_on:
                arriving, _ = self._queue[0]
                if arriving is not None and not arriving.ready():
                    break
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
        arriving, then = self._queue.popleft()
        self._going_on = True
        try:
            then([] if arriving is None else arriving.numbers())
        finally:
            self._going_on = False
