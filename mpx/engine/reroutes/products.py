"""Matrix products of half tensors with FP32 arithmetic: for devices that have no instruction for half ones.

Inputs, outputs and saved tensors are half; each result is an FP32 one rounded once, as a half kernel with an FP32
accumulator gives it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpx.engine.reroutes.base import Args, InFloat32, Kwargs, Op, Rerouted, wide, will_differentiate

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["composite", "linear", "matmul", "three", "two"]

# Multiply-adds. Below, the half kernel and its backward take less time than the casts around FP32 ones: measured on a
# CPU with AVX2, where both take some 40 us.
FEW = 2**15
MATRIX = 2
LOW = (torch.float16, torch.bfloat16)


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
                grad_a = torch.matmul(whole, b.float().mT).to(a.dtype)
            if needs_b:
                grad_b = torch.matmul(a.float().mT, whole).to(b.dtype)
        return grad_bias, grad_a, grad_b, None, None


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


def linear(op: Op, args: Args, kwargs: Kwargs) -> Rerouted:
    """`linear(input, weight, bias=None)`, the input of any number of dimensions."""
    x, weight = args[:2]
    if not _is_worth_it(x, weight, weight.shape[0]):
        return None
    bias = args[2] if len(args) > 2 else None
    flat = x if x.dim() == MATRIX else x.reshape(-1, x.shape[-1])
    return lambda: _product(bias, flat, weight.t()).view(*x.shape[:-1], weight.shape[0])


def matmul(op: Op, args: Args, kwargs: Kwargs) -> Rerouted:
    """`matmul(self, other)`, of matrices and batches of them, which are broadcast; vectors have fast half kernels."""
    a, b = args
    if _is_sparse(a, b):
        return lambda: op(a.float(), b.float())
    if a.dim() < MATRIX or b.dim() < MATRIX or not _is_worth_it(a, b, b.shape[-1]):
        return None
    if b.dim() == MATRIX:
        return lambda: _product(None, a.reshape(-1, a.shape[-1]), b).view(*a.shape[:-1], b.shape[-1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    number = math.prod(batch)

    def rerouted() -> Tensor:
        one, other = (t.expand(*batch, *t.shape[-2:]).reshape(number, *t.shape[-2:]) for t in (a, b))
        return _product(None, one, other).view(*batch, a.shape[-2], b.shape[-1])

    return rerouted


def two(op: Op, args: Args, kwargs: Kwargs) -> Rerouted:
    """`mm` and `bmm`."""
    a, b = args
    if _is_sparse(a, b):
        return lambda: op(a.float(), b.float())
    return (lambda: _product(None, a, b)) if _is_worth_it(a, b, b.shape[-1]) else None


def three(op: Op, args: Args, kwargs: Kwargs) -> Rerouted:
    """`addmm` and `baddbmm`: a product added to their first argument."""
    bias, a, b = args
    if _is_sparse(a, b):
        return lambda: op(bias.float(), a.float(), b.float(), **kwargs)
    if not _is_worth_it(a, b, b.shape[-1]):
        return None
    return lambda: _product(bias, a, b, kwargs.get("beta", 1), kwargs.get("alpha", 1))


def composite(op: Op, args: Args, kwargs: Kwargs) -> Rerouted:
    """Any op that is made of products: FP32 from end to end, and so is what autograd saves inside of it."""

    def rerouted() -> Any:
        half = next(t.dtype for t in _flat(args) if t.dtype in LOW)
        with InFloat32(half):
            out = op(*map(wide, args), **{name: wide(value) for name, value in kwargs.items()})
        return out.to(half) if isinstance(out, Tensor) else tuple(part.to(half) for part in out)

    return rerouted if any(t.dtype in LOW for t in _flat(args)) else None


def _flat(args: Args) -> Iterator[Tensor]:
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, Tensor))


def _is_sparse(a: Tensor, b: Tensor) -> bool:
    """Whether there is no half kernel at all: then the result is FP32, as on a CPU that has half instructions."""
    return torch.sparse_csr in (a.layout, b.layout)


def _is_worth_it(a: Tensor, b: Tensor, columns: int) -> bool:
    dtype = a.dtype
    return (
        a.numel() * columns >= FEW
        and dtype in LOW
        and b.dtype is dtype
        and a.layout is torch.strided
        and b.layout is torch.strided
        and not a.is_nested
        and not b.is_nested
    )
