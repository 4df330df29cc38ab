"""Scaled gradients in, true gradients out: the arithmetic on lists of `.grad`, and the flags of those that overflowed.

What is asked of a device is a tensor first, a flag that is nonzero where something was infinite or NaN. `read` fetches
all flags of a pass together: one synchronisation. A scale is a number, or a tensor where the host does not know it yet.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "ZEROED",
    "Flags",
    "clear_",
    "is_one",
    "is_one_number",
    "largest",
    "non_finite",
    "non_finite_flags",
    "read",
    "rescale",
    "scale_",
    "unscale_",
    "where_not_finite",
]

# What is told where `Flags.expose` returns that it zeroed something.
ZEROED = (
    "zeroed-gradients",
    "overflowed gradients set to 0 where no torch optimizer steps: an update by hand adds nothing",
)
COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _values(grad: Tensor) -> Tensor:
    """Return the tensor that holds a gradient's numbers: the values of a sparse one, whose layout must not change.

    Of a DTensor it is this rank's shard. What concerns all of them is asked in `ranks`, at a time that they agree on.
    """
    if type(grad) is not Tensor:
        grad = getattr(grad, "_local_tensor", grad)
    if grad.layout is torch.sparse_coo:
        return grad._values()
    return grad.values() if grad.layout in COMPRESSED else grad


def _grouped(grads: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the real numbers of gradients, detached, by device and type; all of one kind, mostly."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    strided = torch.strided
    group: list[Tensor] = []
    device = dtype = None
    for grad in grads:
        # a loop over every parameter of a model, in each pass: the usual kind takes the short way
        if type(grad) is Tensor and grad.layout is strided and not grad.requires_grad:
            numbers = grad
        else:
            numbers = _values(grad).detach()
        if numbers.dtype is not dtype or numbers.device != device:
            if numbers.is_complex():  # a real factor does to a conjugate what it does to the number
                numbers = torch.view_as_real(numbers.conj() if numbers.is_conj() else numbers)
            device, dtype = numbers.device, numbers.dtype
            group = groups.setdefault((device, dtype), [])
        group.append(numbers)
    return list(groups.values())


def is_one(scale: float | Tensor) -> bool:
    """Whether a scale is known to change nothing; of one on a device nobody asks."""
    return not isinstance(scale, Tensor) and scale == 1.0


def is_one_number(losses: Sequence[Tensor]) -> bool:
    """Whether the roots of a pass are one real number."""
    return len(losses) == 1 and losses[0].numel() == 1 and not losses[0].is_complex()


def where_not_finite(numbers: Tensor) -> Tensor:
    """Return whether each number is infinite or NaN: bool, in two kernels where `isfinite` takes four."""
    return (numbers - numbers) != 0


def scale_(grads: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply gradients in place; exact for a power of two."""
    for group in _grouped(grads):
        torch._foreach_mul_(group, factor)


