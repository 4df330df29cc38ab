"""`apex.normalization`: torch's own layers."""

from __future__ import annotations

from mpx.apex.running import serve

from .fused_layer_norm import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]

serve("normalization", "the layers are torch's LayerNorm and RMSNorm")
