"""Adam, AdamW and SGD with momentum in torch's fused kernels, where the script leaves that choice to torch.

On a CPU torch updates one parameter after the other, in a dozen operations each. Its fused kernels compute the same
formulas in one pass over memory and without temporaries. They round in another order, so O0 does without.

They trust their caller: torch 2.13 takes a parameter, its gradient and its state as so many numbers in a row, and where
shapes or layouts differ writes past their end, or updates the wrong numbers. So all of that is asked before each step,
of nothing but torch's own classes with options of the usual kind; anything else is updated as torch does it by itself.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
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
NUMBERS = ("lr", "weight_decay", "eps", "momentum", "dampening")
FLAGS = ("maximize", "nesterov")
OFF = ("amsgrad", "capturable", "differentiable")
LARGEST = torch.finfo(torch.float32).max
REAL = {float, int}
SEQUENCE = {tuple, list}
NOTHING = nullcontext()

PLAIN = {Tensor, nn.Parameter}
FLOAT32 = {torch.float32}
STRIDED = {torch.strided}
DTYPE, LAYOUT, IS_CPU, REQUIRES_GRAD = (
    getattr(Tensor, name).__get__ for name in ("dtype", "layout", "is_cpu", "requires_grad")
)

# What a script may put functions of its own in the place of: then the update is its own.
REPLACEABLE = [
    (sys.modules[module], name)
    for module in ("torch.optim.adam", "torch.optim.adamw", "torch.optim.sgd")
    for name in ("adam", "adamw", "sgd", "_single_tensor_adam", "_single_tensor_adamw", "_single_tensor_sgd")
    if hasattr(sys.modules[module], name)
] + [(kind, "_init_group") for kind in STATE]
TORCHS_OWN = [getattr(owner, name) for owner, name in REPLACEABLE]


class FusedUpdates:
    """Decides about each step of an optimizer."""

    def __init__(self, report: Report, *, wanted: bool) -> None:
        """Make the service.

        Args:
            report: Tells substitutions.
            wanted: Whether the level wants it; may be set to False later.
        """
        self._report, self.wanted = report, wanted

    def around(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Return the context of a `step`: in it groups say `fused`, where the kernel computes what they mean."""
        if not self.wanted or type(optimizer) not in STATE or not _is_torchs_own(optimizer):
            return NOTHING
        written: list[Tensor] = []
        for group in optimizer.param_groups:
            of_group = _written_of(optimizer, group) if _has_usual_options(group) else None
            if of_group is None:
                return NOTHING
            written += of_group
        return _Fused(optimizer, written, self._report) if written else NOTHING


class _Fused:
    """A step in the fused kernel."""

    __slots__ = ("_groups", "_kind", "_report", "_written")

    def __init__(self, optimizer: Optimizer, written: list[Tensor], report: Report) -> None:
        self._groups, self._kind = list(optimizer.param_groups), type(optimizer).__name__
        self._written, self._report = written, report

    def __enter__(self) -> None:
        for group in self._groups:
            group["fused"] = True

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        for group in self._groups:
            group["fused"] = None
        # the kernel forgets it, and a backward pass through what was saved before the step would not be refused
        increment_version(self._written)
        if error is None:
            self._report(
                f"fused-update:{self._kind}",
                f"{self._kind} on the CPU updated FP32 parameters in torch's fused kernel, rounded in another order",
            )


def _is_torchs_own(optimizer: Optimizer) -> bool:
    """Whether nothing else looks into the step, takes a part in it or follows its operations."""
    if (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or optimizer_module._global_optimizer_pre_hooks
        or optimizer_module._global_optimizer_post_hooks
        or in_transform()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    ):
        return False
    return [getattr(owner, name) for owner, name in REPLACEABLE] == TORCHS_OWN


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


def _written_of(optimizer: Optimizer, group: dict[str, Any]) -> list[Tensor] | None:
    """Return what the kernel would write of a group, or None where something does not lie as it takes it.

    Asked in each step, hence in loops of C.
    """
    kind, state_of = type(optimizer), optimizer.state.get
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    states = [state for parameter in parameters if (state := state_of(parameter))]
    begun = parameters
    if len(states) < len(parameters):
        if states and kind is SGD:  # the kernel begins the momentum of all or none
            return None
        begun = [parameter for parameter in parameters if state_of(parameter)]
    grads = [parameter.grad for parameter in parameters]
    tensors = [[state.get(name) for state in states] for name in STATE[kind]]
    counts = [] if kind is SGD else [state.get(COUNT) for state in states]
    written = list(chain(parameters, *tensors, counts))
    fits = (
        _are_plain([*grads, *written])
        and all(map(Tensor.is_same_size, parameters, grads))
        and all(map(Tensor.is_same_size, begun * len(tensors), chain(*tensors)))
        and not any(map(Tensor.dim, counts))
        and len(set(map(id, chain(parameters, counts)))) == len(parameters) + len(counts)
        and not any(map(Tensor.is_inference, parameters))
        and not any(map(REQUIRES_GRAD, grads))
        and not any(map(torch._is_zerotensor, grads))
    )
    return written if fits else None


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
