"""Ops whose half kernel is pathologically slow in some direction: half outside, FP32 inside.

Inputs, outputs and saved tensors stay half, so rounding, overflow and memory are those of the half kernel, and a smoke
run on a CPU tests what the GPU will do. Which ops, where and by how much is data: the groups of `configs/ops/` that a
preset lists under `compute_float32`.
"""

from __future__ import annotations

from mpx.engine.reroutes import attention, convolutions, products
from mpx.engine.reroutes.base import Reroute, half_outside

__all__ = ["half_outside", "reroute_of"]


def reroute_of(name: str, direction: str) -> Reroute:
    """Return the FP32 arithmetic of an op.

    Args:
        name: Of the op without its overload, "conv2d".
        direction: What the half kernel is slow in, as the op's line says it.

    Raises:
        KeyError: There is no such direction: a fault of the shipped lists.
    """
    return ALL.get(name, products.COMPOSITE) if direction == "all" else ONE_DIRECTION[direction]


CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
ALL: dict[str, Reroute] = {
    **dict.fromkeys(CONVOLUTIONS, convolutions.ALL_IN_FLOAT32),
    "linear": products.LINEAR,
    "matmul": products.MATMUL,
    **dict.fromkeys(("mm", "bmm"), products.TWO),
    **dict.fromkeys(("addmm", "baddbmm"), products.THREE),
    "scaled_dot_product_attention": attention.ALL_IN_FLOAT32,
}
ONE_DIRECTION: dict[str, Reroute] = {
    "backward": attention.BACKWARD_IN_FLOAT32,
    "weight_gradient": convolutions.WEIGHT_GRADIENT_IN_FLOAT32,
}
