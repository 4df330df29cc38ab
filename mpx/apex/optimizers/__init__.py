"""`apex.optimizers`: the same updates by torch's kernels."""

from __future__ import annotations

from mpx.apex.fp16_optimizer import FP16_Optimizer
from mpx.apex.running import serve

from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB
from .fused_sgd import FusedSGD

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"]

serve("optimizers", "the updates are computed by torch's kernels")
