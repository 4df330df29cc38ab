"""What scripts read and write of amp's state."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mpx.apex.running import session

from .scaler import LossScaler

__all__ = ["AmpState", "master_params"]


class AmpState:
    """The one object of `apex.amp._amp_state`.

    Attributes:
        loss_scalers: One for each loss that `initialize` was told of.
        opt_properties: What the run does, under the names of apex's options; None before `initialize`.
        handle: What `amp.init` returned.
        verbosity: As the script gave it; mpx says what it has to say in its report.
    """

    def __init__(self) -> None:
        self.loss_scalers: list[LossScaler] = [LossScaler()]
        self.opt_properties: SimpleNamespace | None = None
        self.handle: Any = None
        self.verbosity = 1

    def scalers_for(self, losses: int) -> None:
        """Have as many scalers as losses; those that there are go on."""
        self.loss_scalers[losses:] = [LossScaler() for _ in range(losses - len(self.loss_scalers))]


_amp_state = AmpState()


def properties(*, enabled: bool) -> SimpleNamespace:
    """Return what the run does in the words of apex's options, also as a dict in `options`."""
    policy = session().policy
    cast = {"none": None, "half": getattr(torch, policy.dtype)}.get(policy.cast_model_type, torch.float32)
    options = {
        "enabled": enabled,
        "opt_level": policy.name,
        "cast_model_type": cast,
        "patch_torch_functions": policy.patch_torch_functions,
        "keep_batchnorm_fp32": policy.keep_batchnorm_fp32,
        "master_weights": policy.master_weights,
        "loss_scale": {"none": 1.0, "static": policy.loss_scale.init}.get(policy.loss_scale.mode, "dynamic"),
    }
    return SimpleNamespace(**options, options=options)


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Yield the parameters that an optimizer steps: with mpx they are the script's own."""
    for group in optimizer.param_groups:
        yield from group["params"]
