"""Ops whose half kernel is pathologically slow in one direction: half outside, FP32 inside.

Inputs, outputs and saved tensors stay half, so rounding, overflow and memory are those of the half kernel, and a smoke
run on a CPU tests what the GPU will do. Which ops, where and by how much is data: `configs/ops/slow_kernels.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["REROUTES"]

Op: TypeAlias = torch._ops.OpOverload
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = Mapping[str, Any]
Rerouted: TypeAlias = Callable[[], Tensor] | None  # None: nothing slow lies ahead, the op may run as it is


class _BackwardInFloat32(torch.autograd.Function):
    """Runs `op` as it is; its backward recomputes it in FP32 from the saved half inputs and differentiates that."""

    @staticmethod
    def forward(ctx: Any, op: Op, names: tuple[str, ...], *values: Any) -> Tensor:
        ctx.op, ctx.names = op, names
        ctx.tensor_at = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
        ctx.others = [None if isinstance(value, Tensor) else value for value in values]
        ctx.save_for_backward(*(values[i] for i in ctx.tensor_at))
        out: Tensor = op(**dict(zip(names, values, strict=True)))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        twice = torch.is_grad_enabled()  # a double backward: the gradient must depend on the saved inputs
        values, wanted = list(ctx.others), []
        with torch.enable_grad(), torch._C._DisableAutocast():  # the rule that led here would lead here again
            for i, saved in zip(ctx.tensor_at, ctx.saved_tensors, strict=True):
                values[i] = _float(saved if twice else saved.detach())
                if ctx.needs_input_grad[i + 2]:
                    wanted.append(i)
                    if not values[i].requires_grad:
                        values[i].requires_grad_()
            out = ctx.op(**dict(zip(ctx.names, values, strict=True)))
            grads = torch.autograd.grad(out, [values[i] for i in wanted], grad.float(), create_graph=twice)
        saved_at = dict(zip(ctx.tensor_at, ctx.saved_tensors, strict=True))
        result: list[Any] = [None] * len(values)
        for i, gradient in zip(wanted, grads, strict=True):
            result[i] = gradient.to(saved_at[i].dtype)
        return (None, None, *result)


class _ConvolutionWeightGradientInFloat32(torch.autograd.Function):
    """A convolution whose forward and input gradient are half and whose weight gradient is computed on FP32 copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        ctx.geometry = geometry  # stride, padding, dilation, transposed, output_padding, groups
        ctx.save_for_backward(x, weight, bias)
        out: Tensor = torch.ops.aten.convolution(x, weight, bias, *geometry)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # when a double backward is to follow, autograd differentiates the FP32 convolution
        gradients = _differentiable if torch.is_grad_enabled() else _kernels
        x, weight, bias = ctx.saved_tensors
        with torch._C._DisableAutocast():
            return (*gradients(ctx, x, weight, bias, grad), *([None] * len(ctx.geometry)))


def _kernels(
    ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor
) -> tuple[Tensor | None, ...]:
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    backward = torch.ops.aten.convolution_backward
    sizes = None if bias is None else list(bias.shape)
    grad_x = grad_weight = grad_bias = None
    if needs_x:
        grad_x, _, _ = backward(grad, x, weight, sizes, *ctx.geometry, [True, False, False])
    if needs_weight or needs_bias:
        mask = [False, needs_weight, needs_bias]
        _, grad_weight, grad_bias = backward(
            grad.float(), x.float(), weight.float(), sizes, *ctx.geometry, mask
        )
    half = weight.dtype
    return (grad_x, *(None if wide is None else wide.to(half) for wide in (grad_weight, grad_bias)))


def _differentiable(
    ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor
) -> tuple[Tensor | None, ...]:
    widened = [None if value is None else value.float() for value in (x, weight, bias)]
    needed = {i: value for i, value in enumerate(widened) if value is not None and ctx.needs_input_grad[i]}
    out = torch.ops.aten.convolution(*widened, *ctx.geometry)
    grads = torch.autograd.grad(out, list(needed.values()), grad.float(), create_graph=True)
    found = {i: gradient.to(x.dtype) for i, gradient in zip(needed, grads, strict=True)}
    return tuple(found.get(i) for i in range(3))


def _backward_in_float32(op: Op, args: Args, kwargs: Kwargs) -> Rerouted:
    given = _bound(op, args, kwargs)
    mask = given["attn_mask"]
    differentiates_mask = mask is not None and mask.requires_grad
    if given["dropout_p"] > 0 or differentiates_mask or not _will_differentiate(*args[:3]):
        return (
            None  # with dropout or a trained mask torch computes step by step, in kernels that are not slow
        )
    # tensors must be given by position for autograd to see them
    return lambda: _BackwardInFloat32.apply(op, tuple(given), *given.values())  # type: ignore[no-untyped-call]


def _weight_gradient_in_float32(op: Op, args: Args, kwargs: Kwargs) -> Rerouted:
    given = _bound(op, args, kwargs)
    x, weight, bias = given["input"], given["weight"], given["bias"]
    if not _will_differentiate(weight):
        return None
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

    def rerouted() -> Tensor:
        out: Tensor = _ConvolutionWeightGradientInFloat32.apply(x, weight, bias, *geometry)  # type: ignore[no-untyped-call]
        return out.squeeze(0) if unbatched else out

    return rerouted


def _will_differentiate(*inputs: Tensor) -> bool:
    """Whether a backward pass may follow, and not by a transform of `torch.func`, which these Functions do not know."""
    return (
        torch.is_grad_enabled()
        and any(value.requires_grad for value in inputs)
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
    )


def _bound(op: Op, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Return every argument by name, defaults included."""
    given = {argument.name: argument.default_value for argument in op._schema.arguments}
    return given | dict(zip(given, args, strict=False)) | dict(kwargs)


def _float(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


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


REROUTES: dict[str, Callable[[Op, Args, Kwargs], Rerouted]] = {
    "backward": _backward_in_float32,
    "weight_gradient": _weight_gradient_in_float32,
}
