"""`apex.fp16_utils`: half models and FP32 copies by hand. The level does both, so these leave the model alone."""

from __future__ import annotations

from mpx.apex.fp16_optimizer import FP16_Optimizer
from mpx.apex.running import serve

from .fp16util import (
    BN_convert_float,
    FP16Model,
    clip_grad_norm,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)

__all__ = [
    "BN_convert_float",
    "FP16Model",
    "FP16_Optimizer",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]

serve("fp16_utils", "models stay as they are, and the level of the run does what it did")
