"""Matrix products of half tensors with FP32 arithmetic: for devices that have no instruction for half ones.

Inputs, outputs and saved tensors are half; each result is an FP32 one rounded once, as a half kernel with an FP32
accumulator gives it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpx.engine.reroutes.base import MATRIX, Args, InFloat32, Kwargs, Op, Reroute, wide
from mpx.engine.reroutes.matrix_product import product

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["COMPOSITE", "LINEAR", "MATMUL", "THREE", "TWO"]

# Multiply-adds. Below, torch's half kernel and its backward take less time than the casts around FP32 ones: measured on
# CPUs with AVX2 and with AVX512, where both take some 60 us.
FEW = 2**15
LOW = (torch.float16, torch.bfloat16)


def _linear_of(op: Op, args: Args, kwargs: Kwargs) -> Tensor | None:
    x, weight = args[:2]
    if not _are_strided(x, weight) or weight.dim() != MATRIX:
        return None
    return product(args[2] if len(args) > 2 else None, x, weight, is_weight=True)


def _linear_is_small(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return not weight.is_nested and weight.dim() > 0 and x.numel() * weight.shape[0] < FEW


def _matmul_of(op: Op, args: Args, kwargs: Kwargs) -> Tensor | None:
    """Of matrices and batches of them, which are broadcast; vectors have fast half kernels."""
    a, b = args
    if _is_sparse(a, b):
        return op(a.float(), b.float())  # type: ignore[no-any-return]
    if not _are_strided(a, b) or a.dim() < MATRIX or b.dim() < MATRIX:
        return None
    if b.dim() == MATRIX:
        return product(None, a, b)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    number = math.prod(batch)
    one, other = (t.expand(*batch, *t.shape[-2:]).reshape(number, *t.shape[-2:]) for t in (a, b))
    return product(None, one, other).view(*batch, a.shape[-2], b.shape[-1])


def _two_of(op: Op, args: Args, kwargs: Kwargs) -> Tensor | None:
    a, b = args
    if _is_sparse(a, b):
        return op(a.float(), b.float())  # type: ignore[no-any-return]
    return product(None, a, b) if _are_strided(a, b) else None


def _two_are_small(a: Tensor, b: Tensor) -> bool:
    if a.is_nested or b.is_nested or _is_sparse(a, b) or b.dim() == 0:
        return False
    return a.numel() * b.shape[-1] < FEW


def _three_of(op: Op, args: Args, kwargs: Kwargs) -> Tensor | None:
    """A product added to the first argument."""
    bias, a, b = args
    if _is_sparse(a, b):
        return op(bias.float(), a.float(), b.float(), **kwargs)  # type: ignore[no-any-return]
    if not _are_strided(a, b):
        return None
    return product(bias, a, b, beta=kwargs.get("beta", 1), alpha=kwargs.get("alpha", 1))


def _three_are_small(bias: Tensor, a: Tensor, b: Tensor) -> bool:
    return _two_are_small(a, b)


def _composite_of(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """Any op that is made of products: FP32 from end to end, and so is what autograd saves inside of it."""
    half = next((t.dtype for t in _flat(args) if t.dtype in LOW), None)
    if half is None:
        return None
    with InFloat32(half):
        out = op(*map(wide, args), **{name: wide(value) for name, value in kwargs.items()})
    return out.to(half) if isinstance(out, Tensor) else tuple(part.to(half) for part in out)


def _flat(args: Args) -> Iterator[Tensor]:
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, Tensor))


def _is_sparse(a: Tensor, b: Tensor) -> bool:
    """Whether there is no half kernel at all: then the result is FP32, as on a CPU that has half instructions."""
    return a.layout is torch.sparse_csr or b.layout is torch.sparse_csr


def _are_strided(a: Tensor, b: Tensor) -> bool:
    """Whether these are two plain tensors of one half type."""
    dtype = a.dtype
    return (
        dtype in LOW
        and b.dtype is dtype
        and a.layout is torch.strided
        and b.layout is torch.strided
        and not a.is_nested
        and not b.is_nested
    )


LINEAR = Reroute(_linear_of, _linear_is_small)
MATMUL = Reroute(_matmul_of, _two_are_small)
TWO = Reroute(_two_of, _two_are_small)
THREE = Reroute(_three_of, _three_are_small)
COMPOSITE = Reroute(_composite_of)
