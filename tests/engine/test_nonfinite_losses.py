"""A loss that is not finite is no overflow of the scale: it is told apart, with where it began, and mended."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpx.errors import MpxError

LEVELS = ("O1", "O2")
SCALE = "loss_scale.init=1024"


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


class Hot(nn.Module):
    """Holds numbers of 1e5 in its middle, which FP32 can and FP16 cannot."""

    def __init__(self, *, temperature=1e5):
        super().__init__()
        torch.manual_seed(0)
        self.front = nn.Linear(8, 8)
        self.hot = nn.Linear(8, 8)
        self.back = nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(8)
        with torch.no_grad():
            self.hot.bias += temperature

    def forward(self, x):
        return self.back(self.norm(self.hot(self.front(x))))


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 8, generator=generator), torch.randint(4, (6,), generator=generator)


def train(model, steps, *, first=0, at=lambda step, loss: loss):
    """Train and return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(first, steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = at(step, F.cross_entropy(model(x), y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def nan_at(*steps):
    return lambda step, loss: loss * torch.nan if step in steps else loss


def finite(model):
    return all(bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values())


def kinds(recorded):
    return [event["kind"] for event in recorded.of("overflow")]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_scale_stays_and_the_step_is_skipped(at_level, level, value):
    with at_level(level, SCALE) as recorded:
        model = Hot(temperature=0)
        train(model, 4, at=lambda step, loss: loss * value if step == 1 else loss)
        (scaler,) = recorded.summary["scalers"]
        assert (scaler["final"], scaler["overflows"]) == (1024.0, 0)
        assert recorded.summary["steps"] == {"attempted": 4, "applied": 3, "skipped": 1}
        assert recorded.summary["overflow_counts"] == {"loss_nan": 1, "forward_inf": 0, "backward_inf": 0}
        assert recorded.summary["nonfinite_losses"] == 1
        (event,) = recorded.of("overflow")
        assert (event["kind"], event["backward"], event["step"], event["module"]) == ("loss_nan", 2, 1, None)
        assert finite(model)


def test_nan_in_the_data_is_blamed_on_no_module(at_level, level):
    class Quiet(Hot):
        def forward(self, x, noise=None):
            return super().forward(x if noise is None else x + noise)

    with at_level(level, SCALE) as recorded:
        model = Quiet(temperature=0).eval()  # with its running statistics, so that only one row is NaN
        for step in range(4):
            x, y = batch(step)
            x[0, 0] = torch.nan
            out = model(x) if step < 2 else model(x=x)
            F.cross_entropy(out, y).backward()
        assert kinds(recorded) == ["loss_nan"] * 4
        assert recorded.substituted("forward:hot") is False


def test_a_model_whose_weights_are_nan_has_not_overflowed(at_level, level):
    with at_level(level, SCALE) as recorded:
        model = Hot(temperature=0)
        with torch.no_grad():
            model.hot.weight[0, 0] = torch.nan
        train(model, 4)
        assert kinds(recorded) == ["loss_nan"] * 4


@pytest.mark.parametrize("mode", ["auto", "never"])
def test_bfloat16_counts_and_does_not_skip(at_level, level, mode):
    with at_level(level, "dtype=bfloat16", f"skip_nonfinite={mode}") as recorded:
        model = Hot(temperature=0)
        train(model, 3, at=nan_at(1))
        assert recorded.summary["steps"] == {"attempted": 3, "applied": 3, "skipped": 0}
        assert kinds(recorded) == ["loss_nan", "loss_nan"]
        assert not finite(model)  # as in plain python


def test_bfloat16_counts_gradients_that_are_not_finite(at_level, level):
    with at_level(level, "dtype=bfloat16") as recorded:
        model = Hot(temperature=0)
        model.hot.weight.register_hook(lambda grad: grad * torch.inf)
        train(model, 1)
        assert recorded.summary["steps"]["skipped"] == 0
        assert recorded.summary["overflow_counts"]["backward_inf"] == 1
        assert recorded.summary["scalers"] == []
        assert model.hot.weight.isinf().any() or model.hot.weight.isnan().any()


def test_bfloat16_skips_when_it_is_asked_to(at_level, level):
    with at_level(level, "dtype=bfloat16", "skip_nonfinite=always") as recorded:
        model = Hot(temperature=0)
        train(model, 3, at=nan_at(1))
        assert recorded.summary["steps"] == {"attempted": 3, "applied": 2, "skipped": 1}
        assert finite(model)


def test_float16_skips_nothing_when_it_is_asked_not_to(at_level, level):
    with at_level(level, SCALE, "skip_nonfinite=never") as recorded:
        model = Hot(temperature=0)
        train(model, 2, at=nan_at(0))
        assert recorded.summary["steps"]["skipped"] == 0
        assert not finite(model)


def test_level_0_counts_and_changes_nothing(at_level):
    def run():
        model = Hot(temperature=0)
        train(model, 3, at=nan_at(2))
        return model.state_dict()

    plain = run()
    with at_level("O0") as recorded:
        ours = run()
        assert recorded.summary["nonfinite_losses"] == 1
        assert kinds(recorded) == ["loss_nan"]
        assert recorded.summary["steps"] == {"attempted": 3, "applied": 3, "skipped": 0}
    assert all(
        torch.equal(
            ours[name],
            plain[name],
        )
        or plain[name].isnan().any()
        for name in plain
    )


def test_a_module_that_leaves_the_range_is_named_and_then_computes_in_float32(at_level, level, capsys):
    """The first pass finds out that something is wrong, the next three that it is this module each time."""
    expected = train(Hot(), 8, first=4)
    with at_level(level, SCALE, "forward_overflow.float32_after=3") as recorded:
        model = Hot()
        losses = train(model, 8)
        events = recorded.of("overflow")
        assert [event["kind"] for event in events] == ["loss_nan"] + ["forward_inf"] * 3
        assert [event["module"] for event in events] == [None] + ["hot"] * 3
        assert [math.isfinite(loss) for loss in losses] == [False] * 4 + [True] * 4
        assert recorded.summary["steps"] == {"attempted": 8, "applied": 4, "skipped": 4}
        assert recorded.substituted("forward:hot")
        assert recorded.summary["scalers"][0]["overflows"] == 0
    assert capsys.readouterr().err.count("`hot` computes in FP32") == 1
    assert losses[4:] == pytest.approx(expected, rel=0.01)


def test_it_is_left_alone_when_the_preset_says_so(at_level, level):
    with at_level(level, SCALE, "forward_overflow.float32_after=0") as recorded:
        train(Hot(), 8)
        assert kinds(recorded) == ["loss_nan"] + ["forward_inf"] * 7
        assert not recorded.substituted("forward:hot")


class Alone(nn.Module):
    """An outermost module that overflows by itself, in none of its parts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        return (self.layer(x) * 1e5) / 1e5


def test_a_model_that_overflows_by_itself_computes_in_float32_as_a_whole(at_level, level):
    expected = train(Alone(), 6, first=3)
    with at_level(level, SCALE, "forward_overflow.float32_after=2") as recorded:
        losses = train(Alone(), 6)
        assert kinds(recorded) == ["loss_nan"] + ["forward_inf"] * 2
        assert losses[3:] == pytest.approx(expected, rel=0.01)


def test_a_discriminator_that_is_fine_does_not_hide_a_generator_that_overflows(at_level, level):
    generator, critic = Hot(), Hot(temperature=0)
    optimizer = torch.optim.SGD(generator.parameters(), lr=0.01)
    with at_level(level, SCALE, "forward_overflow.float32_after=2") as recorded:
        for step in range(6):
            x, y = batch(step)
            F.cross_entropy(critic(x), y).backward()
            optimizer.zero_grad()
            F.cross_entropy(generator(x), y).backward()
            optimizer.step()
        assert kinds(recorded) == ["loss_nan", "forward_inf", "forward_inf"]


def test_two_losses_of_one_forward_pass_are_judged_alike(at_level, level):
    with at_level(level, SCALE, "forward_overflow.float32_after=0") as recorded:
        model = Hot()
        for step in range(2):
            x, y = batch(step)
            out = model(x)
            F.cross_entropy(out, y).backward(retain_graph=True)
            out.sum().backward()
        assert kinds(recorded) == ["loss_nan", "loss_nan", "forward_inf", "forward_inf"]


def test_running_statistics_are_put_back_after_an_overflowed_forward_pass(at_level, level):
    with at_level(level, SCALE) as recorded:
        model = Hot(temperature=0)
        train(model, 2)
        before = {name: value.clone() for name, value in model.norm.named_buffers()}
        with torch.no_grad():
            model.hot.bias += 1e5
        train(model, 1)
        assert all(torch.equal(value, before[name]) for name, value in model.norm.named_buffers())
        assert recorded.substituted("statistics:norm")
        with torch.no_grad():
            model.hot.bias -= 1e5
        train(model, 1)
        assert int(model.norm.num_batches_tracked) == 3


def test_statistics_of_a_generator_survive_the_clean_pass_of_its_critic(at_level, level):
    generator, critic = Hot(), Hot(temperature=0)
    with at_level(level, SCALE):
        x, y = batch()
        fake = generator(x)
        F.cross_entropy(critic(x), y).backward()
        F.cross_entropy(fake, y).backward()
    assert finite(generator)


def test_statistics_of_a_pass_that_only_overflowed_backward_are_kept(at_level, level):
    with at_level(level, SCALE) as recorded:
        model = Hot(temperature=0)
        model.hot.weight.register_hook(lambda grad: grad * torch.inf)
        train(model, 2)
        assert recorded.summary["steps"]["skipped"] == 2
        assert int(model.norm.num_batches_tracked) == 2


def test_a_collapse_is_told_once(at_level, level, capsys):
    with at_level(level, SCALE, "collapse.after=3"):
        train(Hot(temperature=0), 12, at=nan_at(*range(5), *range(7, 12)))  # it recovers, and collapses again
    told = capsys.readouterr().err
    assert told.count("mpx: ") == 1
    assert "3 backward passes in a row were not finite" in told
    assert "the loss itself is not finite" in told


def test_a_collapse_ends_the_script_when_the_preset_says_so(at_level, level):
    with at_level(level, SCALE, "collapse.after=3", "collapse.action=stop") as recorded:
        with pytest.raises(MpxError, match="not finite") as raised:
            train(Hot(temperature=0), 8, at=nan_at(*range(8)))
        assert recorded.summary["backwards"] == 3
    assert raised.value.exit_code == 1


def test_a_collapse_is_seen_across_accumulation_windows(at_level, level, capsys):
    with at_level(level, SCALE, "collapse.after=3"):
        model = Hot(temperature=0)
        model.hot.weight.register_hook(lambda grad: grad * torch.inf)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            for micro in range(4):
                x, y = batch(micro)
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert "gradients are not finite at a loss scale of 256" in capsys.readouterr().err
