"""Which rule an op gets, from the lists of a preset, the device, and what the user named."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpx.engine.check_ops import main
from mpx.engine.devices import DEVICES
from mpx.engine.oprules import OpRules, resolve_op, rules_of
from mpx.errors import PresetError, render
from mpx.presets import Override, resolve


def policy_of(level: str, *settings: str, cwd) -> object:
    overrides = [
        Override(key, value, op="+=" if "+=" in setting else "=", origin="test")
        for setting in settings
        for key, value in [setting.replace("+=", "=").split("=", 1)]
    ]
    return resolve(level, overrides=overrides, cwd=cwd).policy


@pytest.fixture
def policy(tmp_path):
    return lambda level, *settings: policy_of(level, *settings, cwd=tmp_path)


@pytest.fixture
def chosen():
    """The kind of rule that an op gets on a device, None for none."""

    def kind(policy, op: str, device=DEVICES["cpu"]) -> str | None:
        rules = OpRules(policy, [device], lambda name, text: None)
        return {rule.op: rule.kind for rule in rules._chosen(rules_of(policy), device)}.get(op)

    return kind


class Applied(nn.Module):
    def __init__(self, op) -> None:
        super().__init__()
        self.lin, self.op = nn.Linear(8, 8), op

    def forward(self, x):
        y = self.op(self.lin(x))
        self.dtype = y.dtype
        return y


def type_of(op) -> torch.dtype:
    model = Applied(op)
    model(torch.randn(4, 8)).sum().backward()
    return model.dtype


# ------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("name", "ops"),
    {
        "aten::softmax.int": ["aten::softmax.int"],
        "softmax": ["aten::softmax.int"],
        "softmax.int": ["aten::softmax.int"],
        "torch.softmax": ["aten::softmax.int"],
        "F.softmax": ["aten::softmax.int"],
        "Tensor.softmax": ["aten::softmax.int"],
        "torch.nn.functional.softmax": ["aten::softmax.int"],
        "torch.ops.aten.softmax": ["aten::softmax.int"],
        "aten::exp.default": ["aten::exp"],
        "exp": ["aten::exp"],  # without those of TorchScript on plain numbers, and without `out`
        "pow": ["aten::pow.Tensor_Tensor", "aten::pow.Tensor_Scalar", "aten::pow.Scalar"],
        "sum": ["aten::sum.dim_IntList", "aten::sum"],
        "torch.linalg.norm": ["aten::linalg_norm", "aten::linalg_norm.ord_str"],
        "torch.fft.fft": ["aten::fft_fft"],
        "torch.special.i1": ["aten::special_i1"],
        "torch.var": ["aten::var", "aten::var.dim", "aten::var.correction"],
    }.items(),
)
def test_an_op_may_be_called_as_users_call_it(name, ops):
    assert resolve_op(name) == ops


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("sofmax", "did you mean `softmax`?"),
        ("aten::softmax.nope", "there is: aten::softmax.int"),
        ("aten::add.out", "there is: aten::add.Tensor, aten::add.Scalar"),
        ("torch.nn.functional.sofplus", "did you mean `softplus`?"),
        ("quantized::linear", "did you mean `linear`?"),
        ("nn.Linear", None),
        ("len", None),
    ],
)
def test_an_unknown_op_is_refused_with_the_nearest_name(name, hint):
    with pytest.raises(PresetError) as refusal:
        resolve_op(name)
    assert (
        f"has no op `{name}` on tensors. Expected a name such as `aten::softmax.int`" in refusal.value.message
    )
    if hint is not None:
        assert refusal.value.hint == hint


def test_check_ops_tells_every_unknown_name_on_stderr_and_ends_with_2(capsys):
    assert main(["softmax", "sofmax", "aten::exp", "expp"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("error: torch") == 2
    assert "`sofmax`" in told.err
    assert "`expp`" in told.err


def test_check_ops_is_silent_about_names_that_torch_has(capsys):
    assert main(["softmax", "torch.nn.functional.gelu", "exp_"]) == 0
    assert capsys.readouterr() == ("", "")


def test_check_ops_is_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "mpx.engine.check_ops", "gelu", "gelo"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    with pytest.raises(PresetError) as refusal:
        resolve_op("gelo")
    assert done.stderr == render(refusal.value) + "\n"


# ------------------------------------------------------------------ the user's word


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_what_the_user_wants_in_float32_is(level, at_level):
    for name, op in {"gelu": F.gelu, "torch.matmul": lambda h: h @ h.mT, "aten::relu": torch.relu}.items():
        with at_level(level):
            assert type_of(op) is torch.float16
        with at_level(level, f"ops.user_float32={name}"):
            assert type_of(op) is torch.float32


def test_what_the_user_wants_in_half_is(at_level):
    ops = {
        "softmax": lambda h: h.softmax(-1),
        "torch.sum": torch.sum,
        "mse_loss": lambda h: F.mse_loss(h, h * 0),
    }
    for name, op in ops.items():
        with at_level("O1"):
            assert type_of(op) is torch.float32
        with at_level("O1", f"ops.user_half={name}"):
            assert type_of(op) is torch.float16


def test_the_user_may_name_a_group(at_level):
    with at_level("O1", "ops.user_half=@softmax"):
        assert type_of(lambda h: h.softmax(-1)) is torch.float16
        assert type_of(lambda h: h.log_softmax(-1)) is torch.float16


def test_an_op_that_the_user_wants_in_half_keeps_its_reroute(policy, chosen):
    assert chosen(policy("O1", "ops.user_half=conv2d"), "aten::conv2d") == "compute_float32"
    assert chosen(policy("O1", "ops.user_float32=conv2d"), "aten::conv2d") == "float32"


@pytest.mark.parametrize(
    "setting", ["ops.user_float32=exp_", "ops.user_half=aten::exp_", "ops.float32+=aten::exp_"]
)
def test_an_op_that_writes_in_place_is_refused_with_the_one_that_does_not(setting, policy):
    with pytest.raises(PresetError) as refusal:
        rules_of(policy("O1", setting))
    assert "writes into its argument, whose type cannot change" in refusal.value.message
    assert refusal.value.hint in ("name `exp`", "name `aten::exp`")


def test_an_unknown_op_in_a_preset_stops_the_session_before_torch_is_touched(at_level):
    with (
        pytest.raises(PresetError, match="has no op `nonsense`"),
        at_level("O1", "ops.user_float32=nonsense"),
    ):
        pass  # the fixture that looks for traces in torch does the rest


# ------------------------------------------------------------------ lists


def test_an_entry_of_a_preset_by_name_wins_over_a_group(policy, chosen):
    assert chosen(policy("O1"), "aten::exp") == "float32"
    assert chosen(policy("O1", "ops.native+=aten::exp"), "aten::exp") == "native"
    assert chosen(policy("O1", "ops.half+=aten::exp"), "aten::exp") == "half"
    assert chosen(policy("O2", "ops.float32+=softmax"), "aten::softmax.int") == "float32"


def test_of_two_groups_the_one_that_keeps_more_precision_wins(policy, chosen):
    both = policy("O3")
    assert (
        chosen(both, "aten::ctc_loss.IntList") == "float32"
    )  # `native` in @losses, but there is no half kernel
    assert chosen(both, "aten::binary_cross_entropy") == "promote"
    assert chosen(both, "aten::mse_loss") == "native"
    assert chosen(policy("O1"), "aten::mse_loss") == "float32"


def test_level_0_has_no_rules(policy):
    assert rules_of(policy("O0")) == {}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_both_devices_get_the_same_float32_list_at_level_1_and_the_same_kinds_elsewhere(level, dtype, policy):
    resolved = policy(level, f"dtype={dtype}")
    everywhere = {
        op: rules
        for op, rules in rules_of(resolved).items()
        if not any("device" in rule.facts for rule in rules)
    }
    kinds = [
        {op: max(rules, key=lambda r: r.strength).kind for op, rules in everywhere.items()} for _ in DEVICES
    ]
    assert kinds[0] == kinds[1]
    assert len(everywhere) > 200


def test_rules_are_for_the_device_the_half_type_and_the_weights_that_they_name(policy, chosen):
    bfloat16 = policy("O1", "dtype=bfloat16")
    able, amx, unable = (
        replace(DEVICES["cpu"], capabilities=lambda names=names: frozenset({"avx2", *names}))
        for names in (("avx512_bw", "avx512_fp16"), ("avx512_bw", "avx512_fp16", "amx_fp16"), ())
    )
    assert chosen(policy("O1"), "aten::conv2d", able) == "compute_float32"
    assert chosen(policy("O1"), "aten::conv2d", amx) == "half"
    assert chosen(policy("O1"), "aten::conv2d", DEVICES["cuda"]) == "half"
    assert chosen(bfloat16, "aten::conv2d", able) == "half"
    assert chosen(bfloat16, "aten::conv2d", unable) == "compute_float32"
    assert chosen(policy("O1"), "aten::linear", able) == "half"
    assert chosen(policy("O1"), "aten::linear", unable) == "compute_float32"
    assert chosen(policy("O1"), "aten::lstm.input", able) == "float32"
    assert chosen(bfloat16, "aten::lstm.input", able) is None
    assert chosen(bfloat16, "aten::lstm.input", unable) == "compute_float32"
    assert chosen(policy("O1"), "aten::lstm.input", unable) == "float32"
    assert chosen(policy("O1"), "aten::batch_norm") is None
    assert chosen(policy("O2"), "aten::batch_norm") == "promote"


@pytest.mark.parametrize(
    ("ratio", "kind"), [(2.0, "compute_float32"), (1e9, "half"), (309, "compute_float32"), (311, "half")]
)
def test_a_reroute_is_used_where_the_half_kernel_is_slower_than_the_preset_allows(
    ratio, kind, policy, chosen
):
    assert chosen(policy("O1", f"slow_kernel_ratio={ratio}"), "aten::conv2d") == kind


def test_nothing_is_registered_where_torch_does_the_same(policy, chosen):
    device = replace(DEVICES["cpu"], capabilities=lambda: frozenset({"avx512_bw", "avx512_fp16"}))
    rules = OpRules(policy("O1"), [device], lambda name, text: None)
    library = SimpleNamespace(registered=set(), impl=lambda op, kernel, key: library.registered.add(op))
    for rule in rules._chosen(rules_of(policy("O1")), device):
        rules._register(library, rule, device)
    assert "softmax.int" in library.registered  # not on torch's list on the CPU
    assert (
        not {"linear", "bmm", "baddbmm", "mse_loss", "prod", "cross_entropy_loss", "cat"} & library.registered
    )


def test_a_session_that_ends_gives_torch_its_own_rules_back(at_level):
    def types():
        with torch.autocast("cpu", dtype=torch.float16):
            x = torch.randn(4, 4)
            return F.mse_loss(x.half(), x.half()).dtype, x.half().softmax(-1).dtype, (x @ x).dtype

    before = types()
    with at_level("O3", "script_amp=keep"):
        pass
    assert types() == before == (torch.float32, torch.float16, torch.float16)


def test_a_substitution_is_told_once_with_its_count_and_only_when_it_happens(at_level):
    with at_level("O1", "loss_scale.init=256") as recorded:
        for _ in range(3):
            type_of(lambda h: torch.fft.rfft(h).abs())
        type_of(lambda h: torch.fft.rfft(h.float()).abs())  # FP32 by the script's own will
        (row,) = recorded.summary["substitutions"]
    assert row == {
        "id": "op:fft_rfft",
        "text": "fft_rfft: no float16 kernel on this cpu, ran in FP32",
        "count": 3,
    }
