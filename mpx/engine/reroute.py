"""Ops whose half kernel is pathologically slow in one direction: half outside, FP32 inside.

Inputs, outputs and saved tensors stay half, so rounding, overflow and memory are those of the half kernel. Measured on torch 2.13 (TORCH
notes in `configs/ops/slow_kernels.yaml`): a CPU without FP16 AMX takes 300 times longer for the FP16 weight gradient of a convolution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["REROUTES"]


class _BackwardInFloat32(torch.autograd.Function):
    """Runs `op` as it is; its backward recomputes it in FP32 from the saved half inputs and differentiates that."""

    @staticmethod
    def forward(ctx: Any, op: Callable[..., Tensor], kwargs: dict[str, Any], *args: Any) -> Tensor:
        ctx.op, ctx.kwargs = op, kwargs
        ctx.tensor_at = [i for i, value in enumerate(args) if isinstance(value, Tensor)]
        ctx.others = [None if isinstance(value, Tensor) else value for value in args]
        ctx.save_for_backward(*(args[i] for i in ctx.tensor_at))
        return op(*args, **kwargs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        create_graph = torch.is_grad_enabled()  # a double backward: the gradient must depend on the saved inputs
        args = list(ctx.others)
        wanted, widened = [], []
        with torch.enable_grad():
            for i, saved in zip(ctx.tensor_at, ctx.saved_tensors, strict=True):
                source = saved if create_graph else saved.detach()
                args[i] = source.float() if saved.is_floating_point() else saved
                if ctx.needs_input_grad[i + 2]:
                    if not args[i].requires_grad:
                        args[i].requires_grad_()
                    wanted.append(i)
                    widened.append(args[i])
            out = ctx.op(*args, **ctx.kwargs)
        grads = torch.autograd.grad(out, widened, grad.float(), create_graph=create_graph)
        result: list[Any] = [None] * (len(args) + 2)
        for i, gradient in zip(wanted, grads, strict=True):
            result[i + 2] = gradient.to(ctx.saved_tensors[ctx.tensor_at.index(i)].dtype)
        return tuple(result)


class _ConvolutionWeightGradientInFloat32(torch.autograd.Function):
    """A convolution whose forward and input gradient are half and whose weight gradient is computed on FP32 copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        ctx.geometry = geometry  # stride, padding, dilation, transposed, output_padding, groups
        ctx.save_for_backward(x, weight, bias)
        return torch.ops.aten.convolution(x, weight, bias, *geometry)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, bias = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # a double backward: let autograd differentiate the FP32 convolution
            return (*_differentiable(ctx, x, weight, bias, grad), *([None] * len(ctx.geometry)))
        backward = torch.ops.aten.convolution_backward
        sizes = None if bias is None else list(bias.shape)
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x, _, _ = backward(grad, x, weight, sizes, *ctx.geometry, [True, False, False])
        if needs_weight or needs_bias:
            mask = [False, needs_weight, needs_bias]
            _, grad_weight, grad_bias = backward(grad.float(), x.float(), weight.float(), sizes, *ctx.geometry, mask)
            grad_weight = grad_weight.to(weight.dtype) if needs_weight else None
            grad_bias = grad_bias.to(bias.dtype) if needs_bias else None
        return (grad_x, grad_weight, grad_bias, *([None] * len(ctx.geometry)))


def _differentiable(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor) -> tuple[Tensor | None, ...]:
    inputs = (x, weight, bias)
    needed = ctx.needs_input_grad[:3]
    widened = [None if value is None else value.float() for value in inputs]
    wanted = [value for value, need in zip(widened, needed, strict=True) if need and value is not None]
    out = torch.ops.aten.convolution(*widened, *ctx.geometry)
    grads = iter(torch.autograd.grad(out, wanted, grad.float(), create_graph=True))
    return tuple(
        next(grads).to(value.dtype) if need and value is not None else None
        for value, need in zip(inputs, needed, strict=True)
    )


def _backward_in_float32(op: Callable[..., Tensor], args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    bound = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs  # type: ignore[attr-defined]
    if bound.get("dropout_p", 0.0) > 0.0:
        # the mask is drawn inside: a recomputation would draw another one, so forward and backward are both FP32
        half = args[0].dtype
        widened = [a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        mask = kwargs.get("attn_mask")
        widened_kwargs = kwargs if mask is None or not mask.is_floating_point() else {**kwargs, "attn_mask": mask.float()}
        return op(*widened, **widened_kwargs).to(half)
    if not torch.is_grad_enabled():
        return op(*args, **kwargs)
    names = [a.name for a in op._schema.arguments if not a.kwarg_only]  # type: ignore[attr-defined]
    positional = [*args]
    rest = dict(kwargs)
    for argument in op._schema.arguments[len(args) : len(names)]:  # type: ignore[attr-defined]
        positional.append(rest.pop(argument.name, argument.default_value))  # tensors must be positional for autograd
    return _BackwardInFloat32.apply(op, rest, *positional)  # type: ignore[no-any-return]


def _weight_gradient_in_float32(op: Callable[..., Tensor], args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    given = {a.name: a.default_value for a in op._schema.arguments}  # type: ignore[attr-defined]
    given |= dict(zip(given, args, strict=False)) | kwargs
    x, weight, bias = given["input"], given["weight"], given["bias"]
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return op(*args, **kwargs)
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
    out: Tensor = _ConvolutionWeightGradientInFloat32.apply(x, weight, bias, *geometry)
    return out.squeeze(0) if unbatched else out


def _per_dimension(value: int | list[int], spatial: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * spatial if len(values) == 1 else values


def _named_padding(x: Tensor, weight: Tensor, name: str, dilation: list[int]) -> tuple[Tensor, list[int]]:
    """Return input and padding for "valid" and "same"; an odd total needs one more zero at the end, as torch does it."""
    totals = [d * (size - 1) if name == "same" else 0 for d, size in zip(dilation, weight.shape[2:], strict=True)]
    odd = [amount for total in reversed(totals) for amount in (0, total % 2)]
    return (torch.constant_pad_nd(x, odd) if any(odd) else x), [total // 2 for total in totals]


REROUTES: dict[str, Callable[[Callable[..., Tensor], list[Any], dict[str, Any]], Tensor]] = {
    "backward": _backward_in_float32,
    "weight_gradient": _weight_gradient_in_float32,
}
