"""Models of the tests: layers as a script defines them, and a model that does with its layers what it is told."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn


class Layer(nn.Linear):
    """A linear layer of the script: at O2 its weights are held as half copies, those of torch's are cast at use."""


class LazyLayer(nn.LazyLinear):
    """One whose weight gets its shape from the first input."""

    cls_to_become = Layer


class Model(nn.Module):
    """Does with its layers what it is told."""

    def __init__(self, forward, *layers):
        super().__init__()
        self.told, self.layers = forward, nn.ModuleList(layers)

    def forward(self, x):
        return self.told(self.layers, x)


def again(layers, x, uses=6):
    return sum(layer(x).float().sum() for _ in range(uses) for layer in layers)


def copies_of_a_weight(layer, uses):
    """Return how many half tensors of the shape of the layer's weight the backward pass keeps."""
    x, kept = torch.ones(3, layer.in_features, requires_grad=True), set()

    def pack(tensor):
        if layer.weight.shape in {tensor.shape, tensor.t().shape} and tensor.dtype != torch.float32:
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = Model(partial(again, uses=uses), layer)(x)
    loss.backward()
    return len(kept)
