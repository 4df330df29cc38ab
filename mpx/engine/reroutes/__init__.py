"""Ops whose half kernel is pathologically slow in some direction: half outside, FP32 inside.

Inputs, outputs and saved tensors stay half, so rounding, overflow and memory are those of the half kernel, and a smoke
run on a CPU tests what the GPU will do. Which ops, where and by how much is data: the groups of `configs/ops/` that a
preset lists under `compute_float32`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from mpx.engine.reroutes import attention, convolutions, products
from mpx.engine.reroutes.base import Args, Kwargs, Op, Rerouted, half_outside

__all__ = ["half_outside", "reroute_of"]

Reroute: TypeAlias = Callable[[Op, Args, Kwargs], Rerouted]


def reroute_of(name: str, direction: str) -> Reroute:
    """Return what plans the FP32 arithmetic of an op.

    Args:
        name: Of the op without its overload, "conv2d".
        direction: What the half kernel is slow in, as the op's line says it.

    Raises:
        KeyError: There is no such direction: a fault of the shipped lists.
    """
    return ALL.get(name, products.composite) if direction == "all" else ONE_DIRECTION[direction]


CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
ALL: dict[str, Reroute] = {
    **dict.fromkeys(CONVOLUTIONS, convolutions.all_in_float32),
    "linear": products.linear,
    "matmul": products.matmul,
    **dict.fromkeys(("mm", "bmm"), products.two),
    **dict.fromkeys(("addmm", "baddbmm"), products.three),
    "scaled_dot_product_attention": attention.all_in_float32,
}
ONE_DIRECTION: dict[str, Reroute] = {
    "backward": attention.backward_in_float32,
    "weight_gradient": convolutions.weight_gradient_in_float32,
}
