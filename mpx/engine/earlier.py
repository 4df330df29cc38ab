"""The gradients from before a pass: at its scale while it accumulates onto them, or set aside where they cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpx.engine.gradients import is_one, non_finite_flags, scale_, unscale_
from mpx.engine.leaves import graded

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

__all__ = ["Earlier", "look"]


class Earlier:
    """Brings earlier gradients to the scale of a pass that begins, and all gradients back from it."""

    def __init__(
        self,
        leaves: Iterable[Tensor],
        scale: float | Tensor,
        *,
        set_aside: bool,
        flagged: Iterable[Tensor] = (),
    ) -> None:
        """Prepare for a pass.

        Args:
            leaves: Whose gradients the pass may fill.
            scale: That of the pass.
            set_aside: Whether the pass makes gradients with graphs of their own (`create_graph`). Then torch does not
                accumulate in place, so a tensor that the script holds is not ours to change.
            flagged: The leaves that `added_to` will be asked about.
        """
        self._scale, self._differentiable = scale, set_aside
        self._aside: list[tuple[Tensor, Tensor]] = []
        self._scaled: dict[int, Tensor] = {}  # by id: two leaves may share one
        self._flagged = [(leaf, grad, grad._version) for leaf in flagged if (grad := leaf.grad) is not None]
        if is_one(scale):
            return  # nothing is ours to change: torch adds to what there is, as it does by itself
        for leaf, grad in graded(leaves):
            if set_aside or grad.requires_grad or grad.is_inference():
                self._aside.append((leaf, grad))
                leaf.grad = None
            else:
                self._scaled[id(grad)] = grad
        if self._scaled:
            scale_(self._scaled.values(), scale)
            self._flagged = [(leaf, grad, grad._version) for leaf, grad, _ in self._flagged]

    def added_to(self) -> list[Tensor]:
        """Return the flagged leaves to whose gradient the pass has added; to be asked before `make_true`."""
        return [
            leaf
            for leaf, grad, version in self._flagged
            if leaf.grad is not None and (leaf.grad is not grad or grad._version != version)
        ]

    def make_true(self, filled: Sequence[tuple[Tensor, Tensor]], done: Sequence[Tensor] = ()) -> list[Tensor]:
        """Unscale the gradients of the leaves that have one, add what was set aside, and return flags for `read`.

        Args:
            filled: The leaves that have a gradient after the pass, with it.
            done: Gradients of before that are true already; at a scale of 1 all are.
        """
        if is_one(self._scale):
            return look(filled)
        if self._differentiable:
            for leaf, grad in filled:
                leaf.grad = grad * (1.0 / self._scale)
            flags = non_finite_flags(leaf.grad for leaf, _ in filled if leaf.grad is not None)
        else:
            scaled = {id(grad): grad for _, grad in filled}
            if self._scaled:
                # a hook or a change of layout may have put another tensor in the place of one that was scaled
                true = {id(grad) for grad in done}
                scaled.update((key, grad) for key, grad in self._scaled.items() if key not in true)
            flags = unscale_(scaled.values(), self._scale)
        for leaf, grad in self._aside:
            with torch.enable_grad():
                leaf.grad = grad if leaf.grad is None else grad + leaf.grad
        return flags


def look(filled: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return flags for `read`: whether gradients of leaves, given with them, are infinite or NaN somewhere."""
    # this multiplies by 1 in place: not where a graph may have saved what it looks at
    return unscale_([grad.detach().clone() if grad.requires_grad else grad for _, grad in filled], 1.0)
