"""What the reroutes share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cache
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = [
    "MATRIX",
    "Args",
    "InFloat32",
    "Kwargs",
    "Op",
    "Reroute",
    "bound",
    "half_outside",
    "is_transformed",
    "nothing_flows",
    "wide",
    "will_differentiate",
]

Op: TypeAlias = torch._ops.OpOverload
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = Mapping[str, Any]

MATRIX = 2  # dimensions


class Reroute(NamedTuple):
    """How an op is computed whose half kernel is slow.

    Attributes:
        compute: Returns the result for half arguments; None where nothing slow lies ahead and the op may run as it is.
        spares: Whether the half kernel is as fast, told by the positional arguments as the script gave them, without a
            cast. None: it never is.
    """

    compute: Callable[[Op, Args, Kwargs], Any]
    spares: Callable[..., bool] | None = None


class _Here(threading.local):
    half: torch.dtype | None = None


_here = _Here()


def half_outside() -> torch.dtype | None:
    """Return the half type of the rerouted op whose forward pass is being computed in FP32 in this thread."""
    return _here.half


class InFloat32:
    """Context for the FP32 arithmetic of an op that is half outside: whoever counts work counts it as half."""

    __slots__ = ("_half", "_outer")

    def __init__(self, half: torch.dtype) -> None:
        self._half = half

    def __enter__(self) -> None:
        self._outer, _here.half = _here.half, self._half

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _here.half = self._outer


def will_differentiate(*inputs: Tensor | None) -> bool:
    """Whether a backward pass may follow, and not by a transform of `torch.func`, which these Functions do not know."""
    return (
        torch.is_grad_enabled()
        and any(value is not None and value.requires_grad for value in inputs)
        and not is_transformed()
    )


def nothing_flows(ctx: Any) -> tuple[None, ...]:
    """Return the gradients of a Function whose result has none: with zeros, an optimizer would move the weights."""
    return (None,) * len(ctx.needs_input_grad)


def is_transformed() -> bool:
    """Whether a transform of `torch.func` or forward-mode differentiation sees what is computed here."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def bound(op: Op, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Return every argument by name, defaults included."""
    given = _defaults(op)
    return given | dict(zip(given, args, strict=False)) | dict(kwargs)


@cache
def _defaults(op: Op) -> dict[str, Any]:
    return {argument.name: argument.default_value for argument in op._schema.arguments}


def wide(value: Any) -> Any:
    """Return a floating tensor, or those of a list, in FP32, anything else as it is."""
    if isinstance(value, (list, tuple)):
        return [wide(item) for item in value]
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
