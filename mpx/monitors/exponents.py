"""How large the gradients are: a histogram of their exponents, from a few passes."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpx.monitors.base import Monitor, Pass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.optim import Optimizer

__all__ = ["Exponents"]

LOWEST, HIGHEST = -80, 47  # exponents with a bin of their own; what is beyond counts in the outermost
FIRST_STRIDE = 16  # passes from sample to sample; doubled after so many samples
SAMPLES_A_STRIDE = 32
ELEMENTS = 1024  # of each gradient, evenly spaced


class Exponents(Monitor):
    """`gradients` of the record: of the true gradients, before the script clips them.

    The counts stay on the device of the gradients and are read when a snapshot is due: no pass waits for them. A
    sampled pass costs about ten kernels, whatever the number of parameters; samples become rarer as a run goes on.
    """

    def __init__(self, half: torch.dtype) -> None:
        """Make the monitor; `half` is the type whose underflow is counted."""
        self._half = half
        limits = torch.finfo(half)
        # Half of the least number above 0: what is not larger rounds to 0.
        self._flushed = int(math.log2(limits.smallest_normal * limits.eps)) - 1
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._latest: Callable[[], Optimizer | None] = lambda: None
        self._counts: dict[torch.device, Tensor] = {}
        self._samples = 0
        self._next = 0
        self._stride = FIRST_STRIDE
        self._scale = 1.0
        self._early: dict[int, dict[torch.device, Tensor]] = {}  # samples of passes that are not judged yet
        self._ran = 0  # the last of those

    def asked_to_step(self, optimizer: Optimizer) -> None:
        if optimizer is not self._latest():
            self._latest = weakref.ref(optimizer)
            self._optimizers.add(optimizer)

    def ran(self, number: int, scale: float | Tensor) -> None:
        self._ran = number
        if self._is_due(number):
            self._next = number + self._stride
            self._early[number] = self._sample(scale)

    def passed(self, one: Pass) -> None:
        early = self._early.pop(one.number, None)
        if one.kind is not None or one.seen.sticky:
            return
        if early is None:
            if one.number <= self._ran or not self._is_due(one.number):
                return
            self._next = one.number + self._stride
            early = self._sample(one.seen.scale)
        self._samples += 1
        if self._samples % SAMPLES_A_STRIDE == 0:
            self._stride *= 2
        self._scale = one.seen.scale
        for device, counts in early.items():
            known = self._counts.get(device)
            self._counts[device] = counts if known is None else known.add_(counts)

    def _is_due(self, number: int) -> bool:
        return number >= self._next and bool(self._optimizers)

    @torch.no_grad()
    def _sample(self, scale: float | Tensor) -> dict[torch.device, Tensor]:
        by_device: dict[torch.device, list[Tensor]] = {}
        for grad in self._gradients():
            flat = grad.detach().reshape(-1)
            # An odd stride: with an even one, a matrix of an even width would be seen in a few columns only.
            stride = (flat.numel() // ELEMENTS) | 1
            by_device.setdefault(grad.device, []).append(flat[::stride])
        return {device: self._count(parts, scale) for device, parts in by_device.items()}

    def _count(self, parts: list[Tensor], scale: float | Tensor) -> Tensor:
        values = torch.cat([part.to(torch.float32) for part in parts])
        # 0.5 * 2**e and up: its leading bit is worth 2**(e - 1).
        exponents = torch.frexp(values).exponent.to(torch.int64) - 1
        finite, there = values.isfinite(), values != 0
        bins = exponents.clamp_(LOWEST, HIGHEST).sub_(LOWEST)
        bins.masked_fill_(~there, _ZERO).masked_fill_(~finite, _NOT_FINITE)
        counts = torch.zeros(_BINS, dtype=torch.int64, device=values.device)
        counts.scatter_add_(0, bins, torch.ones_like(bins))
        lost = there & (values.abs() * scale <= 2.0**self._flushed)
        counts[_LOST].add_(lost.sum())
        return counts

    def _gradients(self) -> Iterator[Tensor]:
        for optimizer in list(self._optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    grad = parameter.grad
                    plain = type(grad) is Tensor and grad.layout is torch.strided and grad.is_floating_point()
                    if plain and grad.numel():
                        yield grad

    def snapshot(self) -> dict[str, Any]:
        total = [sum(numbers) for numbers in zip(*(c.tolist() for c in self._counts.values()), strict=True)]
        there = total[:_ZERO]
        number = sum(there)
        if not number:
            return {"gradients": None}
        first = next(index for index, count in enumerate(there) if count)
        last = next(index for index in range(len(there) - 1, -1, -1) if there[index])
        below = sum(there[: max(0, self._flushed - LOWEST)])
        return {
            "gradients": {
                "passes": self._samples,
                "half": str(self._half).removeprefix("torch."),
                "exponents": {"min": first + LOWEST, "max": last + LOWEST, "counts": there[first : last + 1]},
                "zeros": total[_ZERO] / (number + total[_ZERO]),
                "underflow": {"unscaled": below / number, "scaled": total[_LOST] / number},
                "scale": self._scale,
            }
        }


# After the bins of the exponents: what is exactly 0, what is no number, and how many underflow although scaled.
_ZERO, _NOT_FINITE, _LOST = range(HIGHEST - LOWEST + 1, HIGHEST - LOWEST + 4)
_BINS = _LOST + 1
