"""Print all that a script can see of how it was started, as one line of JSON."""

# pathlib would be one more module in `modules`.
# ruff: noqa: PTH109, PTH110, PTH208

import json
import os
import pickle
import resource
import signal
import sys
import warnings


class Thing:
    """Its pickle names the module `__main__`."""

    value = 3


def depth():
    frame, count = sys._getframe(), 0
    while frame is not None:
        frame, count = frame.f_back, count + 1
    return count


main = sys.modules["__main__"]
spec = main.__spec__
names = sorted(set(globals()))
dispositions = {}
for number in sorted(signal.valid_signals()):
    handler = signal.getsignal(number)
    dispositions[int(number)] = handler.__name__ if callable(handler) else repr(handler)
warnings.warn("a warning of the script", stacklevel=1)
view = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv[1:],
    "path": sys.path,
    "executable": sys.executable,
    "flags": list(sys.flags),
    "warnoptions": sys.warnoptions,
    "file": __file__,
    "name": __name__,
    "package": __package__,
    "cached": repr(globals().get("__cached__", "absent")),
    "spec": None if spec is None else [spec.name, spec.origin],
    "loader": type(__loader__).__name__,
    "globals": names,
    "is_main": main.__dict__ is globals(),
    "depth": depth(),
    "pickled": type(pickle.loads(pickle.dumps(Thing()))).__module__,
    "stdin": sys.stdin.read(),
    "tty": [os.isatty(fd) for fd in (0, 1, 2)],
    "encodings": [
        sys.stdout.encoding,
        sys.stdout.errors,
        sys.stdout.line_buffering,
        sys.stderr.line_buffering,
    ],
    "cwd": os.getcwd(),
    "group": os.getpgrp(),
    "session": os.getsid(0),
    "umask": [os.umask(0o22), os.umask(0o22)],
    "core": resource.getrlimit(resource.RLIMIT_CORE),
    "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "dispositions": dispositions,
    "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
    "files": sorted(
        fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}")
    ),
    "environ": dict(os.environ),
    "modules": sorted(sys.modules),
}
print(json.dumps(view), flush=True)
sys.stdout.buffer.write(b"bytes \xff\x00 \r\n")
