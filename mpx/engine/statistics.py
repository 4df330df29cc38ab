"""Running statistics that an overflowed forward pass poisoned are put back: a skip leaves no NaN in BatchNorm."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from mpx.engine.gradients import non_finite_flags, read

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    Kept = weakref.WeakKeyDictionary[_NormBase, list[Tensor]]

__all__ = ["StatisticsGuard"]

NAMES = ("running_mean", "running_var", "num_batches_tracked")


class StatisticsGuard:
    """Keeps the statistics from before the first training call since the last clean backward pass, and the ones before.

    Those are for a model whose own pass comes later: the generator of a GAN runs before the discriminator's pass.
    """

    def __init__(self) -> None:
        self._kept: Kept = weakref.WeakKeyDictionary()
        self._older: Kept = weakref.WeakKeyDictionary()

    def before_call(self, parts: Iterable[nn.Module]) -> None:
        """Copy what an outermost call in training mode is about to change; `parts` are the modules of its tree."""
        for module in parts:
            if not isinstance(module, _NormBase) or not module.training or module in self._kept:
                continue
            statistics = module.running_mean
            if statistics is not None and not isinstance(
                statistics, UninitializedTensorMixin
            ):  # lazy: its first call
                self._kept[module] = [getattr(module, name).detach().clone() for name in NAMES]

    def accept(self) -> None:
        """Note a clean pass: most statistics are right."""
        if self._kept:
            self._older, self._kept = self._kept, weakref.WeakKeyDictionary()

    @torch.no_grad()
    def mend(self, wrong: Tensor) -> tuple[list[_NormBase], Tensor | None]:
        """Put back what is not finite without a look at it: after a pass whose verdict is on its way.

        Returns the modules whose statistics were kept, and for each whether it was poisoned (bool, on the device).

        Args:
            wrong: Bool, no dimension, on the device: whether the pass was not clean.
        """
        both = {**self._older, **self._kept}
        kept = {
            module: saved
            for module, saved in both.items()
            if saved[0].device == wrong.device and isinstance(module.running_mean, Tensor)
        }
        self.accept()
        if not kept:
            return [], None
        present = [[getattr(module, name).data for name in NAMES] for module in kept]
        means, variances, counts = map(list, zip(*present, strict=True))
        channels = tuple(len(mean) for mean in means)
        largest = torch.stack(torch._foreach_norm([*means, *variances], float("inf")))
        poisoned = largest.view(2, -1).isfinite().logical_not_().any(0) & wrong
        of_channel = torch.cat([one.expand(number) for one, number in zip(poisoned, channels, strict=True)])
        before = [torch.cat([saved[place] for saved in kept.values()]) for place in (0, 1)]
        for there, earlier in zip((means, variances), before, strict=True):
            right = torch.where(of_channel, earlier, torch.cat(there))
            torch._foreach_copy_(there, right.split(channels))
        earlier = torch.stack([saved[2] for saved in kept.values()])
        right = torch.where(poisoned, earlier, torch.stack(counts))
        torch._foreach_copy_(counts, right.unbind())
        return list(kept), poisoned

    @torch.no_grad()
    def restore(self) -> Sequence[nn.Module]:
        """Put back what is not finite and return its modules."""
        kept: dict[_NormBase, list[Tensor]] = {**self._older, **self._kept}
        flags = non_finite_flags(
            statistics
            for module in kept
            for statistics in (module.running_mean, module.running_var)
            if isinstance(statistics, Tensor)
        )
        bad = read(flags)
        poisoned = [module for module, *found in zip(kept, bad[::2], bad[1::2], strict=True) if any(found)]
        for module in poisoned:
            for name, earlier in zip(NAMES, kept[module], strict=True):
                # past the version counter: another loss may yet go back through the graph that saved them
                getattr(module, name).data.copy_(earlier)
        self._kept.clear()
        self._older.clear()
        return poisoned
