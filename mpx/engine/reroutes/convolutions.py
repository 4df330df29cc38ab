"""Convolutions whose weight gradient, or all of whose arithmetic, is FP32 between half tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpx.engine.reroutes.base import (
    Args,
    InFloat32,
    Kwargs,
    Op,
    Reroute,
    bound,
    nothing_flows,
    will_differentiate,
)

__all__ = ["ALL_IN_FLOAT32", "WEIGHT_GRADIENT_IN_FLOAT32"]

Gradients = tuple[Tensor | None, ...]


class _Convolution(torch.autograd.Function):
    """`aten::convolution`; `everything` says whether the forward pass and the input gradient are FP32 as well."""

    @staticmethod
    def forward(
        ctx: Any,
        everything: bool,  # noqa: FBT001
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *geometry: Any,
    ) -> Tensor:
        ctx.everything = everything
        ctx.geometry = geometry  # stride, padding, dilation, transposed, output_padding, groups
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias)
        return (_compute if everything else torch.ops.aten.convolution)(x, weight, bias, *geometry)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return nothing_flows(ctx)
        x, weight, bias = ctx.saved_tensors
        with torch._C._DisableAutocast():
            if torch.is_grad_enabled():  # a double backward is to follow
                grads = _differentiable(ctx, x, weight, bias, grad)
            elif ctx.everything:
                grads = _kernel(ctx, x, weight, bias, grad, ctx.needs_input_grad[1:4])
            else:
                grads = _mixed_kernels(ctx, x, weight, bias, grad)
        return (None, *grads, *([None] * len(ctx.geometry)))


def _compute(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    with InFloat32(x.dtype):
        wide_bias = None if bias is None else bias.float()
        out: Tensor = torch.ops.aten.convolution(x.float(), weight.float(), wide_bias, *geometry)
    return out.to(x.dtype)


def _kernel(  # noqa: PLR0917
    ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, mask: tuple[bool, ...]
) -> Gradients:
    """Return the gradients that `mask` asks for, computed in FP32."""
    sizes = None if bias is None else list(bias.shape)
    wide = (grad.float(), x.float(), weight.float())
    grads = torch.ops.aten.convolution_backward(*wide, sizes, *ctx.geometry, list(mask))
    return tuple(None if one is None else one.to(weight.dtype) for one in grads)


def _mixed_kernels(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor) -> Gradients:
    """Return the input gradient of the half kernel, and those of weight and bias in FP32."""
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[1:4]
    grad_x = grad_weight = grad_bias = None
    if needs_x:
        asked = [True, False, False]
        grad_x, _, _ = torch.ops.aten.convolution_backward(grad, x, weight, None, *ctx.geometry, asked)
    if needs_weight or needs_bias:
        mask = (False, needs_weight, needs_bias)
        _, grad_weight, grad_bias = _kernel(ctx, x, weight, bias, grad, mask)
    return grad_x, grad_weight, grad_bias


def _differentiable(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor) -> Gradients:
    """Return gradients with graphs of their own: autograd differentiates the FP32 convolution."""
    widened = [None if value is None else value.float() for value in (x, weight, bias)]
    needed = {
        i: value for i, value in enumerate(widened) if value is not None and ctx.needs_input_grad[i + 1]
    }
    out = torch.ops.aten.convolution(*widened, *ctx.geometry)
    grads = torch.autograd.grad(out, list(needed.values()), grad.float(), create_graph=True)
    found = {i: gradient.to(x.dtype) for i, gradient in zip(needed, grads, strict=True)}
    return tuple(found.get(i) for i in range(3))


def _weight_gradient_in_float32(op: Op, args: Args, kwargs: Kwargs) -> Tensor | None:
    given = bound(op, args, kwargs)
    return _rerouted(given, everything=False) if will_differentiate(given["weight"]) else None


def _all_in_float32(op: Op, args: Args, kwargs: Kwargs) -> Tensor:
    return _rerouted(bound(op, args, kwargs), everything=True)


def _rerouted(given: dict[str, Any], *, everything: bool) -> Tensor:
    x, weight, bias = given["input"], given["weight"], given["bias"]
    spatial = weight.dim() - 2
    unbatched = x.dim() == spatial + 1
    if unbatched:
        x = x.unsqueeze(0)
    stride, dilation = _per_dimension(given["stride"], spatial), _per_dimension(given["dilation"], spatial)
    padding = given["padding"]
    if isinstance(padding, str):
        x, padding = _named_padding(x, weight, padding, dilation)
    geometry = (
        stride,
        _per_dimension(padding, spatial),
        dilation,
        "output_padding" in given,
        _per_dimension(given.get("output_padding", 0), spatial),
        given["groups"],
    )
    out: Tensor
    if will_differentiate(x, weight, bias):
        out = _Convolution.apply(everything, x, weight, bias, *geometry)  # type: ignore[no-untyped-call]
    else:
        out = _compute(x, weight, bias, *geometry)
    return out.squeeze(0) if unbatched else out


def _per_dimension(value: int | list[int], spatial: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * spatial if len(values) == 1 else values


def _named_padding(x: Tensor, weight: Tensor, name: str, dilation: list[int]) -> tuple[Tensor, list[int]]:
    """Return input and padding for "valid" and "same"; an odd total needs one more zero at the end, as in torch."""
    totals = [
        d * (size - 1) if name == "same" else 0 for d, size in zip(dilation, weight.shape[2:], strict=True)
    ]
    odd = [amount for total in reversed(totals) for amount in (0, total % 2)]
    return (torch.constant_pad_nd(x, odd) if any(odd) else x), [total // 2 for total in totals]


WEIGHT_GRADIENT_IN_FLOAT32 = Reroute(_weight_gradient_in_float32)
ALL_IN_FLOAT32 = Reroute(_all_in_float32)
