"""Threads that train side by side do not touch each other's gradients or weights."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from .layers import Layer


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_each_thread_sees_the_true_gradients_of_its_model(at_level: Any, level: str, dtype: str) -> None:
    """The weights stay, so every pass of a thread has the same gradient; at a scale of 2^16 a wrong one is far off."""
    torch.manual_seed(0)
    models = [torch.nn.Sequential(Layer(8, 8), torch.nn.ReLU(), Layer(8, 1)) for _ in range(3)]
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
    model, x = Layer(8, 1), torch.randn(16, 8)
    with at_level("O1"):
        loss = model(x).square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    found = model.weight.grad.clone()
    model.zero_grad()
    model(x).square().mean().backward()
    torch.testing.assert_close(found, model.weight.grad, rtol=5e-3, atol=2e-3)  # half rounds at 2^-11


class Part(torch.nn.Module):
    """Waits in its forward pass until all threads are in theirs."""

    def __init__(self, together: threading.Barrier) -> None:
        super().__init__()
        self.first, self.norm, self.last = Layer(8, 8), torch.nn.LayerNorm(8), Layer(8, 8)
        self.together = together

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.together.wait()
        return self.last(self.norm(self.first(x)))


class Parallel(torch.nn.Module):
    """Runs parts in threads of its own."""

    def __init__(self, parts: list[torch.nn.Module], *, registered: bool) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(parts) if registered else parts
        self.head = Layer(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(len(self.parts)) as pool:
            results = list(pool.map(lambda part: part(x), self.parts))
        return self.head(torch.stack(results).sum(0))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("parts", ["of the tree", "in a plain list", "the same in a plain list"])
def test_a_forward_pass_may_run_its_parts_in_threads(at_level: Any, level: str, parts: str) -> None:
    torch.manual_seed(0)
    together = threading.Barrier(3, timeout=60)
    own: list[torch.nn.Module] = [Part(together) for _ in range(3)]
    if parts == "the same in a plain list":
        own = own[:1] * 3
    model, x = Parallel(own, registered=parts == "of the tree"), torch.randn(16, 8)
    parameters = list({p: None for module in (model, *own) for p in module.parameters()})

    def gradients() -> list[torch.Tensor]:
        for p in parameters:
            p.grad = None
        model(x).square().mean().backward()
        return [p.grad for p in parameters]

    plain = gradients()
    with at_level(level, "loss_scale.init=64"):
        found = [gradients() for _ in range(5)]
        types = {p.dtype for p in parameters}
    assert types == {torch.float16 if level == "O3" else torch.float32}
    for pass_ in found:
        for grad, exact in zip(pass_, plain, strict=True):
            torch.testing.assert_close(grad.float(), exact, rtol=2e-2, atol=1e-2)
