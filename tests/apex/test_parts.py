"""The parts of apex beside amp: torch's own under apex's names, and a few updates that torch has not."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpx.launch.apex_import import refused


def batch(step):
    torch.manual_seed(100 + step)
    return torch.randn(8, 6), torch.randint(0, 3, (8,))


def trained(make, steps=5, factor=1.0):
    """Return the weights after some steps of the optimizer that `make` makes, and the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = make(list(model.parameters()))
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * factor).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), optimizer


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize(
    ("name", "options", "same"),
    [
        ("FusedAdam", {"lr": 0.01, "weight_decay": 0.1}, torch.optim.AdamW),
        ("FusedAdam", {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False}, torch.optim.Adam),
        ("FusedSGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}, torch.optim.SGD),
    ],
)
def test_an_optimizer_is_torchs_to_the_bit(apex_at, level, name, options, same):
    plain = {key: value for key, value in options.items() if key != "adam_w_mode"}
    with apex_at(level, "optimizer.fuse=false"):
        expected, _ = trained(lambda parameters: same(parameters, **plain))
    with apex_at(level) as (apex, recorded):
        found, _ = trained(lambda parameters: getattr(apex.optimizers, name)(parameters, **options))
        assert recorded.summary["steps"]["applied"] == 5
    assert found.equal(expected)


def test_adam_of_old_clips(apex_at):
    with apex_at("O0") as (apex, _):
        clipped = nn.Parameter(torch.zeros(2))
        optimizer = apex.optimizers.FusedAdam([clipped], max_grad_norm=1.0)
        stepped(optimizer, clipped, [torch.tensor([3.0, 4.0])])
        assert optimizer.state[clipped]["exp_avg"].tolist() == pytest.approx([0.06, 0.08], rel=1e-5)


def by_formula(gradients, weights, *, lr, decay, correct=True, lamb=False, clip=None):
    """Adam or LAMB in double precision, for one tensor."""
    mean, square = torch.zeros_like(weights), torch.zeros_like(weights)
    for step, gradient in enumerate(gradients, 1):
        clipped = gradient if clip is None else gradient / max(1.0, float(gradient.norm()) / clip)
        mean = 0.9 * mean + 0.1 * clipped
        square = 0.999 * square + 0.001 * clipped**2
        one, two = (1 - 0.9**step, 1 - 0.999**step) if correct else (1.0, 1.0)
        update = (mean / one) / ((square / two).sqrt() + 1e-6) + decay * weights
        ratio = weights.norm() / update.norm() if lamb else 1.0
        weights = weights - lr * ratio * update
    return weights


def stepped(optimizer, parameter, gradients):
    for gradient in gradients:
        parameter.grad = gradient.float()
        optimizer.step()
    return parameter.detach().double()


@pytest.fixture
def numbers():
    torch.manual_seed(5)
    return [torch.randn(7).double() for _ in range(4)], torch.randn(7).double()


def test_adam_without_correction_of_the_bias(apex_at, numbers):
    gradients, weights = numbers
    expected = by_formula(gradients, weights, lr=0.01, decay=0.1, correct=False)
    with apex_at("O0") as (apex, _):
        parameter = nn.Parameter(weights.float())
        options = {"lr": 0.01, "eps": 1e-6, "weight_decay": 0.1, "bias_correction": False}
        optimizer = apex.optimizers.FusedAdam([parameter], **options)
        torch.testing.assert_close(stepped(optimizer, parameter, gradients), expected, rtol=1e-5, atol=1e-6)
        assert optimizer.param_groups[0]["step"] == 4
        assert list(optimizer.state[parameter]) == ["exp_avg", "exp_avg_sq"]


@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("decay", [0.1, 0.0])
def test_lamb(apex_at, numbers, clip, decay):
    gradients, weights = numbers
    expected = by_formula(gradients, weights, lr=0.01, decay=decay, lamb=decay > 0, clip=clip or None)
    with apex_at("O0") as (apex, _):
        parameter = nn.Parameter(weights.float())
        optimizer = apex.optimizers.FusedLAMB([parameter], lr=0.01, weight_decay=decay, max_grad_norm=clip)
        torch.testing.assert_close(stepped(optimizer, parameter, gradients), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "FusedSGD"])
