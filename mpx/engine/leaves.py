"""Finding the tensors whose `.grad` a backward pass may fill, so that each can be unscaled when it returns.

Several sources, because none is complete alone. Parameters of modules that were called: re-entrant checkpointing fills
them from inside the backward pass, where no walk of the outer graph sees them. Parameters of optimizers: models without
modules. A walk of the graph between the loss and the outermost modules' outputs, and upstream of their inputs:
adversarial inputs, learnable images, raw tensors. It stops at marks left on the outputs (`Node.metadata` lives on the
C++ node, torch 2.13), so it does not pay for the size of a model; only the first calls of each module are surveyed in
full, for tensors that a model uses and does not register. And what the script asks to keep by `retain_grad`.

Where losses are scaled, the parameters that were there when a call ended are remembered as well: until its pass they
may be replaced, their module may be gone, and `torch.func.functional_call` has only lent them.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch._subclasses import FakeTensor

from mpx.engine.structure import modules_of, tensors
from mpx.engine.widened import keep_grad, notes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from torch.autograd.graph import Node

__all__ = ["Leaves", "graded"]

AccumulateGrad: type[Any] = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
Thing = TypeVar("Thing")

MARK = "mpx_outermost_output"
SURVEYED_CALLS = 2  # what a model uses without registering it is mostly there from the beginning


def graded(leaves: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return those that hold a gradient, with it; without torch's warning that others than leaves mostly do not."""
    return [
        (leaf, grad)
        for leaf in leaves
        if (leaf.is_leaf or leaf.retains_grad) and (grad := leaf.grad) is not None
    ]


class _Alive(Generic[Thing]):
    """Objects by identity, in the order in which they came, as long as they live; asked in every pass, hence a dict."""

    __slots__ = ("by_id",)

    def __init__(self) -> None:
        self.by_id: dict[int, weakref.ref[Thing]] = {}

    def add(self, thing: Thing) -> None:
        known, key = self.by_id, id(thing)
        if key not in known:
            known[key] = weakref.ref(thing, lambda _: known.pop(key, None))

    def alive(self) -> list[Thing]:
        return [thing for one in list(self.by_id.values()) if (thing := one()) is not None]


class _Here(threading.local):
    """What one thread has seen: a pass must not touch the gradients of a model that another thread trains."""

    def __init__(self) -> None:
        self.roots: _Alive[nn.Module] = _Alive()
        self.optimizers: _Alive[torch.optim.Optimizer] = _Alive()
        self.others: dict[int, weakref.ref[Tensor]] = {}


