"""Models of shapes without numbers, on the meta device or fake, train as without a session and disturb no other."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from .layers import Layer


def trained(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(Layer(8, 8, device=device), nn.BatchNorm1d(8, device=device))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 8, device=device)).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_another_model_trains_beside_it(level: str, kind: str, at_level: Any) -> None:
    with at_level(level) as recorded:
        with FakeTensorMode() if kind == "fake" else nullcontext():
            shapes, optimizer = trained("meta" if kind == "meta" else "cpu")
        real, own = trained("cpu")
        assert recorded.summary["backwards"] == 2
    assert all(parameter.grad is not None for parameter in (*shapes.parameters(), *real.parameters()))
    assert all(bool(parameter.isfinite().all()) for parameter in real.parameters())
    assert optimizer.state
    assert own.state
