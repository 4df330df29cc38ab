"""The product of half matrices, or of batches of them, in FP32 arithmetic, with its gradients."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from mpx.engine.reroutes.base import MATRIX, InFloat32, nothing_flows, will_differentiate
from mpx.engine.reroutes.pieces import are_many, by_pieces, number_of_pieces
from mpx.engine.reroutes.rooms import ROOMS, face_in, times_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["product"]

# Rows or columns of a piece: with fewer, what is summed over the pieces is written so often that it takes a part of the
# product's time.
LEAST = 256

Gradients: TypeAlias = "tuple[Tensor | None, ...]"


def product(
    bias: Tensor | None, a: Tensor, b: Tensor, *, is_weight: bool = False, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Return `beta * bias + alpha * (a @ b)`, rounded once to the half type of the operands.

    Args:
        bias: Of any shape that can be broadcast to the result, or None.
        a: Matrix or batch of matrices; where `b` is a matrix, of any number of dimensions.
        b: Matrix, or a batch of as many matrices as `a`.
        is_weight: Whether `b` is a matrix that is to be transposed.
        beta: Factor of the bias.
        alpha: Factor of the product.
    """
    if will_differentiate(bias, a, b):
        out: Tensor = _Product.apply(bias, a, b, is_weight, beta, alpha)  # type: ignore[no-untyped-call]
        return out
    return _compute(bias, a, b.t() if is_weight else b, beta, alpha)


class _Product(torch.autograd.Function):
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
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, b)
        ctx.is_weight, ctx.factors = is_weight, (beta, alpha)
        ctx.bias_shape = None if bias is None else bias.shape
        return _compute(bias, a, b.t() if is_weight else b, beta, alpha)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return nothing_flows(ctx)
        a, b = ctx.saved_tensors
        b = b.t() if ctx.is_weight else b
        needs, bias_shape, factors = ctx.needs_input_grad[:3], ctx.bias_shape, ctx.factors
        rows, grad = (_rows(a), _rows(grad)) if b.dim() == MATRIX else (a, grad)
        with torch._C._DisableAutocast(), ROOMS:
            cut, number = _pieces(bias_shape, rows, b, grad) if factors == (1, 1) else (None, 1)
            if cut == "rows":
                grad_bias, grad_a, grad_b = _gradients_by_rows(needs, rows, b, grad, number)
            elif cut == "columns":
                grad_bias, grad_a, grad_b = _gradients_by_columns(needs, rows, b, grad, number)
            else:
                compute = partial(_gradients, needs, bias_shape, factors)
                grad_bias, grad_a, grad_b = by_pieces(compute, number, (rows, b, grad))
        grad_a = grad_a if grad_a is None or rows is a else grad_a.view(a.shape)
        grad_b = grad_b.t() if ctx.is_weight and grad_b is not None else grad_b
        return grad_bias, grad_a, grad_b, None, None, None


