"""Adam, AdamW and SGD with momentum by torch's fused kernels, where the script leaves that choice to torch.

On a CPU torch updates one parameter after the other, in a dozen operations each. Its fused kernels compute the same
formulas in one pass over memory and without temporaries. They round in another order, so O0 does without.

They trust their caller: torch 2.13 takes a parameter, its gradient and its state as so many numbers in a row, and where
shapes or layouts differ writes past their end, or updates the wrong numbers. So all of that is asked before each step,
of nothing but torch's own classes with options of the usual kind; anything else is updated as torch does it by itself.
Mostly the answer is that all is as it was: `TensorGuards`, with which compiled code of torch asks whether it may run,
compares type, layout and size of a list of tensors with what they were in one call.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.optim import SGD, Adam, AdamW
from torch.optim import optimizer as optimizer_module

from mpx.engine.placing import in_transform

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from mpx.engine.kernels import Report

__all__ = ["FusedUpdates"]

STATE = {  # that the kernels write, by exact class; each tensor is as its parameter
    Adam: ("exp_avg", "exp_avg_sq"),
    AdamW: ("exp_avg", "exp_avg_sq"),
    SGD: ("momentum_buffer",),
}
COUNT = "step"
ONE = torch.ones((), dtype=torch.float32, device="cpu")
NUMBERS = ("lr", "weight_decay", "eps", "momentum", "dampening")
FLAGS = ("maximize", "nesterov", "decoupled_weight_decay")
OFF = ("amsgrad", "capturable", "differentiable")
OPTIONS = ("fused", "foreach", *OFF, *FLAGS, *NUMBERS, "betas")
MISSING = object()
LARGEST = torch.finfo(torch.float32).max
REAL = {float, int}
SEQUENCE = {tuple, list}

PLAIN = {Tensor, nn.Parameter}
FLOAT32 = {torch.float32}
STRIDED = {torch.strided}
DTYPE, LAYOUT, IS_CPU, REQUIRES_GRAD = (
    getattr(Tensor, name).__get__ for name in ("dtype", "layout", "is_cpu", "requires_grad")
)

# What a script may put functions of its own in the place of: then the update is its own.
REPLACEABLE = {
    kind: [(kind, "_init_group")]
    + [
        (sys.modules[module], name)
        for module in dict.fromkeys(base.__module__ for base in kind.__mro__ if base in STATE)
        for stem in ("adam", "adamw", "sgd")
        for name in (stem, f"_single_tensor_{stem}")
        if hasattr(sys.modules[module], name)
    ]
    for kind in STATE
}
WRAPPED = "_torchdynamo_orig_callable"
TORCHS_OWN = {kind: [getattr(*one) for one in owned] for kind, owned in REPLACEABLE.items()}


class _Lists(NamedTuple):
    """What a kernel is given of a group: tensors in the order of the parameters.

    Attributes:
        parameters: Those that have a gradient.
        grads: Theirs.
        state: The lists of `STATE`.
        counts: The steps that each was given, where the optimizer counts them.
    """

    parameters: list[Tensor]
    grads: list[Tensor]
    state: list[list[Tensor]]
    counts: list[Tensor]

    def tensors(self) -> list[Tensor]:
        """Return all of them."""
        return [*chain(self.parameters, self.grads, *self.state, self.counts)]


@dataclass(slots=True)
class _Served:
    """What a kernel was given of a group the last time.

    Attributes:
        options: Of `_options_of`.
        number: How many tensors.
        layouts: Theirs.
    """

    options: list[Any] = field(default_factory=list)
    number: int = 0
    layouts: TensorGuards | None = None


class FusedUpdates:
    """Takes the place of the `step` of an optimizer."""

    def __init__(self, report: Report, *, wanted: bool) -> None:
        """Make the service.

        Args:
            report: Tells substitutions.
            wanted: Whether the level wants it.
        """
        self._report, self._wanted = report, wanted
        self._served: WeakKeyDictionary[Optimizer, dict[int, _Served]] = WeakKeyDictionary()

    def stand_back(self) -> None:
        """From now on torch updates by itself: the script has mixed precision of its own."""
        self._wanted = False

    def update(self, optimizer: Optimizer) -> bool:
        """Update the parameters of an optimizer whose state has begun, and return whether that was done.

        Not, and nothing is changed, where the kernel would compute something else than `step`, or somebody looks on.
        """
        kind = type(optimizer)
        if not self._wanted or kind not in STATE or not _is_torchs_own(optimizer):
            return False
        found = []
        for place, group in enumerate(optimizer.param_groups):
            lists = _lists_of(optimizer, group)
            if lists is None:
                return False
            if lists.parameters:
                if not self._takes(optimizer, place, group, lists):
                    return False
                found.append((group, lists))
        with torch.no_grad():
            for group, lists in found:
                if kind is SGD:
                    _sgd(group, lists)
                else:  # where the option is not written down, the class decides
                    _adam(group, lists, decoupled=group.get("decoupled_weight_decay", kind is AdamW))
                # the kernels forget it, and a backward pass through what was saved before would not be refused
                increment_version([*chain(lists.parameters, *lists.state, lists.counts)])
        if found:
            self._report(
                f"fused-update:{kind.__name__}",
                f"{kind.__name__} on the CPU updated FP32 parameters in torch's fused kernel, rounded in another order",
            )
        return bool(found)

    def _takes(self, optimizer: Optimizer, place: int, group: dict[str, Any], lists: _Lists) -> bool:
        """Whether a kernel computes what `step` would of the group at `place`, with these lists."""
        served = self._served.setdefault(optimizer, {})
        known = served.get(place) or served.setdefault(place, _Served())
        options, tensors = _options_of(group), lists.tensors()
        if not _are_the_same(options, known.options):
            if not _has_usual_options(group):
                return False
            known.options = options
        if len(tensors) != known.number or not (known.layouts and known.layouts.check(*tensors)):
            if not _lie_as_needed(lists):
                return False
            known.number, known.layouts = len(tensors), _layouts(tensors)
        return True


def _adam(group: dict[str, Any], lists: _Lists, *, decoupled: bool) -> None:
    beta1, beta2 = group["betas"]
    means, squares = lists.state
    _count(lists.counts)
    (torch._fused_adamw_ if decoupled else torch._fused_adam_)(
        lists.parameters,
        lists.grads,
        means,
        squares,
        [],
        lists.counts,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
    )


def _count(counts: list[Tensor]) -> None:
    """Add 1 to each. An update of weights whose gradient is 1 takes a fifth of the time of `_foreach_add_` on a CPU."""
    torch._fused_sgd_(
        counts,
        [ONE] * len(counts),
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=-1.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def _sgd(group: dict[str, Any], lists: _Lists) -> None:
    torch._fused_sgd_(
        lists.parameters,
        lists.grads,
        *lists.state,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
    )


def _is_torchs_own(optimizer: Optimizer) -> bool:
    """Whether nothing else looks into the step, takes a part in it or follows its operations."""
    if (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or optimizer_module._global_optimizer_pre_hooks
        or optimizer_module._global_optimizer_post_hooks
        or getattr(optimizer, "grad_scale", None) is not None
        or getattr(optimizer, "found_inf", None) is not None
        or torch._C._autograd._profiler_enabled()
        or in_transform()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    ):
        return False
    kind = type(optimizer)
    present = [getattr(*one) for one in REPLACEABLE[kind]]
    # the first compilation in a process wraps some of them, which changes nothing of what they do
    return present == TORCHS_OWN[kind] or [getattr(one, WRAPPED, one) for one in present] == TORCHS_OWN[kind]


def _options_of(group: dict[str, Any]) -> list[Any]:
    """Return what `_has_usual_options` looks at, and what may change inside of it. No parameter: it would live on."""
    betas = group.get("betas")
    options = [*map(group.get, OPTIONS, repeat(MISSING))]
    return [*options, *betas] if type(betas) is list else options


def _are_the_same(objects: list[Any], others: list[Any]) -> bool:
    return len(objects) == len(others) and all(map(is_, objects, others))


def _has_usual_options(group: dict[str, Any]) -> bool:
    """Whether the options of a group are such as the kernel takes, of exactly the types that it takes."""
    get = group.get
    if get("fused", False) is not None or get("foreach", False) is not None or get("momentum") == 0:
        return False
    for name in OFF:
        if get(name, False) is not False:
            return False
    for name in FLAGS:
        if type(get(name, False)) is not bool:
            return False
    for name in NUMBERS:
        number = get(name, 0)
        if not (type(number) in REAL and abs(number) <= LARGEST):
            return False
    betas = get("betas", ())
    return type(betas) in SEQUENCE and all(type(beta) is float and 0.0 <= beta < 1.0 for beta in betas)


def _layouts(tensors: list[Tensor]) -> TensorGuards:
    """Return what compares other tensors with these in type, options, size and strides; it keeps none of them alive.

    It refuses a list in which one comes twice.
    """
    # both must be given: torch 2.13 reads them unasked
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def _lists_of(optimizer: Optimizer, group: dict[str, Any]) -> _Lists | None:
    """Return what a kernel is to be given of a group, or None where its state has not begun."""
    kind, state_of = type(optimizer), optimizer.state.get
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    grads = [parameter.grad for parameter in parameters]
    states = [state for parameter in parameters if (state := state_of(parameter))]
    if len(states) < len(parameters):
        return None
    state = [[state.get(name) for state in states] for name in STATE[kind]]
    counts = [] if kind is SGD else [state.get(COUNT) for state in states]
    return _Lists(parameters, grads, state, counts)


def _lie_as_needed(lists: _Lists) -> bool:
    """Whether a kernel can take these as so many numbers in a row."""
    parameters, grads, state, counts = lists
    written = parameters + counts
    return (
        len(set(map(id, written))) == len(written)
        and _are_plain(lists.tensors())
        and all(map(Tensor.is_same_size, parameters * (1 + len(state)), chain(grads, *state)))
        and not any(map(Tensor.dim, counts))
        and not any(map(Tensor.is_inference, lists.tensors()))
        and not any(map(REQUIRES_GRAD, grads))
        and not any(map(torch._is_zerotensor, grads))
    )


def _are_plain(tensors: list[Any]) -> bool:
    """Whether these are FP32 numbers in host memory, one after the other."""
    return (
        PLAIN.issuperset(map(type, tensors))
        and FLOAT32.issuperset(map(DTYPE, tensors))
        and all(map(IS_CPU, tensors))
        and STRIDED.issuperset(map(LAYOUT, tensors))
        and all(map(Tensor.is_contiguous, tensors))
        and not any(map(Tensor.is_neg, tensors))
    )
