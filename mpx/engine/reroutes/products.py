"""Matrix products of half tensors with FP32 arithmetic: for devices that have no instruction for half ones.

Inputs, outputs and saved tensors are half; each result is an FP32 one rounded once, as a half kernel with an FP32
accumulator gives it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from mpx.engine.reroutes.base import MATRIX, Args, InFloat32, Kwargs, Op, Reroute, wide, will_differentiate
from mpx.engine.reroutes.pieces import are_many, by_pieces, number_of_pieces

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["COMPOSITE", "LINEAR", "MATMUL", "THREE", "TWO"]

# Multiply-adds. Below, torch's half kernel and its backward take less time than the casts around FP32 ones: measured on
# CPUs with AVX2 and with AVX512, where both take some 60 us.
FEW = 2**15
# Rows of a piece: with fewer, a sum of weight gradients is written so often that it takes a part of the product's time.
ROWS = 256
LOW = (torch.float16, torch.bfloat16)

Gradients: TypeAlias = "tuple[Tensor | None, ...]"


class _Product(torch.autograd.Function):
    """`beta * bias + alpha * (a @ b)` of matrices or of batches of them; `bias` may be None.

    Where `b` is a matrix, `a` has any number of dimensions. A `weight` is a matrix to be transposed.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        is_weight: bool,  # noqa: FBT001
        beta: float,
        alpha: float,
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.is_weight, ctx.factors = is_weight, (beta, alpha)
        ctx.bias_shape = None if bias is None else bias.shape
        return _compute(bias, a, b.t() if is_weight else b, beta, alpha)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        b = b.t() if ctx.is_weight else b
        needs, bias_shape, factors = ctx.needs_input_grad[:3], ctx.bias_shape, ctx.factors
        rows, grad = (_rows(a), _rows(grad)) if b.dim() == MATRIX else (a, grad)
        with torch._C._DisableAutocast():
            number = _pieces(bias_shape, rows, b, grad) if factors == (1, 1) else 1
            if number == 1:
                grads = _gradients(needs, bias_shape, factors, rows, b, grad)
                grad_bias, grad_a, grad_b = [None if g is None else g.to(a.dtype) for g in grads]
            elif b.dim() == MATRIX:
                grad_bias, grad_a, grad_b = _gradients_by_rows(needs, rows, b, grad, number)
            else:
                compute = partial(_gradients, needs, None, factors)
                grad_bias, grad_a, grad_b = by_pieces(compute, number, (rows, b, grad))
        grad_a = grad_a if grad_a is None or rows is a else grad_a.view(a.shape)
        grad_b = grad_b.t() if ctx.is_weight and grad_b is not None else grad_b
        return grad_bias, grad_a, grad_b, None, None, None


def _gradients(  # noqa: PLR0917
    needs: Sequence[bool],
    bias_shape: torch.Size | None,
    factors: tuple[float, float],
    a: Tensor,
    b: Tensor,
    grad: Tensor,
) -> Gradients:
    """Return those of bias, `a` and `b` in FP32, by plain operations: a double backward differentiates them."""
    needs_bias, needs_a, needs_b = needs
    grad_bias = grad_a = grad_b = None
    beta, alpha = factors
    whole = grad.float()
    if needs_bias and bias_shape is not None:
        grad_bias = (whole * beta if beta != 1 else whole).sum_to_size(bias_shape)
    whole = whole * alpha if alpha != 1 else whole
    if needs_a:
        grad_a = _laid_out_as(a, whole, b.float().mT)
    if needs_b:
        grad_b = _laid_out_as(b, a.float().mT, whole)
    return grad_bias, grad_a, grad_b


