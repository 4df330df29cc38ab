"""Join a run: what happens in a process between the end of `import torch` and the script's next line."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from mpx.errors import MpxError, RecordError, render
from mpx.launch import elastic, own_frames
from mpx.record import RunDirectory

__all__ = ["join_run"]


def join_run(run_dir: str) -> None:
    """Start the session, or end the process: a script whose precision cannot be given does not train.

    The process ends without unwinding: a script's `try: import torch` must not catch the refusal.
    """
    try:
        with _unfinished_aside():
            from mpx.engine.start import start

            start(Path(run_dir))
    except MpxError as error:
        event = {"event": "skipped", "text": f"not started in process {os.getpid()}: {error.message}"}
        _end(run_dir, event, render(error), error.exit_code)
    except Exception as error:  # noqa: BLE001 - whatever it is, the script must not train without what was asked for
        traceback.print_exc()
        event = {"event": "fault", "where": "start", "text": repr(error)}
        _end(
            run_dir,
            event,
            "error: mpx could not start; this is a fault of mpx, please report it",
            os.EX_SOFTWARE,
        )
    own_frames.hide()
    elastic.tell_torchrun()


@contextmanager
def _unfinished_aside() -> Iterator[None]:
    """Have modules of mpx imported anew that are half imported, because it is they that the script lets import torch.

    When the body of such a module has run, the import system hands on what stands in `sys.modules` by then.
    """
    aside = {
        name: module
        for name, module in list(sys.modules.items())
        if name.startswith("mpx.") and getattr(module.__spec__, "_initializing", False)
    }
    for name in aside:
        del sys.modules[name]
    try:
        yield
    finally:
        for name, module in aside.items():
            sys.modules.setdefault(name, module)


def _end(run_dir: str, event: dict[str, Any], text: str, exit_code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os.write(2, f"{text}\n".encode(errors="replace"))
    with suppress(RecordError):
        RunDirectory.open(Path(run_dir)).shard(f"start-{os.getpid()}-{time.time_ns()}").write(event)
    os._exit(exit_code)
