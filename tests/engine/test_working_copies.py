"""O2: inside a call a module works on half copies; everywhere else a script finds the FP32 parameters that it made."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .layers import Layer

HALF = torch.float16


class Spy(nn.Linear):
    """A linear layer that notes the type of its weight in each call."""

    def __init__(self, *shape: int) -> None:
        super().__init__(*shape)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.weight.dtype)
        return super().forward(x)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Spy(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.LayerNorm(8), Spy(8, 4))


def batch(seed: int = 1) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, x: Tensor | None = None, optimizer: torch.optim.Optimizer | None = None) -> float:
    loss = model(batch() if x is None else x).square().mean()
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def types(model: nn.Module) -> set[torch.dtype]:
    return {p.dtype for p in model.parameters()}


def near(value: Tensor, exact: Tensor) -> bool:
    """Whether a half computation gave this, from one of FP32."""
    return torch.allclose(value, exact, rtol=5e-3, atol=5e-3)


@pytest.fixture
def level_2(at_level):
    """Return a context manager for O2 with a scale that nothing here overflows at."""
    return lambda *settings: at_level("O2", "loss_scale.init=64", *settings)


# ------------------------------------------------------------------ what the script sees


def test_inside_a_call_weights_are_half_and_outside_they_are_the_script_s_own(level_2):
    with level_2():
        model = network()
        own = list(model.parameters())
        optimizer = torch.optim.AdamW(own)
        for _ in range(3):
            step(model, optimizer=optimizer)
            assert all(now is then for now, then in zip(model.parameters(), own, strict=True))
            assert types(model) == {torch.float32}
        assert model[0].seen == model[4].seen == [HALF] * 3
        assert {v.dtype for s in optimizer.state.values() for v in s.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("kind", "shape", "result"),
    [
        (nn.Linear, (8, 8), HALF),
        (nn.Conv1d, (6, 6, 1), HALF),
        (nn.LSTMCell, (8, 8), torch.float32),  # as its state
        (nn.GRUCell, (8, 8), torch.float32),
    ],
)
def test_the_ops_of_torch_s_layers_cast_weights_themselves(kind, shape, result, level_2):
    """A copy in their places would cost time, and nobody looks at it: the layer computes in half all the same."""
    with level_2():
        seen: list[object] = []

        class Reads(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = kind(*shape)

            def forward(self, x: Tensor) -> Tensor:
                out = self.layer(x)
                out = out[0] if isinstance(out, tuple) else out
                seen.extend([next(iter(self.layer.parameters())), out.dtype])
                return out

        model = Reads()
        step(model)
        assert seen[0] is next(iter(model.parameters()))
        assert seen[1] is result
        assert types(model) == {torch.float32}


def test_a_weight_that_a_layer_shares_with_an_embedding_has_one_copy(level_2):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(37, 41), nn.Linear(41, 37, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x: Tensor) -> Tensor:
            found = self.head(self.words(x))
            assert self.head.weight is self.words.weight
            assert self.head.weight.dtype is HALF
            assert copies_alive() == 1
            return found

    with level_2():
        model = Tied()
        step(model, torch.arange(5))
        assert model.head.weight is model.words.weight
        assert model.words.weight.grad.dtype is torch.float32


def test_where_no_op_casts_weights_all_layers_hold_copies(level_2):
    with level_2("ops.half=[]"):
        model, seen = nn.Sequential(nn.Linear(8, 8)), []
        model[0].register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))
        step(model)
    assert seen == [HALF]


def test_batchnorm_stays_float32_and_layer_norm_does_not(level_2):
    seen = {}

    def note(module: nn.Module, _: object) -> None:
        seen[type(module).__name__] = module.weight.dtype

    with level_2():
        model = network()
        for layer in (model[1], model[3]):
            layer.register_forward_pre_hook(note)
        model(batch())
    assert seen == {"BatchNorm1d": torch.float32, "LayerNorm": HALF}


def test_keep_batchnorm_fp32_can_be_turned_off(level_2):
    with level_2("keep_batchnorm_fp32=false"):
        model = nn.Sequential(nn.BatchNorm1d(8), Layer(8, 8), nn.BatchNorm1d(8))
        model[2].register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))
        seen: list[torch.dtype] = []
        before = model[2].running_mean.clone()
        step(model)
        assert seen == [HALF]
        assert model[2].running_mean.dtype is torch.float32
        assert not torch.equal(model[2].running_mean, before)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_and_losses_are_those_of_float32_within_the_half_type_s_rounding(dtype, level_2):
    reference = network()
    loss = step(reference)
    with level_2(f"dtype={dtype}"):
        model = network()
        rel = 3e-3 if dtype == "float16" else 3e-2
        assert step(model) == pytest.approx(loss, rel=rel)
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    mine, theirs = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (model, reference))
    assert float((mine - theirs).norm()) <= rel * float(theirs.norm())


def test_gradients_of_several_calls_add_up_in_float32(level_2):
    """A hundred equal gradients of 1 + 2**-10: a sum in float16 rounds above 2048 * 2**-10 and each is lost."""
    with level_2("loss_scale=1"):
        model = Layer(1, 1, bias=False)
        outputs = [model(torch.full((1, 1), 1 + 2.0**-10)) for _ in range(100)]
        torch.stack(outputs).sum().backward()
    assert model.weight.grad.item() == 100 * (1 + 2.0**-10)


# ------------------------------------------------------------------ edits between calls


EDITS = {
    "in place": lambda p: p.mul_(2),
    "copy_": lambda p: p.copy_(p * 2),
    ".data in place": lambda p: p.data.mul_(2),
    ".data copied to": lambda p: p.data.copy_(p * 2),
    ".data assigned": lambda p: setattr(p, "data", p.data * 2),
    "through numpy": lambda p: p.detach().numpy().__imul__(2),
}


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_a_call_uses_the_weights_as_they_are_then_however_they_were_edited(edit, grad, level_2):
    with level_2(), torch.set_grad_enabled(grad):
        model = Layer(8, 4, bias=False)
        before = model(batch())
        with torch.no_grad():
            edit(model.weight)
        assert near(model(batch()), 2 * before)


def test_evolution_strategies_see_their_noise(level_2):
    """No backward pass and no optimizer step ever tells that the weights have changed."""
    with level_2():
        model = Layer(8, 1)
        results = []
        for _ in range(3):
            noise = torch.randn(8)
            model.weight.data.add_(noise)
            results.append(model(batch()).sum().item())
            model.weight.data.sub_(noise)
    assert len(set(results)) == 3


def test_a_target_network_follows_its_moving_average(level_2):
    with level_2():
        model, target = network(), network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            step(model, optimizer=optimizer)
            for t, p in zip(target.parameters(), model.parameters(), strict=True):
                t.data.copy_(0.999 * t.data + 0.001 * p.data)
            found = target(batch())
        moved = [t - p for t, p in zip(target.parameters(), network().parameters(), strict=True)]
        assert all(m.abs().max() > 0 for m in moved if m.numel() > 8)
        target.eval()
    assert found.dtype is torch.float32


def test_weights_that_are_clamped_after_the_step_stay_clamped(level_2):
    with level_2():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(3):
            step(model, optimizer=optimizer)
            for p in model.parameters():
                p.data.clamp_(-0.01, 0.01)
        step(model)
        assert max(p.abs().max().item() for p in model.parameters()) <= torch.tensor(0.01)


# ------------------------------------------------------------------ copies of the model


def test_a_deepcopy_between_forward_and_backward_is_float32_and_on_its_own(level_2):
    with level_2():
        model = network()
        loss = model(batch()).square().mean()
        twin = copy.deepcopy(model)
        loss.backward()
        assert types(twin) == {torch.float32}
        assert all(p.grad is None for p in twin.parameters())
        step(twin)
        assert twin[0].weight.grad is not None
        assert twin[0].weight is not model[0].weight


def test_pickles_and_state_dicts_have_plain_float32_parameters(level_2):
    with level_2():
        model = network()
        step(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        model(batch())
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        pickled = pickle.dumps(model)
    file.seek(0)
    for state in (torch.load(file), pickle.loads(pickled).state_dict()):
        assert list(state) == list(network().state_dict())
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
        assert {v.dtype for v in state.values()} == {torch.float32, torch.int64}


def test_a_checkpoint_loaded_between_calls_is_what_the_next_call_uses(level_2):
    with level_2():
        model = network()
        first = model(batch())
        state = {name: value.clone() for name, value in model.state_dict().items()}
        step(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
        assert not near(model(batch()), first)
        model.load_state_dict(state)
        assert near(model(batch()), first)


# ------------------------------------------------------------------ memory


def copies_alive() -> int:
    gc.collect()
    return sum(
        1
        for thing in gc.get_objects()
        if type(thing) is Tensor and thing.dtype is HALF and thing.shape == (37, 41)
    )


def test_copies_that_nothing_will_look_at_again_end_with_their_call(level_2):
    with level_2():
        model = nn.Sequential(Layer(41, 37), nn.Tanh())
        loss = model(torch.randn(2, 41)).sum()
        assert copies_alive() == 0
        loss.backward()


class Recomputes(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def test_copies_live_no_longer_than_their_iteration(level_2):
    with level_2():
        model = Recomputes(Layer(41, 37), nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(2, 41)
        loss = model(x).sum()
        assert copies_alive() == 1
        loss.backward()
        del loss
        assert copies_alive() == 0
        model(x)
        optimizer.step()
        assert copies_alive() == 0
        with torch.no_grad():
            model(x)
        assert copies_alive() == 0


def test_calls_without_a_backward_pass_do_not_pile_up_copies(level_2):
    with level_2():
        model = Recomputes(Layer(41, 37))
        for _ in range(5):
            model(torch.randn(2, 41))
        assert copies_alive() == 1


def test_a_model_that_the_script_forgets_is_freed(level_2):
    with level_2():
        model = network()
        model(batch())
        model.eval()(batch())
        gone = [weakref.ref(p) for p in model.parameters()] + [weakref.ref(model)]
        del model
        gc.collect()
        assert [reference() for reference in gone] == [None] * len(gone)


def test_gradients_arrive_layer_by_layer_as_in_plain_training(level_2):
    """Not all at the end: half gradients would gather until then, and a data-parallel reducer would wait."""

    class Deep(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self):
                x = layer(x)
                x.register_hook(lambda _, number=number: seen.append(f"activation {number}"))
            return x

    seen: list[str] = []

    def arrivals() -> list[str]:
        seen.clear()
        model = Deep(*(Layer(8, 8) for _ in range(4)))
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
        step(model)
        return [one.partition(".")[0] for one in seen]  # weight and bias in any order

    plain = arrivals()
    with level_2():
        assert arrivals() == plain
