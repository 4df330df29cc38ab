"""A weight that changes during a call is used as it is then; one of many uses gets their whole gradient."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from mpx.engine.devices import DEVICES
from mpx.engine.reroutes import products

from .layers import Layer

HALVES = ["float16", "bfloat16"]
SEED = ["loss_scale=1024"]
USES = 4  # of a layer in one call: from the second on its cast would be kept


def written_in_place(weight):
    with torch.no_grad():
        weight.mul_(2)


def written_as_data(weight):
    weight.data.mul_(2)


def written_through_a_view(weight):
    weight.detach()[:].mul_(2)


def given_new_data(weight):
    weight.data = weight.detach() * 2


class WrittenAsHeldData:
    """Asks for the data once, and writes into it again and again."""

    def __init__(self):
        self.held = None

    def __call__(self, weight):
        self.held = weight.data if self.held is None else self.held
        self.held.mul_(2)


CHANGES = [written_in_place, written_as_data, written_through_a_view, given_new_data, WrittenAsHeldData]


class Doubles(nn.Module):
    """Returns what a layer makes of its input, again and again, with a weight that doubles each time."""

    def __init__(self, layer, change):
        super().__init__()
        self.layer, self.change = layer, change

    def forward(self, x):
        found = []
        for _ in range(USES):
            found.append(self.layer(x))
            self.change(self.layer.weight)
        return found


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [nn.Linear, Layer])
def test_a_weight_that_the_forward_doubles_gives_twice_the_result(kind, change, level, half, at_level):
    """Exactly: twice a half number is one."""
    with at_level(level, f"dtype={half}"):
        torch.manual_seed(0)
        model = Doubles(kind(4, 4, bias=False), change)
        for _ in range(2):
            model.change = change() if change is WrittenAsHeldData else change
            first, *others = model(torch.ones(2, 4))
            for number, found in enumerate(others, 1):
                assert torch.equal(found, 2**number * first)


class StepsInside(nn.Module):
    """Trains itself, three steps a call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.body.parameters(), lr=0.1)

    def forward(self, x):
        losses = []
        for _ in range(3):
            self.optimizer.zero_grad()
            loss = (self.body(x) - 1).square().mean()
            loss.backward()
            losses.append(loss.detach())
            self.optimizer.step()
        return torch.stack(losses)


class StepsByHand(StepsInside):
    """Does so without an optimizer, as scripts of old do, through tensors that it has held from the start."""

    def __init__(self):
        super().__init__()
        self.held = [p.data for p in self.body.parameters()]

    def forward(self, x):
        losses = []
        for _ in range(3):
            grads = torch.autograd.grad(
                loss := (self.body(x) - 1).square().mean(), list(self.body.parameters())
            )
            losses.append(loss.detach())
            for weight, grad in zip(self.held, grads, strict=True):
                weight.sub_(grad, alpha=0.1)
        return torch.stack(losses)


def losses_of_two_calls(kind):
    model = kind()
    x = torch.linspace(-1, 1, 32).view(4, 8)
    return torch.stack([model(x), model(x)]).flatten()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(("kind", "level"), [(StepsInside, "O1"), (StepsInside, "O2"), (StepsByHand, "O1")])
def test_a_step_inside_a_call_is_in_the_next_loss(kind, level, half, at_level):
    plain = losses_of_two_calls(kind)
    assert plain[2] < 0.9 * plain[0]  # old weights would show
    with at_level(level, f"dtype={half}", *(SEED if half == "float16" else [])):
        found = losses_of_two_calls(kind)
    # a bfloat16 number has 8 bits: outputs near 1 are off by up to 2**-8, and these losses by twice that
    torch.testing.assert_close(found, plain, rtol=0.03, atol=0.0 if half == "float16" else 2**-7)


class Loop(nn.Module):
    """Returns the mean of what a layer makes of its input each time."""

    def __init__(self, layer, uses):
        super().__init__()
        self.layer, self.uses = layer, uses

    def forward(self, x):
        return sum(self.layer(x).float().sum() for _ in range(self.uses)) / self.uses


