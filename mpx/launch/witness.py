"""Whether a signal was sent to our whole process group, or to us alone.

No system says so with the signal. So a small process stands in the group that does nothing but keep every signal
waiting: what has come to it as well came to the group, and therefore to the target.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress

__all__ = ["Witness"]

# Who signals a group may take a moment for it: `timeout` tells its child first and then everybody.
GRACE_S = 0.1


class Witness:
    """A process beside us that sees what the group is sent. It ends when we end, however that happens."""

    def __init__(self, numbers: Collection[int]) -> None:
        """Start it. To be called where there is one thread, before the target is started.

        Args:
            numbers: The signals that will be asked about.
        """
        asked, self._ask = os.pipe()
        self._answer, answered = os.pipe()
        child = None
        with suppress(OSError):  # no more processes: then it is as if it were gone
            child = os.fork()
        if child == 0:
            with suppress(BaseException):
                _watch(asked, answered, numbers)
            os._exit(0)
        os.close(asked)
        os.close(answered)

    def saw(self, number: int) -> bool | None:
        """Return whether the group was sent this signal since the last question; None when the witness is gone.

        Waits a little: the answer is about what was sent until then.
        """
        time.sleep(GRACE_S)
        try:
            os.write(self._ask, bytes([number]))
            answer = os.read(self._answer, 1)
        except OSError:
            return None
        return bool(answer[0]) if answer else None


def _watch(asked: int, answered: int, numbers: Collection[int]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    # Whoever reads what the target prints must see its end although this process is still there.
    last = 0
    for descriptor in sorted((asked, answered)):
        os.closerange(last, descriptor)
        last = descriptor + 1
    os.closerange(last, os.sysconf("SC_OPEN_MAX"))
    while question := os.read(asked, 1):
        (number,) = question
        seen = number in signal.sigpending()
        if seen:
            signal.sigwait({number})
        os.write(answered, bytes([seen]))
