"""Running statistics that an overflowed forward pass poisoned are put back: a skipped step must not leave NaN in BatchNorm."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _NormBase

from mpx.engine.structure import modules_of

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["StatisticsGuard"]

NAMES = ("running_mean", "running_var", "num_batches_tracked")


class StatisticsGuard:
    """Keeps the statistics from before the first training call since the last clean backward pass."""

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[nn.Module, list[Tensor]] = weakref.WeakKeyDictionary()

    @torch.no_grad()
    def before_call(self, root: nn.Module) -> None:
        """Copy what an outermost call in training mode is about to change."""
        if not root.training:
            return
        for module in modules_of(root):
            if isinstance(module, _NormBase) and module.training and module not in self._kept and module.running_mean is not None:
                self._kept[module] = [getattr(module, name).clone() for name in NAMES]

    def accept(self) -> None:
        """Forget the copies: the statistics belong to a clean pass."""
        self._kept.clear()

    @torch.no_grad()
    def restore(self) -> list[nn.Module]:
        """Put back what is not finite and return its modules."""
        poisoned = [
            module
            for module in self._kept
            if not bool(torch.isfinite(module.running_mean).all()) or not bool(torch.isfinite(module.running_var).all())
        ]
        for module in poisoned:
            for name, kept in zip(NAMES, self._kept[module], strict=True):
                getattr(module, name).copy_(kept)
        self._kept.clear()
        return poisoned
