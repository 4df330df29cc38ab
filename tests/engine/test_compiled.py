"""`torch.compile` of a model, a function or a step computes in the level's types, and breaks where torch alone does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# dynamo looks at `.grad` of what it meets, as of the loss of a compiled step, and hides what torch says to that
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

IDS = torch.arange(8) % 5
PIXELS = torch.linspace(-1, 1, 8 * 16).view(8, 1, 4, 4)


class Net(nn.Module):
    """One of each kind of layer; returns the types that it saw beside its result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 8)
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)
        self.mix = nn.Linear(32, 8)
        self.layer_norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, ids: Tensor, pixels: Tensor) -> tuple[Tensor, list[torch.dtype]]:
        embedded = self.embed(ids)
        image = self.norm(self.conv(pixels))
        mixed = self.mix(image.flatten(1))
        normed = self.layer_norm(mixed + embedded)
        heads = normed.view(1, 2, 8, 4)
        attended = F.scaled_dot_product_attention(heads, heads, heads).view(8, 8)
        weights = attended.softmax(-1)
        logits = self.head(weights * normed)
        return logits, [t.dtype for t in (embedded, image, mixed, normed, attended, weights, logits)]


def eager(model: Net) -> Any:
    return model


def compiled_model(model: Net) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def compiled_in_place(model: Net) -> Any:
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def compiled_function(model: Net) -> Any:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(*inputs: Tensor) -> Any:
        return model(*inputs)

    return call


@pytest.fixture(autouse=True)
def forget_compilations() -> Iterator[None]:
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    reset()
    counters.clear()
    yield
    reset()


def trained(way: Any, steps: int = 3) -> tuple[Net, list[float], list[torch.dtype]]:
    """Return a model after some steps, its losses, and the types seen in its forward pass."""
    model = Net()
    call = way(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        logits, types = call(IDS, PIXELS)
        assert logits.dtype is torch.float32
        loss = F.cross_entropy(logits, IDS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses, types


@pytest.mark.parametrize(
    ("level", "dtype"), [("O1", "float16"), ("O2", "float16"), ("O2", "bfloat16"), ("O3", "float16")]
)
def test_a_compiled_model_or_function_is_one_graph_and_computes_as_the_eager_one(level, dtype, at_level):
    from torch._dynamo.utils import counters

    with at_level(level, f"dtype={dtype}", "loss_scale.init=8"):
        _, losses, types = trained(eager)
        for way in (compiled_model, compiled_in_place, compiled_function):
            torch._dynamo.reset()
            counters.clear()
            model, compiled, compiled_types = trained(way)
            assert counters["stats"]["unique_graphs"] == 1, way.__name__
            assert not counters["graph_break"]
            assert compiled_types == types, way.__name__
            assert compiled == pytest.approx(losses, rel=2e-3 if dtype == "float16" else 2e-2), way.__name__
            expected = getattr(torch, dtype) if level == "O3" else torch.float32
            assert {p.dtype for p in model.parameters()} == {expected}


def whole_step(model: Net, optimizer: torch.optim.Optimizer) -> Any:
    @torch.compile(backend="aot_eager")
    def step(ids: Tensor, pixels: Tensor) -> tuple[Tensor, list[torch.dtype]]:
        logits, types = model(ids, pixels)
        loss = F.cross_entropy(logits, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, types

    return step


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_whole_compiled_step_has_the_types_of_the_level_and_only_the_breaks_of_torch(level, at_level):
    from torch._dynamo.utils import counters

    def run() -> tuple[list[float], list[torch.dtype], set[str]]:
        counters.clear()
        torch._dynamo.reset()
        model = Net()
        step = whole_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        results = [step(IDS, PIXELS) for _ in range(3)]
        # from a method that torch has marked, it inlines what is marked; from a function of ours, it calls it
        reasons = {
            reason.partition("\n")[0].replace("call f", "inline f") for reason in counters["graph_break"]
        }
        return [loss.item() for loss, _ in results], results[-1][1], reasons

    reference, _, breaks_of_torch = run()
    with at_level(level, "loss_scale.init=8"):
        _, _, types = trained(eager)
        losses, compiled_types, breaks = run()
    assert losses == pytest.approx(reference, rel=1e-2)
    assert losses[-1] < losses[0]
    assert compiled_types == types
    assert breaks <= breaks_of_torch


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_module_that_the_preset_names_is_float32_in_compiled_code_too(level, at_level):
    with at_level(level, "loss_scale.init=8", "fp32_modules=[LayerNorm, head]"):
        _, _, types = trained(eager)
        for way in (compiled_model, compiled_function):
            torch._dynamo.reset()
            assert trained(way)[2] == types, way.__name__
    assert types[3] is types[6] is torch.float32
    assert types[2] is torch.float16


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_region_that_the_script_refuses_is_float32_in_compiled_code_too(level, at_level):
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, list[torch.dtype]]:
            half = self.a(x)
            with torch.autocast("cpu", enabled=False):
                full = self.b(half.float())
            return full, [half.dtype, full.dtype]

    with at_level(level, "loss_scale.init=8"):
        for way in (eager, compiled_model, compiled_function):
            model = Careful()
            out, types = way(model)(torch.randn(2, 4))
            out.sum().backward()
            assert types == [torch.float16, torch.float32], way.__name__
            assert model.b.weight.grad is not None


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_compiled_inference_gives_float32_near_that_of_float32(level, at_level):
    model = Net().eval()
    with torch.no_grad():
        reference, _ = model(IDS, PIXELS)
    with at_level(level), torch.no_grad():
        out, _ = compiled_function(model)(IDS, PIXELS)
    assert out.dtype is torch.float32
    torch.testing.assert_close(out, reference, rtol=1e-2, atol=5e-3)


def test_a_session_that_ends_leaves_code_that_compiles_in_float32(at_level):
    model = Net()
    call = compiled_function(model)
    with at_level("O1"):
        assert call(IDS, PIXELS)[1][2] is torch.float16
    assert call(IDS, PIXELS)[1][2] is torch.float32