def _gradients_by_rows(needs: Sequence[bool], a: Tensor, b: Tensor, grad: Tensor, number: int) -> Gradients:
    """Return the same, rounded, of a product whose rows share `b` and bias: the sums of the pieces are FP32."""
    needs_bias, needs_a, needs_b = needs
    wide_b = b.float().mT if needs_a else b
    sums: list[Tensor | None] = [None, None]

    def piece(x: Tensor, part: Tensor) -> Gradients:
        whole = part.float()
        if needs_bias:
            sums[0] = whole.sum(0) if sums[0] is None else sums[0].add_(whole.sum(0))
        if needs_b:
            columns = x.float().mT
            sums[1] = _laid_out_as(b, columns, whole) if sums[1] is None else sums[1].addmm_(columns, whole)
        return (torch.mm(whole, wide_b) if needs_a else None,)

    (grad_a,) = by_pieces(piece, number, (a, grad))
    grad_bias, grad_b = (None if found is None else found.to(a.dtype) for found in sums)
    return grad_bias, grad_a, grad_b


def _laid_out_as(operand: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right`, the gradient of `operand`, in the order of its strides.

    The gradient of a transposed weight is added to one that is laid out as the weight: in any other order that takes
    twenty times as long, and longer than the product. torch's formulas do the same.
    """
    if operand.stride(-1) != 1 and operand.stride(-2) == 1:
        return _times(right.mT, left.mT).mT
    return _times(left, right)


def _compute(bias: Tensor | None, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    rows = _rows(a) if b.dim() == MATRIX else a
    number = _pieces(None if bias is None else bias.shape, rows, b)
    with InFloat32(a.dtype):
        if number == 1:
            out = _in_float32(bias, rows, b, beta, alpha).to(a.dtype)
        elif b.dim() == MATRIX:
            wide_bias, wide_b = None if bias is None else bias.float(), b.float()
            (out,) = by_pieces(lambda x: (_in_float32(wide_bias, x, wide_b, beta, alpha),), number, (rows,))
        else:
            (out,) = by_pieces(lambda x, y: (_in_float32(bias, x, y, beta, alpha),), number, (rows, b))
    return out if rows is a else out.view(*a.shape[:-1], b.shape[-1])


def _in_float32(bias: Tensor | None, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    if bias is None:
        return _times(a.float(), b.float())
    product = torch.addmm if a.dim() == MATRIX else torch.baddbmm
    return product(bias.float(), a.float(), b.float(), beta=beta, alpha=alpha)


def _times(left: Tensor, right: Tensor) -> Tensor:
    return (torch.mm if left.dim() == MATRIX else torch.bmm)(left, right)


def _pieces(bias_shape: torch.Size | None, a: Tensor, b: Tensor, *others: Tensor) -> int:
    """Return into how many pieces the rows of `a`, or the batches, are cut; a bias of each row is not."""
    is_shared = b.dim() == MATRIX
    numbers = a.numel()
    numbers = max(numbers, numbers // (a.shape[-1] or 1) * b.shape[-1], 0 if is_shared else b.numel())
    if not are_many(numbers) or (bias_shape is not None and (len(bias_shape) > 1 or not is_shared)):
        return 1
    return number_of_pieces(a.shape[0], numbers, a, b, *others, least=ROWS if is_shared else 1)


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == MATRIX else tensor.reshape(-1, tensor.shape[-1])


def _product(
    bias: Tensor | None, a: Tensor, b: Tensor, *, is_weight: bool = False, beta: float = 1, alpha: float = 1
) -> Tensor:
    if will_differentiate(bias, a, b):
        out: Tensor = _Product.apply(bias, a, b, is_weight, beta, alpha)  # type: ignore[no-untyped-call]
        return out
    return _compute(bias, a, b.t() if is_weight else b, beta, alpha)


def _linear_of(op: Op, args: Args, kwargs: Kwargs) -> Tensor | None:
    x, weight = args[:2]
    if not _are_strided(x, weight) or weight.dim() != MATRIX:
        return None
    return _product(args[2] if len(args) > 2 else None, x, weight, is_weight=True)


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
        return _product(None, a, b)
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
    return _product(bias, a, b, beta=kwargs.get("beta", 1), alpha=kwargs.get("alpha", 1))


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
