"""Peak memory of the process: of the accelerator once it was used, else resident memory."""

from __future__ import annotations

from typing import Any

import torch

from mpx.engine.devices import DEVICES
from mpx.monitors.base import Monitor

__all__ = ["PeakMemory"]


class PeakMemory(Monitor):
    """`memory` of the record."""

    def snapshot(self) -> dict[str, Any]:
        kind = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
        return {"memory": {"peak_bytes": DEVICES[kind].peak_bytes(), "device": kind}}
