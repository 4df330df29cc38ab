"""`torch.autograd.grad` and FP32 islands at the levels where only the weights' place matters, not the scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Recomputed(nn.Module):
    """A model whose middle is recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(
            checkpoint(lambda h: self.norm(self.first(h)) * self.first.weight[0], x, use_reentrant=False)
        )


@pytest.mark.parametrize("setting", ["dtype=bfloat16", "loss_scale=1"])
def test_grad_over_a_checkpointed_model_without_a_scale_is_that_of_float32(
    at_level: Any, setting: str
) -> None:
    torch.manual_seed(0)
    model, x = Recomputed(), torch.randn(16, 8)
    weights = list(model.parameters())
    expected = torch.autograd.grad(model(x).square().mean(), weights)
    with at_level("O2", setting):
        found = torch.autograd.grad(model(x).square().mean(), weights)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype is torch.float32
        # bfloat16 rounds at 2^-8, a few times over
        assert torch.linalg.vector_norm(ours - theirs) <= 0.05 * torch.linalg.vector_norm(theirs) + 1e-3


def test_an_island_of_float32_works_at_o3(at_level: Any) -> None:
    class Island(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer, self.inner = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.outer(x)
            with torch.autocast("cpu", enabled=False):
                return self.inner(h.float())

    torch.manual_seed(0)
    model, x = Island(), torch.randn(16, 8)
    expected = model(x)
    with at_level("O3"):
        found = model(x)
        assert model.inner.weight.dtype is torch.float16
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)  # weights rounded to half
