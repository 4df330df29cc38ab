"""Scaled gradients in, true gradients out: the arithmetic on lists of `.grad`, and the flags of those that overflowed.

A flag belongs to one gradient and dies with it: when `.grad` is set to None, replaced or zeroed. What a script does in between (clipping turns an
infinity into a number) does not remove it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Flags", "non_finite", "scale_", "unscale_and_check_", "values_of"]


def values_of(grad: Tensor) -> Tensor:
    """Return the tensor that holds a gradient's numbers: the values of a sparse one, whose layout must not change."""
    return grad._values() if grad.layout is torch.sparse_coo else grad


def _grouped(grads: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in grads:
        numbers = values_of(grad).detach()
        if numbers.is_floating_point():
            groups[numbers.device, numbers.dtype].append(numbers)
        elif numbers.is_complex():
            real = torch.view_as_real(numbers)
            groups[real.device, real.dtype].append(real)
    return list(groups.values())


@torch.no_grad()
def scale_(grads: Sequence[Tensor], factor: float) -> None:
    """Multiply gradients in place; exact for a power of two."""
    for group in _grouped(grads):
        torch._foreach_mul_(group, factor)


@torch.no_grad()
def unscale_and_check_(grads: Sequence[Tensor], scale: float) -> bool:
    """Divide gradients by `scale` in place and return whether any was infinite or NaN. One host synchronisation per device."""
    found = []
    for group in _grouped(grads):
        device = group[0].device
        flag = torch.zeros((), dtype=torch.float32, device=device)
        if group[0].dtype is torch.float64:  # the kernel takes FP32 and half only
            torch._foreach_div_(group, scale)
            flag.fill_(float(any(not torch.isfinite(grad).all() for grad in group)))
        else:
            inverse = torch.full((), 1.0 / scale, dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(group, flag, inverse)
        found.append(flag)
    return any(bool(flag.item()) for flag in found)


@torch.no_grad()
def non_finite(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves whose gradient holds an infinity or NaN. For the rare case: it looks at each one."""
    return [
        leaf for leaf in leaves if leaf.grad is not None and not bool(torch.isfinite(values_of(leaf.grad)).all().item())
    ]


class _Flag(NamedTuple):
    leaf: weakref.ref[Tensor]
    grad: weakref.ref[Tensor]


class Flags:
    """Which gradients overflowed when they were computed."""

    def __init__(self) -> None:
        self._flags: dict[int, _Flag] = {}

    def raise_for(self, leaves: Iterable[Tensor]) -> None:
        """Flag the present gradient of each leaf."""
        for leaf in leaves:
            if leaf.grad is not None:
                self._flags[id(leaf)] = _Flag(weakref.ref(leaf), weakref.ref(leaf.grad))

    def refresh(self, leaves: Iterable[Tensor]) -> None:
        """Flag `leaves` again if they are flagged: accumulation may have replaced the gradient that their flag describes."""
        self.raise_for([leaf for leaf in leaves if id(leaf) in self._flags])

    def among(self, leaves: Iterable[Tensor]) -> list[Tensor]:
        """Return those of `leaves` whose gradient is flagged, forgetting flags whose gradient is gone. Free while nothing overflows."""
        if not self._flags:
            return []
        return [leaf for leaf in leaves if self._alive(leaf)]

    def _alive(self, leaf: Tensor) -> bool:
        flag = self._flags.get(id(leaf))
        if flag is None:
            return False
        grad = leaf.grad
        same = flag.leaf() is leaf and grad is not None and flag.grad() is grad
        if same and bool(values_of(grad).detach().count_nonzero().item()):  # NaN counts as nonzero
            return True
        del self._flags[id(leaf)]
        return False
