"""A layer that a call uses again and again casts its weights once for some of the uses, at O1 and O2.

`torch.autocast` casts a weight once a region: after a write it is old, and gradients of all uses are added in half. To
cast at each use is right and takes time, and the backward pass keeps every copy: of a cell in a loop they were more
than all else. So layers of torch, which use a weight once a call, keep their casts from the second use on, for no more
than `MOST` uses, and the sums of so many are added in FP32. A write, a backward pass or a step ends it sooner.
"""

from __future__ import annotations

import threading
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Outermost", "cast_weight", "forget", "wrap_call", "wrap_data"]

# In BF16 the sum of 16 equal numbers is off by 0.7 % on average and 1.7 at most, of 64 by 2.7 and 6, of 1,000 by half.
MOST = 16


class _Here(threading.local):
    """What the outermost call of this thread has used."""

    def __init__(self) -> None:
        self.seen: set[int] = set()  # ids of layers
        self.uses: dict[
            int, tuple[int, int]
        ] = {}  # of a layer: how often since the cast, versions of its weights
        self.halves: dict[int, tuple[Tensor, Tensor]] = {}  # casts of our kernels: weight, copy
        self.keeps = False  # whether a layer is running whose casts are kept
        self.trusts = True  # whether each write into a weight has shown in its version


_here = _Here()


class Outermost:
    """Context of an outermost call whose kernels cast the weights."""

    def __enter__(self) -> None:
        _here.seen.clear()
        _here.trusts = True

    def __exit__(self, *error: object) -> None:
        if _here.uses:
            forget()


def wrap_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return how modules inside the outermost call are called."""
    here = _here

    @wraps(original)
    def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module._parameters:
            seen, key = here.seen, id(module)
            if key in seen:
                if _may_keep(module):
                    return _keeping(original, module, args, kwargs)
            else:
                seen.add(key)
        return original(module, *args, **kwargs)

    return __call__


def _may_keep(module: nn.Module) -> bool:
    """Whether this is a layer of torch, no network, that uses its weights once (`nn.GRU` does so at each step).

    A cast without a graph would lose the gradients of the next use, which may have one.
    """
    return (
        _here.trusts
        and not module._modules
        and type(module).__module__.startswith("torch.nn.modules.")
        and not isinstance(module, nn.RNNBase)
        and torch.is_grad_enabled()
    )


def _keeping(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    here, key = _here, id(module)
    versions = sum([weight._version for weight in module._parameters.values() if weight is not None])
    uses, known = here.uses.get(key, (0, versions))
    # torch's casts are of all threads: at first there may be some that another one keeps, and has seen no write
    if not here.uses or uses == MOST or known != versions:
        forget()
        uses = 0
    here.uses[key] = uses + 1, versions
    before = here.keeps, torch.is_autocast_cache_enabled()
    here.keeps = True
    torch.set_autocast_cache_enabled(True)
    try:
        return original(module, *args, **kwargs)
    finally:
        here.keeps = before[0]
        torch.set_autocast_cache_enabled(before[1])


def forget() -> None:
    """Cast anew what is used next."""
    _here.uses.clear()
    _here.halves.clear()
    torch.clear_autocast_cache()


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a leaf in another type, for kernels of ours: the copy that is kept, where torch's kernels keep one."""
    if not _here.keeps:
        return weight.to(dtype)
    found = _here.halves.get(id(weight))
    if found is None:
        found = _here.halves[id(weight)] = weight, weight.to(dtype)
    return found[1]


def wrap_data(original: Any) -> property:
    """Return the `data` of parameters: a write into it shows in no version, so no more casts are kept in this call."""

    def distrust() -> None:
        _here.trusts = False
        if _here.uses:
            forget()

    def get(parameter: nn.Parameter) -> Tensor:
        distrust()
        data: Tensor = original.__get__(parameter)
        return data

    def put(parameter: nn.Parameter, data: Tensor) -> None:
        distrust()
        original.__set__(parameter, data)

    return property(get, put, doc=original.__doc__)
