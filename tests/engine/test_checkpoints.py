"""The scaler travels in the optimizer's `state_dict`: back in place it goes on as if nothing had happened."""

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

LEVELS = ("O1", "O2")
MOVING = (
    "loss_scale.init=2**18",
    "loss_scale.growth_interval=3",
)  # falls first, and then grows every third pass


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


class Script:
    """A training script with a checkpoint, in the usual way."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def train(self, steps):
        losses = []
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(6, 8, generator=generator), torch.randint(4, (6,), generator=generator)
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def save(self):
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        file.seek(0)
        return file

    def load(self, file):
        state = torch.load(file, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def tensors(self):
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.model.state_dict().values(), *moments]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_resumed_run_is_the_uninterrupted_one(at_level, level):
    with at_level(level, *MOVING) as recorded:
        script = Script()
        script.train(range(7))
        file = script.save()
        expected = script.train(range(7, 20))
        (scaler,) = recorded.summary["scalers"]
    assert scaler["backoffs"] > 0
    assert scaler["growths"] > 1
    with at_level(level, *MOVING) as recorded:
        resumed = Script()
        resumed.load(file)
        assert resumed.train(range(7, 20)) == expected
        (again,) = recorded.summary["scalers"]
    assert same(resumed.tensors(), script.tensors())
    assert again["final"] == scaler["final"]
    assert [point for point in again["history"] if point[0]] == [
        [backward - 7, scale] for backward, scale in scaler["history"] if backward > 7
    ]


def test_plain_torch_loads_it_and_goes_on(at_level, level):
    with at_level(level):
        script = Script()
        script.train(range(3))
        file = script.save()
    plain = Script()
    plain.load(file)
    assert same(plain.tensors(), script.tensors())
    assert all(tensor.dtype in {torch.float32, torch.int64} for tensor in plain.tensors())
    assert "mpx" not in plain.optimizer.state_dict()
    plain.train(range(3, 5))


def test_a_plain_checkpoint_is_loaded(at_level, level):
    plain = Script()
    plain.train(range(3))
    file = plain.save()
    with at_level(level) as recorded:
        script = Script()
        script.load(file)
        assert same(plain.tensors(), script.tensors())
        script.train(range(3, 5))
        assert recorded.summary["scalers"][0]["init"] == 2.0**16


@pytest.mark.parametrize("settings", [("O0",), ("O1", "dtype=bfloat16"), ("O3",)], ids=str)
def test_without_a_loss_scale_a_checkpoint_is_plain(at_level, settings):
    with at_level(*settings):
        script = Script()
        script.train(range(2))
        assert set(script.optimizer.state_dict()) == {"state", "param_groups"}


def backward_here(loss):
    loss.backward()


def backward_there(loss):
    loss.backward()


def differentiate(*functions, times=1):
    """Run passes of losses that are computed differently, so that none takes the scale of another."""
    shapes = [torch.exp, torch.sin, torch.tanh]
    leaf = torch.zeros((), requires_grad=True)
    for function, shape in zip(functions, shapes, strict=False):
        for _ in range(times):
            function(shape(leaf))


def scales(optimizer):
    return [state["scale"] for state in optimizer.state_dict()["mpx"]["loss_scales"].values()]


def test_each_call_site_gets_its_own_scale_back(at_level):
    settings = ("loss_scale.init=1024", "loss_scale.growth_interval=1")
    with at_level("O1", *settings):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        differentiate(backward_here, backward_there)
        differentiate(backward_here)
        state = optimizer.state_dict()
        assert scales(optimizer) == [4096.0, 2048.0]
    with at_level("O1", *settings) as recorded:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        optimizer.load_state_dict(state)
        assert scales(optimizer) == [4096.0, 2048.0]  # also of sites that have not run yet
        differentiate(backward_there, backward_here)
        found = {scaler["site"]: scaler["init"] for scaler in recorded.summary["scalers"]}
        assert list(found.values()) == [2048.0, 4096.0]
        optimizer.load_state_dict(state)  # a script may also go back, after a spike
        assert scales(optimizer) == [2048.0, 4096.0]


def test_the_scale_of_a_script_that_was_edited_is_not_lost(at_level):
    with at_level("O1", "loss_scale.growth_interval=1"):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        differentiate(backward_here, times=3)
        state = optimizer.state_dict()
    with at_level("O1", "loss_scale.growth_interval=1") as recorded:
        torch.optim.SGD([torch.zeros(1)], lr=0.1).load_state_dict(state)
        differentiate(backward_there)  # the same loss, on another line
        (scaler,) = recorded.summary["scalers"]
        assert scaler["init"] == 2.0**19


def test_a_scale_outside_the_bounds_of_this_run_is_brought_inside(at_level):
    with at_level("O1", "loss_scale.init=2**20"):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        differentiate(backward_here)
        state = optimizer.state_dict()
    with at_level("O1", "loss_scale.max=2**17") as recorded:
        torch.optim.SGD([torch.zeros(1)], lr=0.1).load_state_dict(state)
        differentiate(backward_here)
        assert recorded.summary["scalers"][0]["init"] == 2.0**17
