"""Layer normalisation by torch under apex's names; the type of its result is the level's business."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "FusedLayerNorm",
    "FusedRMSNorm",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
]

Shape = int | Sequence[int]
EPS = 1e-5  # apex's own default of the classes
EPS_OF_FUNCTIONS = 1e-6  # and of the functions


class FusedLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` under apex's signature."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = EPS,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)


class FusedRMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` under apex's signature."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = EPS,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)


class MixedFusedLayerNorm(FusedLayerNorm):
    """Apex's variant whose result has the type of the weight."""


class MixedFusedRMSNorm(FusedRMSNorm):
    """Apex's variant whose result has the type of the weight."""


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = EPS_OF_FUNCTIONS, memory_efficient: bool = False
) -> Tensor:
    """Return the normalised input."""
    return F.layer_norm(input, _listed(normalized_shape), eps=eps)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = EPS_OF_FUNCTIONS,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the normalised input times `weight` plus `bias`."""
    return F.layer_norm(input, _listed(normalized_shape), weight, bias, eps)


def fused_rms_norm(
    input: Tensor, normalized_shape: Shape, eps: float = EPS_OF_FUNCTIONS, memory_efficient: bool = False
) -> Tensor:
    """Return the input over its root mean square."""
    return F.rms_norm(input, _listed(normalized_shape), eps=eps)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = EPS_OF_FUNCTIONS,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the input over its root mean square, times `weight`."""
    return F.rms_norm(input, _listed(normalized_shape), weight, eps)


def _listed(shape: Shape) -> list[int]:
    return [shape] if isinstance(shape, int) else list(shape)