@pytest.mark.parametrize("half", HALVES)
def test_the_gradient_of_a_weight_of_a_thousand_uses_is_added_up_in_float32(half, at_level):
    """The gradient of the bias is 4, the number of rows. In half such a sum stands still once a part is lost in it."""
    with at_level("O1", f"dtype={half}", *(SEED if half == "float16" else [])):
        model = Loop(nn.Linear(8, 8), uses=1000)
        model(torch.ones(4, 8)).backward()
        bias, weight = model.layer.bias.grad, model.layer.weight.grad
    # each part is 4 / 1000 rounded to half, all are rounded alike, and 16 of them are added in half
    tolerance = 2**-6 if half == "bfloat16" else 2**-8
    torch.testing.assert_close(bias, torch.full_like(bias, 4.0), rtol=tolerance, atol=0.0)
    torch.testing.assert_close(weight, torch.full_like(weight, 4.0), rtol=tolerance, atol=0.0)


@pytest.fixture(params=["torch's", "ours"])
def kernels(request, monkeypatch):
    """Say whose kernels cast a weight: on a CPU without half instructions they are ours."""
    capable = (
        frozenset({"avx2"}) if request.param == "ours" else frozenset({"avx2", "avx512_fp16", "avx512_bw"})
    )
    monkeypatch.setattr(products, "FEW", 0)
    monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], capabilities=lambda: capable))


def copies_of_a_weight(layer, uses, x):
    """Return how many tensors of the shape of the layer's weight the backward pass keeps."""
    kept = set()

    def pack(tensor):
        if layer.weight.shape in {tensor.shape, tensor.t().shape} and tensor.dtype != torch.float32:
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = Loop(layer, uses)(x)
    loss.backward()
    return len(kept)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.usefixtures("kernels")
def test_a_layer_of_many_uses_keeps_few_copies_of_its_weight(half, at_level):
    """One of the first use, which cannot know of others, and one for each 16 of the others: 6 of 81, 2 of 2."""
    with at_level("O1", f"dtype={half}", *(SEED if half == "float16" else [])):
        x = torch.ones(3, 24, requires_grad=True)
        assert copies_of_a_weight(nn.Linear(24, 40), uses=81, x=x) == 6
        assert copies_of_a_weight(nn.Linear(24, 40), uses=2, x=x) == 2


def test_layers_whose_weights_a_call_uses_once_keep_nothing(at_level):
    with at_level("O1", "dtype=bfloat16"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        torch.set_autocast_cache_enabled(True)
        seen = []
        model[1].register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_cache_enabled()))
        model(torch.ones(2, 4))
        assert seen == [False]


class UsesItselfOtherwise(nn.Module):
    """Uses a layer in a graph before and after it has used it in some other way."""

    def __init__(self, otherwise):
        super().__init__()
        self.layer, self.otherwise = nn.Linear(4, 4), otherwise

    def forward(self, x):
        before = self.layer(x)
        self.otherwise(self.layer, x)
        return before + self.layer(x) + self.layer(x)


def without_a_graph(layer, x):
    with torch.no_grad():
        layer(x)


def for_inference(layer, x):
    with torch.inference_mode():
        layer(x)


def in_a_transform(layer, x):
    torch.func.grad(lambda x: layer(x).float().sum())(x)


def mapped(layer, x):
    torch.func.vmap(layer)(x)


@pytest.mark.parametrize("otherwise", [without_a_graph, for_inference, in_a_transform, mapped])
@pytest.mark.usefixtures("kernels")
def test_a_use_without_this_graph_leaves_nothing_to_the_next(otherwise, at_level):
    with at_level("O1", "dtype=bfloat16"):
        model = UsesItselfOtherwise(otherwise)
        model(torch.ones(2, 4)).sum().backward()
    assert model.layer.weight.grad.eq(6).all()  # two rows, three uses
    assert model.layer.bias.grad.eq(6).all()


def test_a_thread_finds_its_own_write_while_another_keeps_a_cast(at_level):
    """torch has one table of casts for all threads."""

    class Waits(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            found = [self.layer(x) for _ in range(3)]
            entered.set()
            assert written.wait(60)
            return found

    with at_level("O1", "dtype=bfloat16"):
        layer, x = nn.Linear(4, 4, bias=False), torch.ones(2, 4)
        entered, written = threading.Event(), threading.Event()
        other = threading.Thread(target=Waits(layer), args=(x,))
        other.start()
        assert entered.wait(60)
        with torch.no_grad():
            layer.weight.fill_(1)
        found = Loop(layer, uses=4)(x)
        written.set()
        other.join()
    assert found == 4 * 2 * 4  # of numbers that a row, a column and an output have
