"""Matrix products of half tensors with FP32 arithmetic: for devices that have no instruction for half ones.

Inputs, outputs and saved tensors are half; each result is an FP32 one rounded once, as a half kernel with an FP32
accumulator gives it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpx.engine.reroutes.base import MATRIX, Args, InFloat32, Kwargs, Op, Reroute, wide, will_differentiate

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["COMPOSITE", "LINEAR", "MATMUL", "THREE", "TWO"]

# Multiply-adds. Below, torch's half kernel and its backward take less time than the casts around FP32 ones: measured on
# CPUs with AVX2 and with AVX512, where both take some 60 us.
FEW = 2**15
LOW = (torch.float16, torch.bfloat16)


class _Linear(torch.autograd.Function):
    """`F.linear`, the input of any number of dimensions; `bias` may be None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # plain operations on what was saved: a double backward differentiates them
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        with torch._C._DisableAutocast():
            whole = grad.reshape(-1, grad.shape[-1]).float()  # (rows, out)
            if needs_x:
                grad_x = torch.mm(whole, weight.float()).to(x.dtype).view(x.shape)
            if needs_weight:
                grad_weight = _laid_out_as(weight, whole.t(), x.reshape(-1, x.shape[-1]).float())
            if needs_bias:
                grad_bias = whole.sum(0).to(x.dtype)
        return grad_x, grad_weight, grad_bias


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with InFloat32(x.dtype):
        out = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return out.to(x.dtype)


class _Product(torch.autograd.Function):
    """`beta * bias + alpha * (a @ b)` of matrices or of batches of them; `bias` may be None."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any, bias: Tensor | None, a: Tensor, b: Tensor, beta: float, alpha: float
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.factors = beta, alpha
        ctx.bias_shape = None if bias is None else bias.shape
        return _compute(bias, a, b, beta, alpha)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # plain operations on what was saved: a double backward differentiates them
        a, b = ctx.saved_tensors
        beta, alpha = ctx.factors
        needs_bias, needs_a, needs_b = ctx.needs_input_grad[:3]
        grad_bias = grad_a = grad_b = None
        with torch._C._DisableAutocast():
            whole = grad.float()
            if needs_bias:
                grad_bias = (whole * beta if beta != 1 else whole).sum_to_size(ctx.bias_shape).to(a.dtype)
            whole = whole * alpha if alpha != 1 else whole
            if needs_a:
                grad_a = _laid_out_as(a, whole, b.float().mT)
            if needs_b:
                grad_b = _laid_out_as(b, a.float().mT, whole)
        return grad_bias, grad_a, grad_b, None, None


def _laid_out_as(operand: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right`, the gradient of `operand`, with its type and the order of its strides.

    The gradient of a transposed weight is added to one that is laid out as the weight: in any other order that takes
    twenty times as long, and longer than the product. torch's formulas do the same.
    """
    if operand.stride(-1) != 1 and operand.stride(-2) == 1:
        return torch.matmul(right.mT, left.mT).to(operand.dtype).mT
    return torch.matmul(left, right).to(operand.dtype)


def _compute(bias: Tensor | None, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    with InFloat32(a.dtype):
        if bias is None:
            out = torch.matmul(a.float(), b.float())
        else:
            product = torch.addmm if a.dim() == MATRIX else torch.baddbmm
            out = product(bias.float(), a.float(), b.float(), beta=beta, alpha=alpha)
    return out.to(a.dtype)


def _product(bias: Tensor | None, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    if will_differentiate(bias, a, b):
        out: Tensor = _Product.apply(bias, a, b, beta, alpha)  # type: ignore[no-untyped-call]
        return out
    return _compute(bias, a, b, beta, alpha)


def _linear_of(op: Op, args: Args, kwargs: Kwargs) -> Tensor | None:
    x, weight = args[:2]
    if not _are_strided(x, weight) or weight.dim() != MATRIX:
        return None
    bias = args[2] if len(args) > 2 else None
    if will_differentiate(x, weight, bias):
        out: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return out
    return _linear(x, weight, bias)


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
        return _product(None, a.reshape(-1, a.shape[-1]), b).view(*a.shape[:-1], b.shape[-1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    number = math.prod(batch)
    one, other = (t.expand(*batch, *t.shape[-2:]).reshape(number, *t.shape[-2:]) for t in (a, b))
    return _product(None, one, other).view(*batch, a.shape[-2], b.shape[-1])


def _two_of(op: Op, args: Args, kwargs: Kwargs) -> Tensor | None:
    a, b = args
    if _is_sparse(a, b):
        return op(a.float(), b.float())  # type: ignore[no-any-return]
    return _product(None, a, b) if _are_strided(a, b) else None


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
    return _product(bias, a, b, kwargs.get("beta", 1), kwargs.get("alpha", 1))


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
