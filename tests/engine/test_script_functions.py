"""Functions of the script that run parts of its model, and differentiate by the weights that they were given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Recomputes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, count: int, *args: Tensor) -> Tensor:
        ctx.run, ctx.inputs, ctx.weights = run, args[:count], args[count:]
        with torch.no_grad():
            return run(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.inputs]
        with torch.enable_grad():
            outputs = ctx.run(*inputs)
        return None, None, *torch.autograd.grad(outputs, (*inputs, *ctx.weights), grads, allow_unused=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.factor = nn.Parameter(torch.full((16,), 0.7))
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        return Recomputes.apply(self.part, 1, x, *self.parameters()) if self.recomputes else self.part(x)

    def part(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.mix(x)) * self.factor)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_weights_that_a_function_is_given_get_their_gradients(at_level, level, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, 2))
    x = torch.randn(32, 8)

    def gradients(*, recomputes: bool) -> list[Tensor]:
        model[1].recomputes = model[2].recomputes = recomputes
        model.zero_grad()
        model(x).square().mean().backward()
        return [parameter.grad.float() for parameter in model.parameters()]

    with at_level(
        level, f"dtype={dtype}", *(["loss_scale.init=64"] if dtype == "float16" else [])
    ) as recorded:
        plain, again = gradients(recomputes=False), gradients(recomputes=True)
        told = recorded.session.summary()["substitutions"]
    exact = level == "O0"
    assert exact != any("Recomputes" in row["text"] for row in told)
    for one, other in zip(plain, again, strict=True):
        if exact:
            assert torch.equal(one, other)
        else:  # the function computed in FP32 what was computed in half without it: a few roundings
            assert (one - other).norm() <= 8 * torch.finfo(getattr(torch, dtype)).eps * one.norm()
