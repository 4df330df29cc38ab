"""Functions of the script that run parts of its model, and differentiate by the weights that they were given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .layers import Layer


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
        self.mix, self.norm = Layer(16, 16), nn.LayerNorm(16)
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


class Reversible(nn.Module):
    """A block that keeps no input: its backward pass finds it again from its output."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(8, 8), Layer(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        one = one + torch.tanh(self.f(other))
        return torch.cat([one, other + torch.tanh(self.g(one))], -1)

    def backward_of(self, y: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return input and its gradient; those of the weights are added up."""
        one, other = y.chunk(2, -1)
        grad_one, grad_other = grad.chunk(2, -1)
        other, grad_one = self.undone(self.g, one, other, grad_one, grad_other)
        one, grad_other = self.undone(self.f, other, one, grad_other, grad_one)
        return torch.cat([one, other], -1), torch.cat([grad_one, grad_other], -1)

    @staticmethod
    def undone(
        layer: nn.Module, source: Tensor, target: Tensor, grad_source: Tensor, grad_target: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            source = source.detach().requires_grad_()
            added = torch.tanh(layer(source))
        torch.autograd.backward(added, grad_target)
        return target - added.detach(), grad_source + source.grad


class OfList(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: Any) -> Tensor:
        ctx.blocks = blocks["all"] if isinstance(blocks, dict) else blocks
        for block in ctx.blocks:
            x = block(x)
        ctx.y = x.detach()
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        y = ctx.y
        for block in reversed(ctx.blocks):
            y, grad = block.backward_of(y, grad)
        return grad, None


def of_closure(x: Tensor, blocks: list[Reversible]) -> Tensor:
    class OfClosure(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return OfList.forward(ctx, x, blocks)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return OfList.backward(ctx, grad)[0]

    return OfClosure.apply(x)


class InAnother(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: list[Reversible]) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = OfList.apply(ctx.x, blocks)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        torch.autograd.backward(ctx.y, grad)
        return ctx.x.grad, None


class Stack(nn.Module):
    def __init__(self, apply: Any) -> None:
        super().__init__()
        self.first, self.apply = nn.Linear(8, 16), apply
        self.blocks, self.last = nn.ModuleList(Reversible() for _ in range(3)), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.apply(self.first(x), list(self.blocks)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize(
    "apply",
    [
        OfList.apply,
        lambda x, blocks: OfList.apply(x, {"all": blocks}),
        of_closure,
        InAnother.apply,
    ],
    ids=["list", "dict", "closure", "in another"],
)
def test_a_function_may_reach_modules_as_it_likes(apply, level, dtype, at_level):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))

    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        model = Stack(apply)
        model(x).square().mean().backward()
        return [parameter.grad.float() for parameter in model.parameters()]

    plain = gradients()
    with at_level(level, f"dtype={dtype}", *(["loss_scale.init=64"] if dtype == "float16" else [])):
        found = gradients()
    for one, other in zip(plain, found, strict=True):
        if level == "O0":
            assert torch.equal(one, other)
        else:  # forward in FP32 and again in half: what is found of an input is off by a few roundings a block
            assert (one - other).norm() <= 16 * torch.finfo(getattr(torch, dtype)).eps * one.norm()
