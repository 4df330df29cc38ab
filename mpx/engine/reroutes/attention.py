"""`scaled_dot_product_attention` whose backward pass, or all of it, is computed in FP32 between half tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpx.engine.reroutes.base import (
    MATRIX,
    Args,
    InFloat32,
    Kwargs,
    Op,
    Reroute,
    bound,
    nothing_flows,
    wide,
    will_differentiate,
)
from mpx.engine.reroutes.pieces import by_pieces, number_of_pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ALL_IN_FLOAT32", "BACKWARD_IN_FLOAT32"]

# Numbers in the keys of one head. Below, torch's BF16 backward pass of attention takes 2 to 4 times its FP32 one; from
# there on 1 to 1.9 times, and a recomputed FP32 forward pass costs more than it saves. See `slow_kernels.yaml`.
MANY_KEYS = 9216


class _Attention(torch.autograd.Function):
    """Its backward pass recomputes `op` in FP32 from the saved half inputs and differentiates that."""

    @staticmethod
    def forward(ctx: Any, op: Op, forward_too: bool, names: tuple[str, ...], *values: Any) -> Tensor:  # noqa: FBT001
        ctx.op, ctx.names = op, names
        ctx.tensor_at = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
        ctx.others = [None if isinstance(value, Tensor) else value for value in values]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(values[i] for i in ctx.tensor_at))
        given = dict(zip(names, values, strict=True))
        return _compute(op, given) if forward_too else op(**given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return nothing_flows(ctx)
        tensors, wanted = ctx.saved_tensors, [ctx.needs_input_grad[i + 3] for i in ctx.tensor_at]

        def gradients(*pieces: Tensor) -> list[Tensor | None]:
            values = list(ctx.others)
            for i, piece in zip(ctx.tensor_at, pieces, strict=False):
                values[i] = piece
            return _recomputed(ctx.op, dict(zip(ctx.names, values, strict=True)), wanted, pieces[-1])

        with torch._C._DisableAutocast():  # the rule that led here would lead here again
            found = by_pieces(gradients, _pieces(tensors, grad), (*tensors, grad))
        result: list[Any] = [None] * len(ctx.others)
        for i, gradient in zip(ctx.tensor_at, found, strict=True):
            result[i] = gradient
        return (None, None, None, *result)


def _recomputed(op: Op, given: dict[str, Any], wanted: list[bool], grad: Tensor) -> list[Tensor | None]:
    """Return the FP32 gradients of those tensors of a call that are wanted, in the order of the call."""
    twice = torch.is_grad_enabled()  # a double backward: the gradient must depend on the saved inputs
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    with torch.enable_grad():
        widened = {name: wide(value if twice else value.detach()) for name, value in tensors.items()}
        sources = [widened[name] for name, want in zip(tensors, wanted, strict=True) if want]
        for source in sources:
            if not source.requires_grad:
                source.requires_grad_()
        out = op(**(given | widened))
        grads = iter(torch.autograd.grad(out, sources, grad.float(), create_graph=twice))
    return [next(grads) if want else None for want in wanted]


def _compute(op: Op, given: dict[str, Any]) -> Tensor:
    names = [name for name, value in given.items() if isinstance(value, Tensor)]
    number = _pieces([given[name] for name in names]) if given["dropout_p"] == 0 else 1

    def piece(*tensors: Tensor) -> tuple[Tensor]:
        return (op(**(given | dict(zip(names, map(wide, tensors), strict=True)))),)

    with InFloat32(given["query"].dtype):
        out: Tensor = by_pieces(piece, number, [given[name] for name in names])[0]
    return out


def _pieces(tensors: Sequence[Tensor], *others: Tensor) -> int:
    """Return into how many pieces the batch of query, key, value and mask is cut."""
    dimensions, batch = tensors[0].dim(), tensors[0].size(0)
    if dimensions == MATRIX or any(
        t.is_nested or t.dim() != dimensions or t.size(0) != batch for t in tensors
    ):
        return 1
    return number_of_pieces(batch, max(t.numel() for t in tensors), *tensors, *others)


def _backward_in_float32(op: Op, args: Args, kwargs: Kwargs) -> Tensor | None:
    given = bound(op, args, kwargs)
    if not _can_recompute(given) or not will_differentiate(*args[:3]):
        return (
            None  # with dropout or a trained mask torch computes step by step, in kernels that are not slow
        )
    if _are_many(given["key"]):
        return None
    return _applied(op, given, forward_too=False)


def _are_many(keys: Tensor) -> bool:
    """Whether BF16 keys are so many that torch's backward pass is not slow, or such that torch refuses them."""
    if keys.dtype is not torch.bfloat16 or keys.is_nested:
        return False
    return keys.dim() < MATRIX or keys.shape[-2] * keys.shape[-1] >= MANY_KEYS


def _all_in_float32(op: Op, args: Args, kwargs: Kwargs) -> Tensor:
    given = bound(op, args, kwargs)
    if not _can_recompute(given) or not will_differentiate(*args[:3]):
        return _compute(op, given)
    return _applied(op, given, forward_too=True)


def _applied(op: Op, given: dict[str, Any], *, forward_too: bool) -> Tensor:
    # tensors must be given by position for autograd to see them
    out: Tensor = _Attention.apply(op, forward_too, tuple(given), *given.values())  # type: ignore[no-untyped-call]
    return out


def _can_recompute(given: dict[str, Any]) -> bool:
    """Whether a second evaluation gives the same, and the gradients that are asked for."""
    mask = given["attn_mask"]
    return given["dropout_p"] == 0 and not (mask is not None and mask.requires_grad)


BACKWARD_IN_FLOAT32 = Reroute(_backward_in_float32)
ALL_IN_FLOAT32 = Reroute(_all_in_float32)
