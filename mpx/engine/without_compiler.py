"""Optimizers without the compiler, in a process that compiles nothing.

torch keeps `torch.compile` out of an optimizer's methods, and to do so it imports all of it when the first optimizer is
made: `torch._dynamo`, 800 modules, 70 MiB and half a second (torch 2.13). While nobody else has imported it there is
nothing to keep out. Then the methods run as they are; from then on torch's own functions do what they did.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["without_disabling", "without_graph_breaks"]

Method = Callable[..., Any]


def _may_compile() -> bool:
    return torch.compiler.is_compiling() or "torch._dynamo" in sys.modules


def without_disabling(method: Method) -> Method:
    """Return a method that `torch._disable_dynamo` has wrapped, such that it imports nothing; any other as it is."""
    plain = _wrapped(method, "__dynamo_disable")
    if plain is None:
        return method

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (method if _may_compile() else plain)(*args, **kwargs)

    return run


def without_graph_breaks(step: Method) -> Method:
    """Return a `step` that sets whether it is differentiable, as torch's do, without a word to the compiler."""
    plain = _wrapped(step, "differentiable")
    if plain is None or step.__code__.co_name != "_use_grad":
        return step

    @wraps(step)
    def run(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if _may_compile():
            return step(optimizer, *args, **kwargs)
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(optimizer.defaults["differentiable"])
            return plain(optimizer, *args, **kwargs)
        finally:
            torch.set_grad_enabled(before)

    return run


def _wrapped(method: Method, constant: str) -> Method | None:
    """Return what is inside a wrapper of torch's that has a text in its code."""
    if isinstance(method, FunctionType) and constant in method.__code__.co_consts:
        return getattr(method, "__wrapped__", None)
    return None
