"""Optimizers that the script leaves to torch update in its fused kernels: the same formula, rounded otherwise."""

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.engine.updates import Fused, farthest, give_gradients, outcome, parameters, snapshot

STEPS = 6
CASES = [
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"weight_decay": 0.1, "eps": 1e-4}),
    (torch.optim.Adam, {"maximize": True, "betas": (0.5, 0.9), "lr": 1}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"weight_decay": 0.5, "maximize": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.5, "dampening": 0.3, "maximize": True}),
]


def train(kind, settings, dtype=torch.float32):
    """Return the parameters after some steps with given gradients, and how many steps were fused."""
    trained = parameters(dtype)
    optimizer = kind(trained, **{"lr": 0.05} | settings)
    with Fused() as fused:
        for seed in range(STEPS):
            give_gradients(trained, seed)
            optimizer.step()
    return [parameter.detach() for parameter in trained], fused.calls


@pytest.mark.parametrize("level", ["O1", "O2", "O1-bf16"])
@pytest.mark.parametrize(
    ("kind", "settings"), CASES, ids=[f"{kind.__name__}-{'-'.join(s) or 'as it comes'}" for kind, s in CASES]
)
def test_a_fused_update_is_as_near_to_fp64_as_the_plain_one(kind, settings, level, at_level):
    """Both round each of a dozen operations; twice the plain error leaves room for those that round another way."""
    true, _ = train(kind, settings, torch.float64)
    plain, none = train(kind, settings)
    with at_level(level) as recorded:
        found, calls = train(kind, settings)
        assert recorded.substituted(f"fused-update:{kind.__name__}")
    assert (none, calls) == (0, STEPS - 1)  # torch begins the state itself
    ulp = torch.finfo(torch.float32).eps * max(one.abs().max().item() for one in true)
    assert farthest(found, true) <= 2 * farthest(plain, true) + ulp


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD], ids=lambda kind: kind.__name__)
def test_a_process_that_has_compiled_something_fuses_as_well(kind, at_level):
    """torch.compile wraps parts of every optimizer class, once."""
    torch.compile(torch.sin, backend="eager")(torch.ones(1))
    torch._dynamo.reset()
    with at_level("O1"):
        assert (
            train(kind, {"lr": 0.1} | ({"momentum": 0.9} if kind is torch.optim.SGD else {}))[1] == STEPS - 1
        )


def test_a_profiler_sees_the_step_of_the_optimizer(at_level):
    with at_level("O1"):
        trained = parameters()
        optimizer = torch.optim.Adam(trained)
        for seed in range(2):
            give_gradients(trained, seed)
            with torch.profiler.profile() as profiler:
                optimizer.step()
    assert any(event.key == "Optimizer.step#Adam.step" for event in profiler.key_averages())


def test_o0_fuses_where_it_is_asked_to(at_level):
    with at_level("O0", "optimizer.fuse=true"):
        assert train(torch.optim.Adam, {})[1] == STEPS - 1


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_without_it_updates_are_torchs_to_the_bit(level, at_level):
    settings = () if level == "O0" else ("optimizer.fuse=false",)
    for kind, options in CASES:
        plain, _ = train(kind, options)
        with at_level(level, *settings):
            found, calls = train(kind, options)
        assert not calls
        assert all(map(torch.equal, found, plain))


def test_o3_does_not_fuse_updates_of_half_weights(at_level):
    """torch 2.13 leaves half parameters as they are in its fused SGD."""
    with at_level("O3", "optimizer.fuse=true"):
        assert not train(torch.optim.SGD, {"momentum": 0.9})[1]


def test_the_script_finds_its_optimizer_and_gradients_as_they_were(at_level):
    trained = parameters()
    with at_level("O1"):
        optimizer = torch.optim.Adam(trained, lr=0.05)
        give_gradients(trained, 0)
        before = [parameter.grad.clone() for parameter in trained]
        optimizer.step()
    group = optimizer.param_groups[0]
    assert (group["fused"], group["foreach"], optimizer.defaults["fused"]) == (None, None, None)
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(trained, before, strict=True))
    state = optimizer.state_dict()["state"][0]
    assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
    assert {(value.dtype, value.device.type) for value in state.values()} == {(torch.float32, "cpu")}
    plain = torch.optim.Adam(parameters(), lr=0.05)
    plain.load_state_dict(optimizer.state_dict())
    give_gradients(plain.param_groups[0]["params"], 1)
    plain.step()
    assert plain.state_dict()["state"][0]["step"] == 2


def test_a_parameter_that_the_script_takes_out_is_freed(at_level):
    with at_level("O1"):
        trained = parameters()
        optimizer = torch.optim.Adam([{"params": trained[:2]}, {"params": trained[2:]}], lr=0.05)
        for step in range(3):
            give_gradients(trained, step)
            optimizer.step()
        gone = weakref.ref(trained[-1])
        for parameter in optimizer.param_groups.pop()["params"]:
            del optimizer.state[parameter]
        del trained[2:], parameter
        gc.collect()
        assert gone() is None


def test_an_optimizer_that_its_own_parameters_refer_to_is_freed(at_level):
    with at_level("O1"):
        trained = parameters()
        optimizer = torch.optim.Adam(trained, lr=0.05)
        trained[0].register_hook(lambda grad, held=optimizer: grad)
        for step in range(3):
            give_gradients(trained, step)
            optimizer.step()
        gone = weakref.ref(optimizer)
        del optimizer, trained
        gc.collect()
        assert gone() is None


def of_weight(weight, optimizer):
    return weight


def of_state(weight, optimizer):
    return optimizer.state[weight]["exp_avg"]


@pytest.mark.parametrize("of", [of_weight, of_state], ids=lambda of: of.__name__)
def test_a_backward_pass_over_numbers_that_have_moved_is_refused_as_by_torch(of, at_level):
    """Fused kernels of torch 2.13 forget to say what they wrote: the gradient would be wrong."""
    with at_level("O1"):
        weight, other = nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
        optimizer = torch.optim.Adam([weight], lr=0.1)
        weight.grad = torch.ones(3)
        optimizer.step()
        loss = (of(weight, optimizer) * other).sum()
        with Fused() as fused:
            optimizer.step()
        assert fused.calls == 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_step_is_left_to_the_compiler(at_level):
    def run():
        trained = parameters()
        optimizer = torch.optim.Adam(trained, lr=0.05)
        step = torch.compile(optimizer.step, backend="eager")
        for seed in range(3):
            give_gradients(trained, seed)
            step()
        return snapshot(trained)

    torch._dynamo.reset()
    plain = run()
    torch._dynamo.reset()
    with at_level("O1"):
        found = run()
    torch._dynamo.reset()
    rounding = torch.finfo(torch.float32).eps * max(one.abs().max().item() for one in plain)
    assert farthest(found, [one.double() for one in plain]) <= 4 * rounding


def test_a_script_whose_own_mixed_precision_is_kept_keeps_its_updates(at_level):
    def run():
        model = nn.Linear(3, 2)
        nn.init.constant_(model.weight, 0.5)
        nn.init.constant_(model.bias, 0.5)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.ones(4, 3)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return snapshot(model.parameters())

    plain, _ = outcome(run)
    with at_level("O1", "script_amp=keep"):
        found, calls = outcome(run)
    assert not calls
    assert all(map(torch.equal, found, plain))
