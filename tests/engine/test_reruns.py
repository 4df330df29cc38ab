"""O2 keeps half copies for a backward pass only where Python code may run parts of the call again in it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from .layers import Layer


@pytest.fixture
def level_2(at_level):
    return lambda: at_level("O2", "loss_scale.init=64")


class Scales(nn.Module):
    """Multiplies by a parameter that it reads itself: no call of a module tells when that happens again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer(4, 4)
        self.factor = nn.Parameter(torch.full((4,), 0.5))
        self.seen: list[tuple[bool, torch.dtype]] = []

    def part(self, x: Tensor) -> Tensor:
        self.seen.append((torch._C._current_graph_task_id() != -1, self.factor.dtype))
        return torch.tanh(self.inner(x) * self.factor)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class ByHooks(Scales):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, x, use_reentrant=False)


class ByFunction(Scales):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, x, use_reentrant=True)


def trained(kind: type[Scales], around=nullcontext) -> tuple[Scales, list[Tensor]]:
    torch.manual_seed(0)
    model = kind()
    x = torch.randn(3, 4, requires_grad=True)
    with around():
        loss = model(x).square().sum()
    loss.backward()
    return model, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("kind", [ByHooks, ByFunction])
def test_what_runs_again_finds_the_weights_of_the_call(level_2, kind):
    with level_2():
        _, expected = trained(Scales)
        model, grads = trained(kind)
    assert model.seen == [(False, torch.float16), (True, torch.float16)]
    for grad, other in zip(grads, expected, strict=True):
        assert torch.equal(grad, other)
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


def test_a_hook_of_the_backward_pass_finds_the_parameters(level_2):
    """Nothing is in their places: outside its calls a script sees what it made."""
    seen = []

    class Hooked(Scales):
        def forward(self, x: Tensor) -> Tensor:
            result = self.part(x)
            result.register_hook(lambda _: seen.append(self.factor.dtype))
            return result

    with level_2():
        trained(Hooked)
    assert seen == [torch.float32]


@pytest.mark.parametrize(
    ("kind", "around", "kept"),
    [
        (Scales, nullcontext, 0),
        (Scales, lambda: saved_tensors_hooks(lambda x: x, lambda x: x), 1),
        (ByHooks, nullcontext, 1),
        (ByFunction, nullcontext, 1),
    ],
)
def test_copies_are_kept_for_what_may_run_again_and_for_nothing_else(level_2, kind, around, kept):
    with level_2() as recorded:
        session = recorded.session
        model = kind()
        with around():
            loss = model(torch.randn(3, 4, requires_grad=True)).sum()
        assert len(session.working._here.recent) == kept
        loss.backward()
        assert not session.working._here.recent
        model(torch.randn(3, 4, requires_grad=True)).sum().backward()
        assert session.reruns.open == 0
