"""Threads that train side by side do not touch each other's gradients or weights."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.nn import functional as F


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_each_thread_sees_the_true_gradients_of_its_model(at_level: Any, level: str, dtype: str) -> None:
    """The weights stay, so every pass of a thread has the same gradient; at a scale of 2^16 a wrong one is far off."""
    torch.manual_seed(0)
    models = [
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)) for _ in range(3)
    ]
    x = torch.randn(16, 8)
    norms: list[set[float]] = [set() for _ in models]

    def train(model: torch.nn.Module, seen: set[float]) -> None:
        for _ in range(40):
            model.zero_grad()
            F.mse_loss(model(x), x[:, :1]).backward()
            seen.add(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())

    with at_level(level, f"dtype={dtype}"):
        threads = [threading.Thread(target=train, args=pair) for pair in zip(models, norms, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        alone: set[float] = set()
        train(models[0], alone)
    assert [len(seen) for seen in norms] == [1, 1, 1]
    assert norms[0] == alone


def test_a_pass_in_another_thread_than_the_call_makes_all_gradients_true(at_level: Any) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(8, 1), torch.randn(16, 8)
    with at_level("O1"):
        loss = model(x).square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    found = model.weight.grad.clone()
    model.zero_grad()
    model(x).square().mean().backward()
    torch.testing.assert_close(found, model.weight.grad, rtol=5e-3, atol=2e-3)  # half rounds at 2^-11
