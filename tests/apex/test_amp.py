"""`apex.amp`: calls, shapes and state as scripts know them; the session does the work."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

LEVELS = ("O0", "O1", "O2", "O3")
LOUD = 30.0  # the gradients of a loss times this overflow at the first scales


def batch(step):
    torch.manual_seed(100 + step)
    return torch.randn(8, 6), torch.randint(0, 3, (8,))


def model_and_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


class Script:
    """A loop with apex."""

    def __init__(self, amp, **asked):
        self.amp = amp
        model, optimizer = model_and_optimizer()
        self.model, self.optimizer = amp.initialize(model, optimizer, **asked)
        self.losses, self.norms = [], []

    def train(self, steps, factor=1.0):
        for step in steps:
            x, y = batch(step)
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y) * factor
            with self.amp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
            norm = nn.utils.clip_grad_norm_(self.amp.master_params(self.optimizer), 1.0)
            self.optimizer.step()
            self.losses.append(loss.item())
            self.norms.append(norm.item())
        return self


def by_hand(steps, factor):
    """The same in the words of `torch.amp`."""
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for step in steps:
        x, y = batch(step)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y) * factor
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, scaler.get_scale()


def test_the_losses_and_the_scale_are_those_of_the_loop_by_hand_skipped_steps_included(apex_at):
    expected, scale = by_hand(range(10), LOUD)
    with apex_at("O1") as (apex, recorded):
        script = Script(apex.amp).train(range(10), LOUD)
        assert script.losses == expected
        assert apex.amp.state_dict()["loss_scaler0"]["loss_scale"] == scale < 2.0**16
        assert recorded.summary["steps"]["skipped"] > 0


@pytest.mark.parametrize("level", LEVELS)
def test_the_loss_and_the_gradients_are_true(apex_at, level):
    with apex_at(level) as (apex, _):
        script = Script(apex.amp, opt_level=level)
        loss = script.model(torch.ones(1, 6)).sum() / 16
        with apex.amp.scale_loss(loss, script.optimizer) as scaled_loss:
            assert scaled_loss is loss
            scaled_loss.backward()
            inside = script.model[2].bias.grad.clone()
        assert inside.equal(torch.full((3,), 1 / 16, dtype=inside.dtype))
        assert script.model[2].bias.grad.equal(inside)


def test_what_is_given_comes_back_in_its_shape(apex_at):
    with apex_at("O2") as (apex, _):
        initialize = apex.amp.initialize
        model, optimizer = model_and_optimizer()
        assert initialize(model) is model
        assert initialize(model, opt_level="O3") is model
        assert initialize(model, optimizer) == (model, optimizer)
        assert initialize([model], [optimizer]) == ([model], [optimizer])
        assert initialize([model, model], optimizer) == ([model, model], optimizer)
        assert initialize(models=model, optimizers=[]) == (model, [])
        assert initialize(model, optimizer, enabled=False) == (model, optimizer)


def test_the_names_and_the_order_of_arguments_are_apexs(apex_at):
    with apex_at("O1") as (apex, _):
        assert list(inspect.signature(apex.amp.initialize).parameters)[:4] == [
            "models", "optimizers", "enabled", "opt_level",
        ]  # fmt: skip
        assert list(inspect.signature(apex.amp.scale_loss).parameters) == [
            "loss", "optimizers", "loss_id", "model", "delay_unscale", "delay_overflow_check",
        ]  # fmt: skip
        assert list(inspect.signature(apex.amp.init).parameters) == [
            "enabled", "loss_scale", "enable_caching", "verbose", "allow_banned",
        ]  # fmt: skip


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_accumulation_is_the_same_with_and_without_delayed_unscaling(apex_at, level):
    def gradients(delays):
        with apex_at(level) as (apex, _):
            script = Script(apex.amp)
            for step, delay in enumerate(delays):
                x, y = batch(step)
                loss = F.cross_entropy(script.model(x), y)
                with apex.amp.scale_loss(loss, script.optimizer, delay_unscale=delay) as scaled_loss:
                    scaled_loss.backward()
            return [parameter.grad for parameter in script.model.parameters()]

    plain = gradients([False, False, False])
    assert all(map(torch.equal, plain, gradients([True, True, False])))


def test_state_is_saved_in_apexs_form_and_taken_from_it(apex_at):
    with apex_at("O2", "loss_scale.growth_interval=3") as (apex, _):
        script = Script(apex.amp).train(range(5))
        assert apex.amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**17, "unskipped": 2}}
    with apex_at("O2", "loss_scale.growth_interval=20") as (apex, recorded):
        script = Script(apex.amp)
        apex.amp.load_state_dict({"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 17}})
        assert apex.amp.state_dict() == {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 17}}
        script.train(range(2))
        assert apex.amp.state_dict() == {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 19}}
        script.train(range(2, 3))
        assert apex.amp.state_dict() == {"loss_scaler0": {"loss_scale": 2048.0, "unskipped": 0}}
        assert recorded.summary["scalers"][0]["init"] == 1024.0


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("first", ["amp", "optimizer"])
def test_a_resumed_run_is_the_uninterrupted_one(apex_at, level, first):
    """The first steps look for the scale, so that the second half depends on it."""
    growth = "loss_scale.growth_interval=4"
    with apex_at(level, growth) as (apex, _):
        whole = Script(apex.amp).train(range(12), LOUD)
        scale = apex.amp.state_dict()
    with apex_at(level, growth) as (apex, _):
        half = Script(apex.amp).train(range(6), LOUD)
        saved = {name: getattr(half, name).state_dict() for name in ("model", "optimizer")}
        saved["amp"] = apex.amp.state_dict()
        saved["optimizer"].pop("mpx")  # as a checkpoint of apex's, which has only its own
    with apex_at(level, growth) as (apex, _):
        again = Script(apex.amp)
        again.model.load_state_dict(saved["model"])
        if first == "amp":
            apex.amp.load_state_dict(saved["amp"])
        again.optimizer.load_state_dict(saved["optimizer"])
        if first == "optimizer":
            apex.amp.load_state_dict(saved["amp"])
        again.train(range(6, 12), LOUD)
        assert half.losses + again.losses == whole.losses
        assert str(half.norms + again.norms) == str(whole.norms)  # one of a step that is skipped is nan
        assert "nan" in str(whole.norms)
        assert apex.amp.state_dict() == scale


def test_each_loss_has_its_scaler_in_the_state(apex_at):
    loud, quiet = (torch.ones((), requires_grad=True) for _ in range(2))
    loud.register_hook(lambda grad: grad * torch.inf)
    with apex_at("O1") as (apex, _):
        amp = apex.amp
        optimizers = [torch.optim.SGD([parameter], lr=0.0) for parameter in (loud, quiet)]
        amp.initialize([], optimizers, num_losses=3)
        amp.load_state_dict({f"loss_scaler{n}": {"loss_scale": 2.0**n, "unskipped": n} for n in (4, 5, 6)})
        with amp.scale_loss(loud * 2, optimizers[0], loss_id=2) as scaled_loss:
            scaled_loss.backward()
        with amp.scale_loss(quiet * 3, optimizers[1]) as scaled_loss:
            scaled_loss.backward()
        assert amp.state_dict() == {
            "loss_scaler0": {"loss_scale": 16.0, "unskipped": 5},
            "loss_scaler1": {"loss_scale": 32.0, "unskipped": 5},
            "loss_scaler2": {"loss_scale": 32.0, "unskipped": 0},
        }


def test_two_places_that_share_a_number_resume_each_with_its_scale(apex_at):
    """Apex's form has room for one: ours is with the optimizer's state, and goes before it."""
    loud, quiet = (torch.ones((), requires_grad=True) for _ in range(2))
    loud.register_hook(lambda grad: grad * torch.inf)

    def passes(amp, optimizer):
        with amp.scale_loss(loud * 2, optimizer) as scaled_loss:
            scaled_loss.backward()
        with amp.scale_loss(quiet * 3, optimizer) as scaled_loss:
            scaled_loss.backward()

    def scales(recorded, which):
        return [scaler[which] for scaler in recorded.summary["scalers"]]

    optimizer = torch.optim.SGD([loud, quiet], lr=0.0)
    with apex_at("O1") as (apex, recorded):
        apex.amp.initialize([], [optimizer])
        passes(apex.amp, optimizer)
        passes(apex.amp, optimizer)
        saved = optimizer.state_dict(), apex.amp.state_dict()
        assert scales(recorded, "final") == [2.0**14, 2.0**15]
    assert saved[1] == {"loss_scaler0": {"loss_scale": 2.0**14, "unskipped": 0}}
    with apex_at("O1") as (apex, recorded):
        apex.amp.initialize([], [optimizer])
        optimizer.load_state_dict(saved[0])
        apex.amp.load_state_dict(saved[1])
        assert apex.amp.state_dict() == saved[1]
        passes(apex.amp, optimizer)
        assert scales(recorded, "init") == [2.0**14, 2.0**15]


def test_a_checkpoint_that_does_not_fit_is_told_or_refused(apex_at):
    with apex_at("O1") as (apex, recorded):
        Script(apex.amp)
        apex.amp.load_state_dict({f"loss_scaler{n}": {"loss_scale": 8.0, "unskipped": 0} for n in range(2)})
        assert recorded.substituted("apex-loss-scalers")
        assert apex.amp.state_dict()["loss_scaler0"]["loss_scale"] == 8.0
        with pytest.raises(RuntimeError, match="unexpected keys"):
            apex.amp.load_state_dict({"scale": 8.0})


@pytest.mark.parametrize(("level", "dtype"), [("O0", "float16"), ("O1", "bfloat16"), ("O3", "float16")])
def test_where_nothing_is_scaled_the_scale_is_1(apex_at, level, dtype):
    with apex_at(level, f"dtype={dtype}") as (apex, _):
        script = Script(apex.amp)
        apex.amp.load_state_dict({"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 3}})
        script.train(range(2))
        assert apex.amp.state_dict()["loss_scaler0"]["loss_scale"] == 1.0


def test_the_private_state_that_scripts_touch(apex_at):
    with apex_at("O1") as (apex, _):
        amp = apex.amp
        script = Script(amp, verbosity=0)
        scaler = amp._amp_state.loss_scalers[0]
        scaler._loss_scale = 2**10
        assert (scaler.loss_scale(), scaler._loss_scale, scaler.dynamic) == (2.0**10, 2.0**10, True)
        script.train(range(1))
        assert (scaler.loss_scale(), scaler._unskipped) == (2.0**10, 1)
        scaler._loss_scale = 100  # of the powers of two the next below
        assert scaler.loss_scale() == 64.0
        assert amp._amp_state.opt_properties.opt_level == "O1"
        assert amp._amp_state.opt_properties.options["master_weights"] is None
        assert isinstance(scaler, amp.scaler.LossScaler)
        assert script.optimizer._amp_stash.lazy_init_called
        script.optimizer._lazy_init_maybe_master_weights()
        assert list(amp.master_params(script.optimizer)) == list(script.model.parameters())


def told(recorded):
    return {
        row["id"]: row["text"]
        for row in recorded.summary["substitutions"]
        if row["id"].startswith("apex-asks")
    }


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"opt_level": "O2"}, {}),
        (
            {
                "opt_level": "O2",
                "loss_scale": "dynamic",
                "keep_batchnorm_fp32": "True",
                "master_weights": True,
            },
            {},
        ),
        ({"opt_level": "O2", "cast_model_type": torch.half}, {}),
        (
            {"opt_level": "O2", "cast_model_type": torch.bfloat16},
            {
                "apex-asks-options": "O2, cast_model_type=torch.bfloat16: "
                "the run is at O2, cast_model_type=torch.float16"
            },
        ),
        ({}, {"apex-asks-O1": "O1: the run is at O2"}),
        ({"opt_level": "02"}, {"apex-asks-02": "02: the run is at O2"}),
        (
            {"opt_level": "O2", "keep_batchnorm_fp32": False},
            {
                "apex-asks-options": "O2, keep_batchnorm_fp32=False: the run is at O2, keep_batchnorm_fp32=True"
            },
        ),
        (
            {"opt_level": "O1", "loss_scale": 128},
            {"apex-asks-O1": "O1, loss_scale=128: the run is at O2, loss_scale=dynamic"},
        ),
    ],
)
def test_a_wish_that_differs_from_the_run_is_told_and_no_other(apex_at, asked, expected):
    with apex_at("O2") as (apex, recorded):
        Script(apex.amp, **asked)
        start = "the script asks apex.amp for "
        assert told(recorded) == {name: start + text for name, text in expected.items()}


def test_a_static_scale_that_the_run_has_is_none_to_tell(apex_at):
    with apex_at("O1", "loss_scale=128") as (apex, recorded):
        Script(apex.amp, loss_scale="128.0")
        assert told(recorded) == {}
        assert apex.amp._amp_state.loss_scalers[0].loss_scale() == 128.0
        assert not apex.amp._amp_state.loss_scalers[0].dynamic


def test_without_a_session_it_says_what_it_is(apex_at):
    with apex_at("O1") as (apex, _):
        amp = apex.amp
    with pytest.raises(RuntimeError, match="inside a run of mpx only"):
        amp.initialize(nn.Linear(1, 1))


def test_the_first_api_trains_too(apex_at):
    with apex_at("O1") as (apex, _):
        expected = Script(apex.amp).train(range(4))
    with apex_at("O1") as (apex, _):
        handle = apex.amp.init(enabled=True)
        model, optimizer = model_and_optimizer()
        optimizer = handle.wrap_optimizer(optimizer)
        losses = []
        for step in range(4):
            x, y = batch(step)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            with optimizer.scale_loss(loss) as scaled_loss:
                scaled_loss.backward()
            nn.utils.clip_grad_norm_(apex.amp.master_params(optimizer), 1.0)
            optimizer.step()
            losses.append(loss.item())
        assert handle.is_active()
        assert losses == expected.losses
