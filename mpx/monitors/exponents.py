"""How large the gradients are: a histogram of their exponents, from a few passes."""

from __future__ import annotations

import math
import threading
import weakref
from bisect import bisect_left
from functools import partial
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


class _Here(threading.local):
    """What one thread steps. The engine of another fills the gradients of its own model without Python's lock."""

    def __init__(self) -> None:
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.latest: Callable[[], Optimizer | None] = lambda: None


class Exponents(Monitor):
    """`gradients` of the record: of the true gradients, before the script clips them.

    They are counted on the device of the gradients, and nothing waits for the counts. A sampled pass costs about five
    kernels and one more a parameter; samples become rarer as a run goes on.
    """

    def __init__(
        self, half: torch.dtype, fetch: Callable[[Tensor, Callable[[list[float]], None]], None]
    ) -> None:
        """Make the monitor.

        Args:
            half: The type whose underflow is counted.
            fetch: Calls a function with the numbers of a tensor, once they are on the host.
        """
        self._half, self._fetch = half, fetch
        limits = torch.finfo(half)
        # Half of the least number above 0: what is not larger rounds to 0.
        self._flushed = int(math.log2(limits.smallest_normal * limits.eps)) - 1
        self._here = _Here()
        self._edges: dict[tuple[torch.device, float], _Edges] = {}
        self._counts = [0] * (_NOT_FINITE + 1)
        self._lost = 0
        self._samples = 0
        self._next = 0
        self._stride = FIRST_STRIDE
        self._scale = 1.0
        self._early: dict[int, list[Tensor]] = {}  # samples of passes that are not judged yet
        self._ran = 0  # the last of those

    def asked_to_step(self, optimizer: Optimizer) -> None:
        here = self._here
        if optimizer is not here.latest():
            here.latest = weakref.ref(optimizer)
            here.optimizers.add(optimizer)

    def ran(self, number: int) -> None:
        self._ran = number
        if self._is_due(number):
            self._next = number + self._stride
            self._early[number] = self._sample()

    def passed(self, one: Pass) -> None:
        sample = self._early.pop(one.number, None)
        if one.kind is not None or one.seen.sticky:
            if sample is not None:
                self._next = self._ran + 1
            return
        if sample is None:
            if one.number <= self._ran or not self._is_due(one.number):
                return
            self._next = one.number + self._stride
            sample = self._sample()
        self._samples += 1
        if self._samples % SAMPLES_A_STRIDE == 0:
            self._stride *= 2
        self._scale = one.seen.scale
        for values in sample:
            key = values.device, self._scale
            edges = self._edges.get(key)
            if edges is None:
                edges = self._edges[key] = _Edges(values.device, 2.0**self._flushed / self._scale)
            self._fetch(edges.count(values), partial(self._add, edges.split))

    def _is_due(self, number: int) -> bool:
        return number >= self._next and bool(self._here.optimizers)

    @torch.inference_mode()  # nothing of autograd is entered for it
    def _sample(self) -> list[Tensor]:
        """Return some numbers of each gradient, by device: what becomes of the gradients does not change them."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for grad in self._gradients():
            flat = grad.reshape(-1)
            # An odd stride: with an even one, a matrix of an even width would be seen in a few columns only.
            stride = (flat.numel() // ELEMENTS) | 1
            by_device.setdefault(grad.device, []).append(flat[::stride].to(torch.float32))
        return [torch.cat(parts) for parts in by_device.values()]

    def _add(self, split: int, counts: list[float]) -> None:
        """Add what one sample counted between its edges, of which one more is at `split`."""
        self._lost += int(sum(counts[1 : split + 1]))
        merged = [*counts[:split], counts[split] + counts[split + 1], *counts[split + 2 :]]
        self._counts = [total + int(more) for total, more in zip(self._counts, merged, strict=True)]

    def _gradients(self) -> Iterator[Tensor]:
        for optimizer in list(self._here.optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    grad = parameter.grad
                    plain = type(grad) is Tensor and grad.layout is torch.strided and grad.is_floating_point()
                    if plain and grad.numel():
                        yield grad

    def snapshot(self) -> dict[str, Any]:
        total = self._counts
        there = total[1:_NOT_FINITE]
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
                "zeros": total[0] / (number + total[0]),
                "underflow": {"unscaled": below / number, "scaled": self._lost / number},
                "scale": self._scale,
            }
        }


# What is at most the first edge is 0; then one bin an exponent, whose edge is its largest number; then no number.
_EDGES = [
    0.0,
    *(math.ldexp(1.0 - 2.0**-24, exponent + 1) for exponent in range(LOWEST, HIGHEST)),
    torch.finfo(torch.float32).max,
]
_NOT_FINITE = len(_EDGES)


class _Edges:
    """The edges of one device at one loss scale: the limit of what underflows is an edge among the others.

    Few kernels do it, and such as take any number as it is: each different kernel that a process calls brings a tenth
    of a MiB of torch's code into its memory.
    """

    def __init__(self, device: torch.device, lost_to: float) -> None:
        """Count on `device`; what is there and not above `lost_to` underflows."""
        self.split: int = bisect_left(_EDGES, lost_to)
        edges = torch.tensor([*_EDGES[: self.split], lost_to, *_EDGES[self.split :]])
        self._edges = edges.to(device, non_blocking=True)  # it need not wait: the numbers are in the command
        self._one = torch.ones(1, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def count(self, values: Tensor) -> Tensor:
        """Return how many of the numbers are between the edges; NaN is in the last, with what is infinite."""
        bins = torch.bucketize(values.abs(), self._edges)
        counts = torch.zeros(len(self._edges) + 1, dtype=torch.int64, device=values.device)
        return counts.scatter_add_(0, bins, self._one.expand(bins.shape))