class Leaves:
    """The leaves that this process has seen, by thread; everything is held weakly."""

    def __init__(self, *, scaled: bool) -> None:
        """Know nothing yet; `scaled` says whether what is not found stays multiplied by a loss scale."""
        self._scaled = scaled
        self._roots: _Alive[nn.Module] = _Alive()
        self._optimizers: _Alive[torch.optim.Optimizer] = _Alive()
        self._surveys: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._surveyed: _Alive[nn.Module] = _Alive()
        self._here = _Here()

    def wrap_retain_grad(self, original: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """Return the `Tensor.retain_grad` of the session: what it keeps is made true as well."""

        def retain_grad(tensor: Tensor) -> None:
            kept = tensor.retains_grad
            original(tensor)
            self.saw_tensor(tensor)
            if not kept:
                keep_grad(tensor)

        retain_grad.__doc__ = original.__doc__
        return retain_grad

    def saw_tensor(self, tensor: Tensor) -> None:
        """Remember a tensor that gets a gradient."""
        self._here.others[id(tensor)] = weakref.ref(tensor)

    def saw_root(self, root: nn.Module) -> None:
        """Remember the tree of an outermost call.

        Also of a call without gradients, if it can have any: re-entrant checkpointing makes one, and has them later.
        """
        if id(root) not in self._here.roots.by_id and (
            torch.is_grad_enabled() or any(parameter.requires_grad for parameter in root.parameters())
        ):
            self._roots.add(root)
            self._here.roots.add(root)

    def saw_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember what is upstream of the inputs of an outermost call with gradients."""
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:  # mostly so
            if args[0].requires_grad:
                self._walk(args)
            return
        inputs = [t for t in tensors((args, kwargs)) if t.requires_grad]
        if inputs:
            self._walk(inputs)

    def saw_output(self, root: nn.Module, output: Any) -> None:
        """Mark the graph nodes at which a later walk may stop; at the first calls, survey what is behind them."""
        found = (output,) if type(output) is Tensor else tensors(output)
        nodes = [node for tensor in found if (node := tensor.grad_fn) is not None]
        if not nodes:
            return
        if id(root) not in self._surveyed.by_id:
            self._surveys[root] = number = self._surveys.get(root, 0) + 1
            if number == SURVEYED_CALLS:
                self._surveyed.add(root)
            self._walk_from(
                nodes, registered={id(p) for m in modules_of(root) for p in m._parameters.values()}
            )
        # not beside other ranks: what FSDP gathers for a call looks like a parameter there, and is nobody's leaf
        if self._scaled and not (distributed.is_available() and distributed.is_initialized()):
            for parameter in _registered([root]).values():
                self.saw_tensor(parameter)
        mark = weakref.ref(root), threading.get_ident()
        for node in nodes:
            notes_of(node)[MARK] = mark

    def saw_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember an optimizer; its groups are read anew at each backward pass."""
        if id(optimizer) not in self._here.optimizers.by_id and _has_numbers(optimizer):
            self._optimizers.add(optimizer)
            self._here.optimizers.add(optimizer)

    def stepped(self) -> dict[int, bool]:
        """Return, by id, the parameters that an optimizer steps, and whether those are torch's own classes only.

        A class of the script's may use gradients before its step, as the first step of SAM does.
        """
        found: dict[int, bool] = {}
        for optimizer in self._optimizers.alive():
            own = type(optimizer).__module__.startswith("torch.optim")
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    found[id(parameter)] = found.get(id(parameter), True) and own
        return found

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that are alive."""
        return self._optimizers.alive()

    def roots(self) -> list[nn.Module]:
        """Return the outermost modules that are alive, in the order of their first call."""
        return self._roots.alive()

    def of(self, roots: Iterable[Tensor]) -> list[Tensor]:
        """Return every tensor whose `.grad` a backward pass from `roots` may change, each once."""
        self._walk(roots)
        here = self._here
        found = _registered(here.roots.alive())
        for optimizer in here.optimizers.alive():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    found[id(parameter)] = parameter
        if here.others:
            for key, reference in list(here.others.items()):
                leaf = reference()
                if leaf is None:
                    del here.others[key]
                else:
                    found[key] = leaf
        return list(found.values())

    def new_of(self, roots: Iterable[Tensor]) -> list[Tensor]:
        """Return the leaves of `roots` that were not seen before: of a pass in a pass, whose graph is no part of it."""
        others = self._here.others
        before = set(others)
        self._walk(roots)
        return [leaf for key in others.keys() - before if (leaf := others[key]()) is not None]

    def _walk(self, roots: Iterable[Tensor]) -> None:
        nodes = []
        for root in roots:
            node = root.grad_fn
            if node is not None:
                nodes.append(node)
            elif root.requires_grad:
                self.saw_tensor(root)
        self._walk_from(nodes)

    def _walk_from(self, nodes: list[Node], registered: Collection[int] = ()) -> None:
        found, seen = list(nodes), set(nodes)
        for node in found:  # grows while it is walked
            if isinstance(node, AccumulateGrad):
                if id(node.variable) not in registered:
                    self.saw_tensor(node.variable)
                continue
            mark = notes_of(node).get(MARK)
            if mark is not None:
                root, thread = mark[0](), mark[1]
                if root is not None and id(root) not in self._here.roots.by_id:  # another thread called it
                    self._here.roots.add(root)
                if root is not None and thread == threading.get_ident():
                    continue  # what is upstream of its inputs is known here, and not what another thread has seen
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    found.append(following)


def _has_numbers(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it steps anything else than shapes, on the meta device or fake, of which nothing can be read."""
    return any(
        not parameter.is_meta and type(parameter) is not FakeTensor
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def _registered(roots: Iterable[nn.Module]) -> dict[int, Tensor]:
    """Return the parameters of module trees, by id."""
    found: dict[int, Tensor] = {}
    for root in roots:
        for module in modules_of(root):
            for parameter in module._parameters.values():
                if parameter is not None and parameter.is_leaf:
                    found[id(parameter)] = parameter
    return found
