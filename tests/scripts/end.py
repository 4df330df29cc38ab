"""End in the way that the first argument names, after a line on stdout."""

import os
import signal
import sys

how = sys.argv[1]
print("before the end", flush=True)


def fail():
    raise ValueError("the script's own fault")


if how == "return":
    pass
elif how == "exit-3":
    sys.exit(3)
elif how == "exit-text":
    sys.exit("a farewell")
elif how == "exception":
    fail()
elif how == "_exit-7":
    os._exit(7)
elif how == "execv":
    os.execv(sys.executable, [sys.executable, __file__, "exit-3"])
else:
    os.kill(os.getpid(), signal.Signals[how])
    signal.pause()
