"""`apex.parallel`: torch's DistributedDataParallel and SyncBatchNorm under apex's signatures, and LARC."""

from __future__ import annotations

from mpx.apex.running import serve

from .distributed import DistributedDataParallel
from .LARC import LARC
from .sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]

serve("parallel", "DistributedDataParallel and SyncBatchNorm are torch's")
