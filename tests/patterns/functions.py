"""Work of the forward pass that is done again in the backward pass, and functions with a backward of their own."""

from __future__ import annotations

from typing import Any

import torch
from catalogue import Figures, fit, net, pattern
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

FAMILY = "Functions and recomputation"


@pattern(FAMILY)
def activation_checkpointing() -> Figures:
    """Recomputes blocks with both kinds of activation checkpointing."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.blocks, self.head = (
                nn.Linear(8, 32),
                nn.ModuleList(net(inputs=32, outputs=32) for _ in range(3)),
                nn.Linear(32, 4),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for i, block in enumerate(self.blocks):
                x = x + checkpoint(block, x, use_reentrant=bool(i % 2))
            return self.head(x)

    model = Blocks()
    return {"loss": fit(model, torch.optim.SGD(model.parameters(), lr=0.05))}


@pattern(FAMILY)
def checkpointing_in_the_script() -> Figures:
    """Calls `checkpoint` in the training loop, outside any module."""
    first, second = net(outputs=16), net(inputs=16)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    return {"loss": fit(lambda x: second(checkpoint(first, x, use_reentrant=False)), optimizer)}


class Signs(torch.autograd.Function):
    """A binarisation with a straight-through gradient that multiplies matrices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.mm(weight.sign().t() * weight.abs().mean())

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad_out.mm(weight.sign() * weight.abs().mean()), grad_out.t().mm(x)


@pattern(FAMILY, note="runs in FP32 unless its author used `custom_fwd`")
def own_autograd_function() -> Figures:
    """Defines an `autograd.Function` of its own."""

    class Binary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight, self.head = (
                nn.Linear(8, 32),
                nn.Parameter(torch.randn(32, 32) / 6),
                nn.Linear(32, 4),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(Signs.apply(torch.relu(self.first(x)), self.weight)))

    model = Binary()
    return {"loss": fit(model, torch.optim.SGD(model.parameters(), lr=0.05))}


class Recomputes(torch.autograd.Function):
    """Activation checkpointing as diffusion models bring it along: given a function, its inputs, and its weights."""

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


@pattern(FAMILY, note="weights are FP32 there; modules called in the second run compute in half")
def own_checkpointing() -> Figures:
    """Recomputes blocks by an `autograd.Function` of its own, which is given the block's weights."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)
            self.factor = nn.Parameter(torch.full((32,), 0.7))

        def forward(self, x: Tensor) -> Tensor:
            return Recomputes.apply(self.part, 1, x, *self.parameters())

        def part(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.norm(self.mix(x)) * self.factor)

    model = nn.Sequential(nn.Linear(8, 32), Block(), Block(), nn.Linear(32, 4))
    return {
        "loss": fit(model, torch.optim.SGD(model.parameters(), lr=0.05)),
        "weights": sum(parameter.detach().norm().item() for parameter in model.parameters()),
    }
