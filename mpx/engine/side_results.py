"""What a forward pass leaves in attributes of its modules (`self.attention = weights`) becomes FP32 as what it returns.

The script finds it there when it is in FP32 again: it plots it, or makes a loss of it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from mpx.engine.structure import map_tensors, tensors
from mpx.engine.widened import widen

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["SideResults"]

SEARCHED_CALLS = 3  # of each root: to look at every attribute of a large model takes a while
NOT_THE_SCRIPTS = frozenset(vars(nn.Module()))


class SideResults:
    """Knows by attribute, and learns them in the first calls. What is half before a call is the script's own."""

    def __init__(self, half: torch.dtype) -> None:
        self._half = half
        self._calls: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()

    def before(self, root: nn.Module, parts: list[nn.Module]) -> set[tuple[int, str]] | None:
        """Return the attributes that are half before a call, or None where nobody will look for new ones."""
        calls = self._calls.get(root, 0)
        if calls == SEARCHED_CALLS:
            return None
        self._calls[root] = calls + 1
        return {(id(part), name) for part in parts for name in self._half_attributes(part)}

    def after(self, parts: list[nn.Module], own: set[tuple[int, str]] | None) -> None:
        """Widen what a call left; `own` is what `before` returned."""
        if own is not None:
            for part in parts:
                new = {name for name in self._half_attributes(part) if (id(part), name) not in own}
                if new:
                    self._known.setdefault(part, set()).update(new)
        if not self._known:
            return
        for part in parts:
            for name in self._known.get(part, ()):
                if name in vars(part):
                    vars(part)[name] = map_tensors(vars(part)[name], self._widened)

    def _half_attributes(self, part: nn.Module) -> list[str]:
        return [
            name
            for name, value in vars(part).items()
            if name not in NOT_THE_SCRIPTS and any(t.dtype is self._half for t in tensors(value))
        ]

    def _widened(self, tensor: Tensor) -> Tensor:
        # asked to keep its gradient (`self.h.retain_grad()` in the forward pass), it is looked for on this very tensor
        return tensor if tensor.retains_grad else widen(tensor, self._half)