def rescale(leaves: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply the gradients of leaves: in place, if no graph could notice."""
    if is_one(factor):
        return
    for leaf in leaves:
        grad = leaf.grad
        if grad is not None and grad.requires_grad:
            leaf.grad = grad * factor
        elif grad is not None:
            scale_([grad], factor)


def unscale_(grads: Iterable[Tensor], scale: float | Tensor) -> list[Tensor]:
    """Divide gradients by `scale` in place and return flags for `read`: whether any was infinite or NaN."""
    flags = []
    for group in _grouped(grads):
        if group[0].dtype is torch.float64:  # the kernel takes FP32 and half only
            torch._foreach_mul_(group, 1.0 / scale)
            flags.append(_flag(torch.isfinite(largest(group))))
        else:
            if isinstance(scale, Tensor):
                inverse = scale.reciprocal().to(group[0].device)
            else:
                inverse = _inverse(scale, group[0].device)
            flag = torch.zeros_like(inverse)
            torch._amp_foreach_non_finite_check_and_unscale_(group, flag, inverse)
            flags.append(flag)
    return flags


@lru_cache(maxsize=256)
def _inverse(scale: float, device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):
        return torch.full((), 1.0 / scale, dtype=torch.float32, device=device)


def largest(grads: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude in each gradient, in their order and type; NaN where it holds one.

    Args:
        grads: At least one, of one real type, on one device.
    """
    numbers = [_values(grad) for grad in grads]
    norms = list(torch._foreach_norm([one for one in numbers if one.numel()], float("inf")))
    if len(norms) < len(numbers):  # of nothing there is no largest
        there, nothing = iter(norms), numbers[0].new_zeros(())
        norms = [next(there) if one.numel() else nothing for one in numbers]
    return torch.stack(norms)


@torch.no_grad()
def non_finite_flags(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return a flag for each tensor, for `read`; changes nothing."""
    return [_flag(torch.isfinite(_values(tensor).detach())) for tensor in tensors]


def _flag(finite: Tensor) -> Tensor:
    return finite.all().logical_not().to(torch.float32)


def read(flags: Sequence[Tensor]) -> list[float]:
    """Return the value of each flag, or other tensor of one number. Waits for each device once."""
    if len(flags) == 1:
        return [flags[0].item()]
    answers: dict[int, float] = {}
    groups: dict[torch.device, list[int]] = defaultdict(list)
    for place, flag in enumerate(flags):
        if type(flag) is Tensor and flag.device.type != "cpu":
            groups[flag.device].append(place)
        else:
            answers[place] = flag.item()
    for places in groups.values():
        values = torch.stack([flags[place].to(torch.float64) for place in places]).tolist()
        answers.update(zip(places, values, strict=True))
    return [answers[place] for place in range(len(flags))]


def non_finite(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves whose gradient holds an infinity or NaN. For the rare case: it looks at each one."""
    graded = [(leaf, leaf.grad) for leaf in leaves if leaf.grad is not None]
    flags = read(non_finite_flags(grad for _, grad in graded))
    return [leaf for (leaf, _), bad in zip(graded, flags, strict=True) if bad]


@torch.no_grad()
def clear_(grads: Iterable[Tensor | None]) -> None:
    """Set overflowed gradients to 0."""
    for grad in grads:
        if grad is None:
            continue
        numbers = _values(grad).detach()
        numbers.zero_()


@dataclass(slots=True)
class _Flag:
    leaf: weakref.ref[Tensor]
    grad: weakref.ref[Tensor]
    by_scale: bool  # and not by a loss that was infinite or NaN itself
    cleared: bool = False  # by us: zeros are no sign that the script did it
    spent: bool = False


class Flags:
    """Which gradients overflowed when they were computed.

    A flag belongs to one gradient and dies with it: when `.grad` is set to None, replaced or zeroed. What a script does
    to it in between (clipping) does not remove it. Once a step was skipped for it a flag is spent: it dies at the next
    backward pass, so a script that never zeroes its gradients loses one step and not all.
    """

    def __init__(self) -> None:
        self.raised: dict[int, _Flag] = {}  # by id of the leaf; empty while nothing overflows

    def raise_for(self, leaves: Sequence[Tensor], *, by_scale: bool | None = None) -> None:
        """Flag the present gradient of each leaf.

        Args:
            leaves: Whose gradients are not finite.
            by_scale: Whether the losses were: a lower scale would have served. None where a flag says so already.
        """
        for leaf in leaves:
            if leaf.grad is not None:
                before = self.raised.get(id(leaf))
                known = before is not None and before.by_scale
                self.raised[id(leaf)] = _Flag(
                    weakref.ref(leaf), weakref.ref(leaf.grad), known if by_scale is None else by_scale
                )
        for key in [key for key, flag in self.raised.items() if flag.leaf() is None]:
            del self.raised[key]

    def raise_later(
        self, leaves: Iterable[tuple[Tensor, weakref.ref[Tensor]]], by_scale: Mapping[int, bool]
    ) -> None:
        """Flag the gradients that leaves had when they overflowed; what has become of them since, `among` sees.

        Args:
            leaves: And the gradient of each, not finite then.
            by_scale: As of `raise_for`, by the id of the leaf.
        """
        for leaf, grad in leaves:
            self.raised[id(leaf)] = _Flag(weakref.ref(leaf), grad, by_scale[id(leaf)])

    def lower(self, leaves: Iterable[Tensor]) -> None:
        """Forget what is known of these leaves."""
        for leaf in leaves:
            self.raised.pop(id(leaf), None)

    def expose(
        self,
        filled: Sequence[Tensor],
        overflowed: Sequence[Tensor],
        stepped: Mapping[int, bool] | None,
        *,
        by_scale: bool,
    ) -> bool:
        """Flag what overflowed, and leave its infinities to be found only where a step will be skipped for them.

        Returns whether gradients were zeroed that no optimizer steps: an update by hand has no effect.

        Args:
            filled: The leaves that have a gradient after the pass.
            overflowed: Those of them that overflowed in it.
            stepped: As of `Leaves.stepped`: where torch's own optimizers step, a script that looks for infinities to
                drop the batch finds them; a class of the script's own gets zeros and is skipped; an update by hand
                gets zeros everywhere and so leaves itself out. None where nothing is skipped.
            by_scale: As of `raise_for`.
        """
        if stepped is None:
            self.raise_for(overflowed, by_scale=by_scale)
            return False
        self.raise_for([leaf for leaf in overflowed if id(leaf) in stepped], by_scale=by_scale)
        for leaf in overflowed:
            if stepped.get(id(leaf)) is False:
                self.raised[id(leaf)].cleared = True
                clear_([leaf.grad])
        unstepped = [leaf.grad for leaf in filled if id(leaf) not in stepped]
        clear_(unstepped)
        return bool(unstepped)

    def among(self, leaves: Iterable[Tensor]) -> list[Tensor]:
        """Return those of `leaves` whose gradient is flagged."""
        return [leaf for leaf in leaves if self._alive(leaf)]

    def reach(self, leaves: Iterable[Tensor]) -> list[Tensor]:
        """Return those of `leaves` whose gradient is flagged or not finite, while any gradient at all is flagged.

        A script mixes gradients of several optimizers (one norm that clips them all): what is not finite then is so
        by the flagged one, and is flagged as well.
        """
        leaves = list(leaves)
        flagged = self.among(leaves)
        known = {id(leaf) for leaf in flagged}
        everywhere = [leaf for flag in self.raised.values() if (leaf := flag.leaf()) is not None]
        if any(self._alive(leaf) for leaf in everywhere):
            mixed = non_finite(leaf for leaf in leaves if id(leaf) not in known)
            self.raise_for(mixed, by_scale=True)
            flagged += mixed
        return flagged

    def explain(self, grads: Sequence[Tensor]) -> bool:
        """Return whether what is not finite among these gradients is the loss scale's doing."""
        known = {id(flag.grad()) for flag in self.raised.values() if flag.by_scale}
        bad = read(non_finite_flags(grads))
        return any(bad) and all(id(grad) in known for grad, is_bad in zip(grads, bad, strict=True) if is_bad)

    def spend(self, leaves: Iterable[Tensor]) -> None:
        """Note that a step was skipped for these leaves, and clear what overflowed: nothing may add to it."""
        leaves = list(leaves)
        for leaf in leaves:
            self.raised[id(leaf)].cleared = self.raised[id(leaf)].spent = True
        clear_(leaf.grad for leaf in leaves)

    def begin_pass(self, leaves: Iterable[Tensor]) -> list[Tensor]:
        """Return those of `leaves` that are flagged, before a backward pass adds to them; forget spent flags."""
        flagged = self.among(leaves)
        for leaf in flagged:
            if self.raised[id(leaf)].spent:
                del self.raised[id(leaf)]
        return [leaf for leaf in flagged if id(leaf) in self.raised]

    def _alive(self, leaf: Tensor) -> bool:
        flag = self.raised.get(id(leaf))
        if flag is None:
            return False
        grad = leaf.grad
        same = flag.leaf() is leaf and grad is not None and flag.grad() is grad
        if not same and flag.leaf() is leaf and non_finite([leaf]):
            self.raise_for([leaf])  # replaced by what was made of it (`p.grad = p.grad * 0.5`)
            return True
        if same and hasattr(grad, "_local_tensor"):
            return True  # its other shards may hold what is missing here
        if same and grad is not None:
            zeroed = not bool(_values(grad).detach().count_nonzero().item())  # NaN counts as nonzero
            if flag.cleared or not zeroed:
                return True
        del self.raised[id(leaf)]
        return False
