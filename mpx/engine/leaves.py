"""Finding the tensors whose `.grad` a backward pass may fill, so that each can be unscaled when it returns.

Three sources, because none is complete alone. Parameters of modules that were called: re-entrant checkpointing fills them from inside the
backward pass, where no walk of the outer graph sees them. Parameters of optimizers: models without modules. A walk of the graph between the
loss and the outermost modules' outputs, and upstream of their inputs: adversarial inputs, learnable images, raw tensors.
The walk stops at marks left on the outputs (`Node.metadata` lives on the C++ node, torch 2.13), so it never enters a model's own graph.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpx.engine.structure import modules_of, tensors

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Leaves"]

MARK = "mpx_outermost_output"


class Leaves:
    """The leaves that this process has seen; everything is held weakly."""

    def __init__(self) -> None:
        self._roots: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()  # in the order of first calls
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._others: dict[int, weakref.ref[Tensor]] = {}

    def saw_call(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the tree of an outermost call, and what is upstream of its inputs."""
        if not torch.is_grad_enabled():
            return
        self._roots[root] = None
        inputs = [t for t in tensors((args, kwargs)) if t.requires_grad]
        if inputs:
            self._walk(inputs)

    def saw_output(self, output: Any) -> None:
        """Mark the graph nodes at which a later walk may stop."""
        for tensor in tensors(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.metadata[MARK] = True

    def saw_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember an optimizer; its groups are read anew at each backward pass."""
        self._optimizers.add(optimizer)

    def roots(self) -> list[nn.Module]:
        """Return the outermost modules that are alive, in the order of their first call."""
        return list(self._roots)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that are alive."""
        return list(self._optimizers)

    def of(self, roots: Iterable[Tensor]) -> list[Tensor]:
        """Return every leaf whose gradient a backward pass from `roots` may change, each once."""
        self._walk(roots)
        found: dict[int, Tensor] = {}
        for root in list(self._roots):
            for module in modules_of(root):
                for parameter in module._parameters.values():
                    if parameter is not None and parameter.is_leaf:
                        found[id(parameter)] = parameter
        for optimizer in list(self._optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    found[id(parameter)] = parameter
        for key, reference in list(self._others.items()):
            leaf = reference()
            if leaf is None:
                del self._others[key]
            else:
                found[key] = leaf
        return list(found.values())

    def _walk(self, roots: Iterable[Tensor]) -> None:
        stack = []
        for root in roots:
            if root.grad_fn is not None:
                stack.append(root.grad_fn)
            elif root.requires_grad:
                self._others[id(root)] = weakref.ref(root)
        seen = set(stack)
        while stack:
            node = stack.pop()
            variable = getattr(node, "variable", None)
            if variable is not None:  # AccumulateGrad
                self._others[id(variable)] = weakref.ref(variable)
            if MARK in node.metadata:
                continue
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    stack.append(following)
