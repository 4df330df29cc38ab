"""Functions that made a model half and kept FP32 copies of its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

__all__ = [
    "BN_convert_float",
    "FP16Model",
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


class tofp16(nn.Module):
    """Gives its input back: the level casts."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input."""
        return input


class FP16Model(nn.Module):
    """The network, as it is."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Any) -> Any:
        """Return what the network makes of the inputs."""
        return self.network(*inputs)


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Return the module as it is."""
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """Return the network as it is."""
    return network


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Leave the module as it is."""


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the network as it is."""
    return network


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Return the trained parameters of the model, and once more in the place of their FP32 copies.

    Raises:
        ValueError: `flat_master` asks for one tensor of all.
    """
    if flat_master:
        raise ValueError("flat_master is not carried out by mpx. Expected it left out")
    parameters: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return parameters, list(parameters)


def model_grads_to_master_grads(
    model_params: list[Tensor], master_params: list[Tensor], flat_master: bool = False
) -> None:
    """Do nothing: the parameters are their own FP32 copies."""


def master_params_to_model_params(
    model_params: list[Tensor], master_params: list[Tensor], flat_master: bool = False
) -> None:
    """Do nothing: the parameters are their own FP32 copies."""


def to_python_float(t: Any) -> Any:
    """Return the number in a tensor or in a sequence of one."""
    return t.item() if hasattr(t, "item") else t[0]
