"""`scaled_dot_product_attention` whose backward pass, or all of it, is computed in FP32 between half tensors."""

from __future__ import annotations

from typing import Any

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
    wide,
    will_differentiate,
)

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
        ctx.save_for_backward(*(values[i] for i in ctx.tensor_at))
        given = dict(zip(names, values, strict=True))
        return _compute(op, given) if forward_too else op(**given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        twice = torch.is_grad_enabled()  # a double backward: the gradient must depend on the saved inputs
        values, wanted = list(ctx.others), []
        with torch.enable_grad(), torch._C._DisableAutocast():  # the rule that led here would lead here again
            for i, saved in zip(ctx.tensor_at, ctx.saved_tensors, strict=True):
                values[i] = wide(saved if twice else saved.detach())
                if ctx.needs_input_grad[i + 3]:
                    wanted.append(i)
                    if not values[i].requires_grad:
                        values[i].requires_grad_()
            out = ctx.op(**dict(zip(ctx.names, values, strict=True)))
            grads = torch.autograd.grad(out, [values[i] for i in wanted], grad.float(), create_graph=twice)
        saved_at = dict(zip(ctx.tensor_at, ctx.saved_tensors, strict=True))
        result: list[Any] = [None] * len(values)
        for i, gradient in zip(wanted, grads, strict=True):
            result[i] = gradient.to(saved_at[i].dtype)
        return (None, None, None, *result)


def _compute(op: Op, given: dict[str, Any]) -> Tensor:
    half = given["query"].dtype
    with InFloat32(half):
        out: Tensor = op(**{name: wide(value) for name, value in given.items()})
    return out.to(half)


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
