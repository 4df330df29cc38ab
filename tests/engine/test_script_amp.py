"""Scripts with mixed precision of their own: taken over, they compute what the level says."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

LEVELS = ("O0", "O1", "O2", "O3")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 8, generator=generator), torch.randint(4, (6,), generator=generator)


class Tutorial:
    """The loop of torch's own AMP examples, with clipping and a look at the scale to learn of skipped steps."""

    def __init__(self, *, enabled=True, dtype=torch.float16, factor=1.0, init_scale=2.0**16):
        self.enabled, self.dtype, self.factor = enabled, dtype, factor
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=init_scale)
        self.losses, self.norms, self.skipped, self.scales = [], [], [], []

    def train(self, steps):
        for step in steps:
            x, y = batch(step)
            self.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=self.dtype, enabled=self.enabled):
                loss = F.cross_entropy(self.model(x), y) * self.factor
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            self.norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)))
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scales.append(self.scaler.get_scale())
            self.skipped.append(self.scales[-1] < before)
            self.losses.append(loss.item())
        return self

    def weights(self):
        return [parameter.detach() for parameter in self.model.parameters()]


class Plain(Tutorial):
    """The same script without a word of AMP."""

    def train(self, steps):
        for step in steps:
            x, y = batch(step)
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y) * self.factor
            loss.backward()
            self.norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)))
            self.optimizer.step()
            self.losses.append(loss.item())
        return self


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_taken_over_it_is_the_script_without_amp_at_that_level(at_level, level, dtype):
    with at_level(level):
        expected = Plain().train(range(8))
    with at_level(level) as recorded:
        found = Tutorial(dtype=dtype).train(range(8))
        assert recorded.substituted("script-autocast")
        assert recorded.substituted("script-gradscaler")
        assert recorded.summary["saw_script_amp"]
    if level != "O3":  # where a loss inside the script's region is computed in half
        assert found.losses == expected.losses
        assert same(found.weights(), expected.weights())
    assert found.losses == pytest.approx(expected.losses, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_level_1_computes_what_the_rewritten_script_computes(at_level, dtype):
    """Skipped steps included: the loss is loud. Both lists treat these operations alike, updates too."""
    half = str(dtype).removeprefix("torch.")
    rewritten = Tutorial(dtype=dtype, factor=30.0)
    if dtype is torch.bfloat16:
        rewritten.scaler = torch.amp.GradScaler("cpu", enabled=False)
    rewritten.train(range(10))
    assert any(rewritten.skipped) == (dtype is torch.float16)
    with at_level("O1", f"dtype={half}", "optimizer.fuse=false"):
        ours = Plain(factor=30.0).train(range(10))
    assert ours.losses == rewritten.losses
    assert same(ours.weights(), rewritten.weights())


def test_level_0_is_plain_python_with_the_scripts_amp_off(at_level):
    expected = Tutorial(enabled=False).train(range(8))
    with at_level("O0"):
        found = Tutorial().train(range(8))
    assert found.losses == expected.losses
    assert found.norms == expected.norms
    assert same(found.weights(), expected.weights())
    assert found.scales == [1.0] * 8


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_script_that_watches_its_scale_sees_every_skipped_step(at_level, level):
    with at_level(level) as recorded:
        script = Tutorial(factor=30.0).train(range(8))
        steps, (scaler,) = recorded.summary["steps"], recorded.summary["scalers"]
    assert 0 < sum(script.skipped) == steps["skipped"] < 8
    assert script.skipped[0]
    assert script.scales[-1] == scaler["final"]
    # true, never scaled
    assert all(skipped or norm < 100 for skipped, norm in zip(script.skipped, script.norms, strict=True))


def test_one_scaler_for_two_losses_falls_when_either_overflows(at_level):
    with at_level("O1", "loss_scale.init=1024"):
        scaler = torch.amp.GradScaler("cpu")
        one, two = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        one.register_hook(lambda grad: grad * torch.inf)
        scaler.scale(one.exp().sum()).backward()
        scaler.scale(two.sum()).backward()
        assert scaler.get_scale() == 1024.0
        scaler.update()
        assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_scalers_state_goes_to_plain_torch_and_comes_back(at_level, level):
    with at_level(level, "loss_scale.growth_interval=3"):
        script = Tutorial().train(range(5))
        state = script.scaler.state_dict()
        assert state["scale"] == script.scales[-1] == 2.0**17
        assert state["_growth_tracker"] == 2
    plain = torch.amp.GradScaler("cpu")
    plain.load_state_dict(state)
    assert plain.get_scale() == 2.0**17
    theirs = plain.state_dict()
    with at_level(level, "loss_scale.growth_interval=3") as recorded:
        again = Tutorial()
        again.scaler.load_state_dict(theirs)
        assert again.scaler.get_scale() == 2.0**17
        again.train(range(1))
        assert recorded.summary["scalers"][0]["init"] == 2.0**17
        assert again.scales == [2.0**18]  # the third clean step in a row
        again.scaler.update(new_scale=64.0)
        again.train(range(1, 2))
        assert again.scales[-1] == 64.0


@pytest.mark.parametrize("level", LEVELS)
def test_a_script_that_never_uses_its_amp_is_computed_at_the_level(at_level, level):
    """Its region is a flag that is off: it does as little as without us."""
    with at_level(level):
        expected = Plain().train(range(3))
    with at_level(level) as recorded:
        found = Tutorial(enabled=False).train(range(3))
        assert not recorded.summary["saw_script_amp"]
        assert recorded.substituted("script-autocast-off") == (level != "O0")
        assert recorded.summary["steps"]["applied"] == 3
    assert found.losses == expected.losses
    assert found.scales == [1.0] * 3
    assert found.scaler.state_dict() == {}
    found.scaler.load_state_dict({})


def test_the_scaler_of_fsdp_is_taken_over_as_well(at_level):
    """It scales by a method of its own; imported late, and without an accelerator never used by torch itself."""
    with at_level("O1", "loss_scale=1024"):
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        scaler = ShardedGradScaler.__new__(ShardedGradScaler)
        torch.amp.GradScaler.__init__(scaler, "cpu")
        loss = torch.ones((), requires_grad=True).exp()
        assert scaler.scale(loss) is loss
        optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
        scaler.unscale_(optimizer)
        scaler.update()
        assert scaler.get_scale() == 1024.0