def test_an_optimizer_resumes_from_its_state(apex_at, name):
    with apex_at("O0") as (apex, _):
        make = getattr(apex.optimizers, name)
        weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
        options = {"lr": 0.1, "momentum": 0.9} if name == "FusedSGD" else {"lr": 0.1}
        first, second = make(weights[:1], **options), make(weights[1:], **options)
        stepped(first, weights[0], [torch.tensor([1.0, 2.0, 3.0])] * 2)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        weights[1].data.copy_(weights[0].data)
        last = torch.tensor([3.0, 2.0, 1.0])
        assert stepped(first, weights[0], [last]).equal(stepped(second, weights[1], [last]))


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "FusedSGD", "LARC"])
def test_a_step_that_overflowed_is_skipped(apex_at, name):
    with apex_at("O1") as (apex, recorded):

        def make(parameters):
            if name == "LARC":
                return apex.parallel.LARC(torch.optim.SGD(parameters, lr=0.1))
            return getattr(apex.optimizers, name)(parameters, lr=0.1)

        weights, _ = trained(make, factor=30.0)
        steps = recorded.summary["steps"]
    assert weights.isfinite().all()
    assert 0 < steps["skipped"] < steps["attempted"] == 5


def test_zero_grad_zeroes_or_drops_as_the_class_does(apex_at):
    with apex_at("O0") as (apex, _):
        for name, drops in (("FusedAdam", True), ("FusedLAMB", True), ("FusedSGD", False)):
            for asked in (None, not drops):
                parameter = nn.Parameter(torch.ones(1))
                parameter.grad = torch.ones(1)
                options = {} if asked is None else {"set_grad_none": asked}
                getattr(apex.optimizers, name)([parameter], lr=0.1, **options).zero_grad()
                assert (parameter.grad is None) == (drops if asked is None else asked)


@pytest.mark.parametrize("clip", [True, False])
def test_larc(apex_at, numbers, clip):
    (gradient, *_), weights = numbers
    decayed = gradient + 0.1 * weights
    rate = 0.02 * weights.norm() / (gradient.norm() + 0.1 * weights.norm())
    expected = weights - (min(rate, 0.01) if clip else 0.01 * rate) * decayed
    with apex_at("O0") as (apex, _):
        parameter, still = nn.Parameter(weights.float()), nn.Parameter(torch.zeros(3))
        still.grad = torch.ones(3)
        inner = torch.optim.SGD([parameter, still], lr=0.01, weight_decay=0.1)
        optimizer = apex.parallel.LARC(inner, clip=clip)
        torch.testing.assert_close(stepped(optimizer, parameter, [gradient]), expected, rtol=1e-5, atol=1e-6)
        assert still.equal(torch.full((3,), -0.01))  # without a norm there is no ratio
        assert optimizer.param_groups is inner.param_groups
        assert inner.param_groups[0]["weight_decay"] == 0.1


def test_normalisation_is_torchs_to_the_bit(apex_at):
    x = torch.randn(3, 4, 5)
    with apex_at("O0") as (apex, _):
        layers = apex.normalization
        for name, plain in (("LayerNorm", nn.LayerNorm), ("RMSNorm", nn.RMSNorm)):
            for kind in (f"Fused{name}", f"MixedFused{name}"):
                made, expected = getattr(layers, kind)(5), plain(5, eps=1e-5)
                assert made(x).equal(expected(x))
                assert list(made.state_dict()) == list(expected.state_dict())
        functions = layers.fused_layer_norm
        weight, bias = torch.randn(5), torch.randn(5)
        assert functions.fused_layer_norm(x, 5).equal(F.layer_norm(x, [5], eps=1e-6))
        assert functions.fused_layer_norm_affine(x, weight, bias, (5,)).equal(
            F.layer_norm(x, [5], weight, bias, 1e-6)
        )
        assert functions.fused_rms_norm(x, 5).equal(F.rms_norm(x, [5], eps=1e-6))
        assert functions.fused_rms_norm_affine(x, weight, 5).equal(F.rms_norm(x, [5], weight, 1e-6))


def test_synchronised_batch_norm_is_torchs(apex_at):
    with apex_at("O0") as (apex, _):
        model = nn.Sequential(nn.BatchNorm2d(3), nn.InstanceNorm2d(3), nn.Linear(2, 2))
        converted = apex.parallel.convert_syncbn_model(model)
        assert [type(part) for part in converted] == [nn.SyncBatchNorm, nn.InstanceNorm2d, nn.Linear]
        assert apex.parallel.create_syncbn_process_group(0) is None
        layer = apex.parallel.SyncBatchNorm(3, channel_last=True)
        x = torch.randn(2, 3, 4, 4)
        assert layer(x).equal(nn.BatchNorm2d(3)(x))


