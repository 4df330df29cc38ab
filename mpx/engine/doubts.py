"""Which gradients overflowed, as far as only an accelerator knows: flags on the device, one a gradient.

They are to a deferred pass what `gradients.Flags` are to one that was waited for, with the same life: a flag dies with
its gradient, clipping does not hide it, and what was stepped with is cleared before another pass adds to it. `Flags`
takes over once the verdict has arrived.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as every_optimizer

from mpx.engine.gradients import largest, where_not_finite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from mpx.engine.leaves import Leaves

__all__ = ["Before", "Doubt", "Doubts", "Filled", "skips_by_itself"]

Filled = list[tuple["Tensor", "Tensor"]]  # leaf and gradient


@dataclass(slots=True)
class Doubt:
    """What a pass left.

    Attributes:
        leaves: Those that had a gradient, by optimizer; last those that none steps. What a script forgets is not kept.
        grads: Their gradients.
        versions: Of those, when the pass had ended.
        bad: Bool, one a leaf, on the device: whether its gradient is not finite.
        parts: Where the leaves of an optimizer begin and end, by its id.
        spent: Optimizers that have stepped since, by id.
        by_scale: Once the verdict is here, the leaves that overflowed, by id, and whether the loss had been finite.
    """

    leaves: list[weakref.ref[Tensor]]
    grads: list[weakref.ref[Tensor]]
    versions: list[int]
    bad: Tensor
    parts: dict[int, tuple[int, int]]
    spent: set[int] = field(default_factory=set)
    by_scale: dict[int, bool] = field(default_factory=dict)

    def part(self, optimizer: Optimizer) -> tuple[int, int]:
        """Return where the leaves of an optimizer begin and end."""
        return self.parts.get(id(optimizer), (0, 0))

    def present(self, begin: int = 0, end: int | None = None) -> list[tuple[int, Tensor, Tensor]]:
        """Return of the leaves that have a gradient now their place, themselves and that gradient."""
        return [
            (place, leaf, grad)
            for place, one in enumerate(self.leaves[begin:end], begin)
            if (leaf := one()) is not None and (grad := leaf.grad) is not None
        ]


@dataclass(slots=True)
class Before:
    """What of that is still there when the next pass begins.

    Attributes:
        leaves: Whose gradients the script has neither dropped nor stepped with.
        grads: Those, with their version when the engine began.
        bad: Bool, one a leaf, on the device.
        doubt: Where it comes from.
    """

    leaves: list[Tensor]
    grads: list[tuple[Tensor, int]]
    bad: Tensor
    doubt: Doubt

    def begun(self) -> None:
        """The engine begins: what is written into gradients from now on is added to them."""
        self.grads = [(grad, grad._version) for grad, _ in self.grads]

    def overflowed(self) -> tuple[list[tuple[Tensor, weakref.ref[Tensor]]], dict[int, bool]]:
        """Return, once the verdict is here, what `Flags.raise_later` asks for."""
        known = self.doubt.by_scale
        flagged = zip(self.leaves, self.grads, strict=True)
        return [(leaf, weakref.ref(grad)) for leaf, (grad, _) in flagged if id(leaf) in known], known

    def among(self, filled: Filled, false: Tensor) -> tuple[Tensor, Tensor]:
        """Return a flag for each filled leaf, whether it overflowed before the pass, and whether the pass added to one.

        Args:
            filled: The leaves that have a gradient after the pass, before that is made true.
            false: A flag that is not raised.
        """
        place_of = {id(leaf): place for place, leaf in enumerate(self.leaves)}
        if not filled:
            before = false.reshape(1)
        elif [id(leaf) for leaf, _ in filled] == list(place_of):
            before = self.bad
        else:
            places = [place_of.get(id(leaf)) for leaf, _ in filled]
            before = torch.stack([false if place is None else self.bad[place] for place in places])
        added = [
            place
            for place, (leaf, (grad, version)) in enumerate(zip(self.leaves, self.grads, strict=True))
            if leaf.grad is not None and (leaf.grad is not grad or grad._version != version)
        ]
        if not added:
            return before, false
        if len(added) == len(self.leaves):
            return before, self.bad.any()
        return before, torch.stack([self.bad[place] for place in added]).any()


class Doubts:
    """The doubt that the latest pass of each thread left, while its verdict is on its way."""

    def __init__(self, leaves: Leaves) -> None:
        self._leaves = leaves
        self._of_thread: dict[int, Doubt] = {}

    def outlast(self, leaves: Sequence[Tensor]) -> bool:
        """Whether a pass to these leaves cannot take over what is in doubt.

        The script has put another gradient in the place of one, or the pass leaves one alone (`inputs`).
        """
        doubt = self._of_thread.get(threading.get_ident())
        if doubt is None:
            return False
        filled = set(map(id, leaves))
        return any(
            grad is not doubt.grads[place]() or id(leaf) not in filled
            for place, leaf, grad in doubt.present()
        )

    @torch.no_grad()
    def begin_pass(self) -> Before | None:
        """Return what of the last pass is in the gradients now; clear what an optimizer may have skipped for."""
        doubt = self._of_thread.pop(threading.get_ident(), None)
        if doubt is None:
            return None
        stepped = {place for optimizer in doubt.spent for place in range(*doubt.parts[optimizer])}
        rest = []
        for place, leaf, grad in doubt.present():
            if place in stepped:
                grad.masked_fill_(doubt.bad[place], 0)
            else:
                rest.append((place, leaf, grad))
        if not rest:
            return None
        whole = len(rest) == len(doubt.leaves)
        bad = doubt.bad if whole else torch.stack([doubt.bad[place] for place, _, _ in rest])
        if any(grad._version != doubt.versions[place] for place, _, grad in rest):
            bad = bad & (largest([grad for _, _, grad in rest]) != 0)  # zeroed by the script, or clipped
        return Before([leaf for _, leaf, _ in rest], [(grad, 0) for _, _, grad in rest], bad, doubt)

    def end_pass(self, filled: Filled, parts: dict[int, tuple[int, int]], bad: Tensor) -> Doubt:
        """Keep in doubt what a pass of this thread has left, as of `by_optimizer`."""
        grads = [grad for _, grad in filled]
        doubt = self._of_thread[threading.get_ident()] = Doubt(
            [weakref.ref(leaf) for leaf, _ in filled],
            [weakref.ref(grad) for grad in grads],
            [grad._version for grad in grads],
            bad,
            parts,
        )
        return doubt

    def resolve(self, doubt: Doubt) -> bool:
        """The verdict is here; return whether no other pass has begun since, so that `Flags` is to know."""
        for thread, one in list(self._of_thread.items()):
            if one is doubt:
                del self._of_thread[thread]
                return True
        return False

    def by_optimizer(self, filled: Filled) -> tuple[Filled, dict[int, tuple[int, int]]]:
        """Return leaves and gradients by the optimizer that steps them, and where each begins and ends; others last."""
        of_optimizer: dict[int, Filled] = {}
        owner = {}
        for optimizer in self._leaves.optimizers():
            some = of_optimizer[id(optimizer)] = []
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    owner[id(parameter)] = some
        others: Filled = []
        for leaf, grad in filled:
            owner.get(id(leaf), others).append((leaf, grad))
        ordered: Filled = []
        parts = {}
        for key, some in of_optimizer.items():
            parts[key] = len(ordered), len(ordered) + len(some)
            ordered += some
        return ordered + others, parts

    def decide(self, optimizer: Optimizer) -> bool:
        """Whether the device alone can keep an optimizer from a step with overflowed gradients."""
        if not skips_by_itself(optimizer):
            return False
        if not self._of_thread:
            return True
        in_doubt: set[int] = set()
        for doubt in self._of_thread.values():
            begin, end = doubt.part(optimizer)
            present = doubt.present(begin, end)
            if 0 < len(present) < end - begin:  # dropped in part
                return False
            if any(grad is not doubt.grads[place]() for place, _, grad in present):
                return False
            in_doubt.update(id(leaf) for _, leaf, _ in present)
        # a parameter that came or went since, and a gradient that no pass made, only `Flags` can judge
        return in_doubt == {
            id(parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }

    @torch.no_grad()
    def found_inf(self, optimizer: Optimizer) -> Tensor | None:
        """Return for an optimizer that steps now whether a gradient of it overflowed: FP32, 1 or 0, no dimension.

        None where that is not in doubt.
        """
        found = []
        for doubt in self._of_thread.values():
            begin, end = doubt.part(optimizer)
            grads = [grad for _, _, grad in doubt.present(begin, end)]
            if not grads:
                continue
            doubt.spent.add(id(optimizer))
            bad = doubt.bad[begin:end]
            if [grad._version for grad in grads] == doubt.versions[begin:end]:
                found.append(bad.any())
                continue
            # clipped, which hides nothing; zeroed, which ends it; or mixed with those of another optimizer
            size = largest(grads)
            found.append((bad & (size != 0)).any())
            found.append(doubt.bad.any() & where_not_finite(size).any())
        return torch.stack(found).any().to(torch.float32) if found else None


def skips_by_itself(optimizer: Optimizer) -> bool:
    """Whether a step of an optimizer does nothing where `found_inf` is 1, and nobody else would notice it.

    torch's fused kernels do so. Its SGD is left with a momentum that nobody has written when its first step is skipped
    (torch 2.13), and hooks of steps are called for those that are skipped as well.
    """
    own = type(optimizer).__module__.startswith("torch.optim")
    if not (own and getattr(optimizer, "_step_supports_amp_scaling", False)):
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    if every_optimizer._global_optimizer_pre_hooks or every_optimizer._global_optimizer_post_hooks:
        return False
    return all(group.get("fused") and _has_begun(optimizer, group) for group in optimizer.param_groups)


def _has_begun(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    if not group.get("momentum"):
        return True
    state = optimizer.state
    return all("momentum_buffer" in state.get(p, ()) for p in group["params"] if p.grad is not None)
