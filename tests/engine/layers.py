"""Layers as a script defines them: at O2 their weights are held as half copies, those of torch's are cast at use."""

from __future__ import annotations

from torch import nn


class Layer(nn.Linear):
    """A linear layer."""


class LazyLayer(nn.LazyLinear):
    """One whose weight gets its shape from the first input."""

    cls_to_become = Layer