def test_options_that_cannot_be_carried_out_are_refused(apex_at):
    with apex_at("O0") as (apex, _):
        parameters = [nn.Parameter(torch.ones(1))]
        with pytest.raises(RuntimeError, match="AMSGrad"):
            apex.optimizers.FusedAdam(parameters, amsgrad=True)
        with pytest.raises(RuntimeError, match="AMSGrad"):
            apex.optimizers.FusedLAMB(parameters, amsgrad=True)
        with pytest.raises(ValueError, match="wd_after_momentum"):
            apex.optimizers.FusedSGD(parameters, lr=0.1, wd_after_momentum=True)
        with pytest.raises(ValueError, match="fuse_relu"):
            apex.parallel.SyncBatchNorm(3, fuse_relu=True)
        with pytest.raises(ValueError, match="gradient_average=False"):
            apex.parallel.DistributedDataParallel(nn.Linear(1, 1), gradient_average=False)
        with pytest.raises(ValueError, match="flat_master"):
            apex.fp16_utils.prep_param_lists(nn.Linear(1, 1), flat_master=True)
        with pytest.raises(RuntimeError, match="no fused kernels"):
            apex.multi_tensor_apply.multi_tensor_applier(None, None, [])


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("way", ["FP16_Optimizer", "copies by hand"])
def test_a_script_with_a_half_model_of_its_own_trains_as_if_it_had_none(apex_at, level, way):
    """The way before amp: the model is made half, and its optimizer steps FP32 copies."""

    def model_and_optimizer():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        return model, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def plain():
        model, make = model_and_optimizer()
        optimizer = make(model.parameters())
        for step in range(6):
            x, y = batch(step)
            loss = F.cross_entropy(model(x), y) * 30
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()

    def old(apex):
        half = apex.fp16_utils
        model, make = model_and_optimizer()
        model = half.network_to_half(model)
        if way == "FP16_Optimizer":
            optimizer = half.FP16_Optimizer(make(model.parameters()), dynamic_loss_scale=True, verbose=False)
        else:
            own, masters = half.prep_param_lists(model)
            optimizer = make(masters)
        for step in range(6):
            x, y = batch(step)
            loss = F.cross_entropy(model(x), y) * 30
            if way == "FP16_Optimizer":
                optimizer.zero_grad()
                optimizer.backward(loss)
                optimizer.step()
                overflows.append(optimizer.overflow)
                assert optimizer.loss_scale == 2.0 ** (16 - sum(overflows))
            else:
                model.zero_grad()
                loss.backward()
                half.model_grads_to_master_grads(own, masters)
                optimizer.step()
                half.master_params_to_model_params(own, masters)
            yield half.to_python_float(loss)

    overflows = []
    with apex_at(level):
        expected = list(plain())
    with apex_at(level) as (apex, recorded):
        assert list(old(apex)) == expected
        skipped = recorded.summary["steps"]["skipped"]
    assert skipped > 0
    if way == "FP16_Optimizer":
        assert sum(overflows) == skipped


def test_fp16_optimizer_clips_and_saves(apex_at):
    with apex_at("O1") as (apex, _):
        parameter = nn.Parameter(torch.ones(4))
        inner = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        optimizer = apex.optimizers.FP16_Optimizer(inner, static_loss_scale=128.0)
        optimizer.backward(parameter.sum())
        assert optimizer.clip_master_grads(1.0) == 2.0
        assert optimizer.inspect_master_grad_data()[0][0].norm() == pytest.approx(1.0, abs=1e-5)
        optimizer.step()
        again = apex.optimizers.FP16_Optimizer(torch.optim.SGD([parameter], lr=0.1, momentum=0.9))
        again.load_state_dict(optimizer.state_dict())
        assert again.state[parameter]["momentum_buffer"].equal(inner.state[parameter]["momentum_buffer"])
        again.zero_grad()
        assert parameter.grad.count_nonzero() == 0
        again.zero_grad(set_grads_to_None=True)
        assert parameter.grad is None


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_fp16_optimizer_refuses_weights_that_the_script_made_half(apex_at, level):
    with apex_at(level) as (apex, _):
        optimizer = torch.optim.SGD(nn.Linear(2, 2).half().parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match=r"leave out `model\.half\(\)`"):
            apex.fp16_utils.FP16_Optimizer(optimizer)


def test_each_part_is_told_once(apex_at):
    with apex_at("O1") as (apex, recorded):
        parts = ("amp", "fp16_utils", "normalization", "optimizers", "parallel")
        for part in parts:
            getattr(apex, part)
            assert recorded.substituted(f"apex-{part}")
        assert len(recorded.summary["substitutions"]) == len(parts)


def test_a_library_that_did_not_find_it_is_named_once(apex_at):
    refused.add("timm")
    with apex_at("O1") as (apex, recorded):
        assert apex.amp
        assert apex.parallel
        texts = [row["text"] for row in recorded.summary["substitutions"]]
    assert sum("timm did not find apex: `--apex on`" in text for text in texts) == 1