def _compute(bias: Tensor | None, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    rows = _rows(a) if b.dim() == MATRIX else a
    cut, number = _pieces(None if bias is None else bias.shape, rows, b)
    with InFloat32(a.dtype), ROOMS:
        if number == 1:
            out = _in_float32(bias, rows, b, beta, alpha).to(a.dtype)
        elif cut == "rows":
            wide_b = face_in("b", b)

            def piece_of_rows(x: Tensor) -> tuple[Tensor]:
                return (_in_room(bias, face_in("a", x), wide_b, beta, alpha),)

            (out,) = by_pieces(piece_of_rows, number, (rows,))
        elif cut == "columns":
            wide_a = face_in("a", rows)
            columns = (b.t(),) if bias is None else (b.t(), bias.expand(b.shape[-1]))

            def piece_of_columns(weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor]:
                return (_in_room(bias, wide_a, face_in("b", weight).t(), beta, alpha).t(),)

            (transposed,) = by_pieces(piece_of_columns, number, columns)
            out = transposed.t().clone(memory_format=torch.contiguous_format)
        else:
            (out,) = by_pieces(lambda x, y: (_in_float32(bias, x, y, beta, alpha),), number, (rows, b))
    if rows is a:
        return out
    # autograd refuses a script that writes into a view which a Function returns
    reshaped: Tensor = torch.ops.aten._unsafe_view(out, [*a.shape[:-1], b.shape[-1]])
    return reshaped


def _in_float32(bias: Tensor | None, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    if bias is None:
        return _times(a.float(), b.float())
    add = torch.addmm if a.dim() == MATRIX else torch.baddbmm
    return add(bias.float(), a.float(), b.float(), beta=beta, alpha=alpha)


def _in_room(bias: Tensor | None, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    """Return the same of FP32 matrices, which the next piece writes over."""
    return times_in("result", a, b, None if bias is None else bias.float(), beta=beta, alpha=alpha)


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
    """Return the same, rounded, from pieces of the rows of `a`, over which the other two are summed in FP32."""
    needs_bias, needs_a, needs_b = needs
    wide_b = face_in("b", b).mT if needs_a else b
    sums: list[Tensor | None] = [None, None]

    def piece(x: Tensor, part: Tensor) -> Gradients:
        whole = face_in("grad", part)
        if needs_bias:
            sums[0] = whole.sum(0) if sums[0] is None else sums[0].add_(whole.sum(0))
        if needs_b:
            columns = face_in("a", x).mT
            if sums[1] is None:
                sums[1] = _laid_out_as(b, columns, whole, partial(times_in, "sum"))
            else:
                sums[1].addmm_(columns, whole)
        return (times_in("result", whole, wide_b) if needs_a else None,)

    (grad_a,) = by_pieces(piece, number, (a, grad))
    grad_bias, grad_b = (None if found is None else found.to(a.dtype) for found in sums)
    return grad_bias, grad_a, grad_b


def _gradients_by_columns(
    needs: Sequence[bool], a: Tensor, b: Tensor, grad: Tensor, number: int
) -> Gradients:
    """Return the same, rounded, from pieces of the columns of `b`, over which that of `a` is summed in FP32."""
    needs_bias, needs_a, needs_b = needs
    wide_a = face_in("a", a) if needs_b else a
    sums: list[Tensor | None] = [None]

    def piece(weight: Tensor, part: Tensor) -> Gradients:
        whole = face_in("grad", part)
        if needs_a:
            wide, rows = face_in("b", weight), whole.t()
            sums[0] = times_in("sum", rows, wide) if sums[0] is None else sums[0].addmm_(rows, wide)
        grad_weight = _laid_out_as(weight, whole, wide_a, partial(times_in, "result")) if needs_b else None
        return whole.sum(1) if needs_bias else None, grad_weight

    grad_bias, grad_b = by_pieces(piece, number, (b.t(), grad.t()))
    grad_a = None if sums[0] is None else sums[0].to(a.dtype)
    return grad_bias, grad_a, None if grad_b is None else grad_b.t()


def _times(left: Tensor, right: Tensor) -> Tensor:
    return (torch.mm if left.dim() == MATRIX else torch.bmm)(left, right)


def _laid_out_as(
    operand: Tensor, left: Tensor, right: Tensor, times: Callable[[Tensor, Tensor], Tensor] = _times
) -> Tensor:
    """Return `left @ right`, the gradient of `operand`, in the order of its strides.

    The gradient of a transposed weight is added to one that is laid out as the weight: in any other order that takes
    twenty times as long, and longer than the product. torch's formulas do the same.
    """
    if operand.stride(-1) != 1 and operand.stride(-2) == 1:
        return times(right.mT, left.mT).mT
    return times(left, right)


def _pieces(bias_shape: torch.Size | None, a: Tensor, b: Tensor, *others: Tensor) -> tuple[str | None, int]:
    """Return what is cut, "rows" of `a`, "columns" of `b` or (None) the batch, and into how many pieces."""
    numbers, in_weight = a.numel(), b.numel()
    numbers = max(numbers, numbers // (a.shape[-1] or 1) * b.shape[-1])  # of operand and result
    if not are_many(numbers) and not are_many(in_weight):
        return None, 1
    tensors = (a, b, *others)
    if b.dim() != MATRIX:
        most = max(numbers, in_weight)
        return None, number_of_pieces(a.shape[0], most, *tensors) if bias_shape is None else 1
    if bias_shape is not None and len(bias_shape) > 1:  # a bias of each row
        return None, 1
    by_rows = number_of_pieces(a.shape[0], numbers, *tensors, least=LEAST)
    if by_rows > 1:
        return "rows", by_rows
    if bias_shape is None or (len(bias_shape) == 1 and bias_shape[0] == b.shape[-1]):
        by_columns = number_of_pieces(b.shape[-1], in_weight, *tensors, least=LEAST)
        return "columns" if by_columns > 1 else None, by_columns
    return None, 1


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == MATRIX else tensor.reshape(-1, tensor.shape[-1])
