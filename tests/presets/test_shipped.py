"""Contracts that every file in configs/ must hold: a new preset or group needs no new test."""

import re

import pytest

from mpx.errors import PresetError
from mpx.presets import Override, list_presets, resolve, shipped, validate
from mpx.presets.files import built_in, configs_dir, load_chain, preset_names
from mpx.presets.policy import field_specs
from mpx.presets.shipped import check_op_entry, op_groups, shipped_ops, unlisted
from mpx.presets.yaml_file import read_yaml

APEX = {
    # cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss scale in float16, in bfloat16
    "O0": ("float32", False, None, None, "none", "none"),
    "O1": ("none", True, None, None, "dynamic", "none"),
    "O2": ("half", False, True, True, "dynamic", "none"),
    "O3": ("half", False, False, False, "none", "none"),
}


@pytest.fixture(params=preset_names())
def name(request):
    return request.param


def test_every_preset_resolves_without_a_warning(name, resolved):
    result = resolved(name)
    assert (result.policy.name, result.warnings, result.unlisted_ops) == (name, (), ())


def test_every_preset_is_valid_by_its_path(name):
    assert validate(configs_dir() / f"{name}.yaml") == []


def test_every_preset_has_one_line_of_description(name):
    info = next(info for info in list_presets() if info.name == name)
    assert info.description
    assert "\n" not in info.description


def test_every_preset_says_its_schema_and_name(name):
    layer = load_chain(built_in(name), configs_dir())[0][-1]
    assert layer.sets("schema") is not None
    assert layer.sets("name").value == name


def test_every_key_has_its_value_in_the_base_file():
    (base,), _ = load_chain(built_in("O0"), configs_dir())
    assert [setting.key for setting in base.settings] == list(field_specs())


def test_every_key_of_the_base_file_is_explained():
    """A comment on the line, or above it within its block."""
    lines = (configs_dir() / "O0.yaml").read_text().splitlines()
    unexplained = []
    for number, line in enumerate(lines):
        if re.match(r"\s*\w+:", line) and "#" not in line:
            block = []
            for above in reversed(lines[:number]):
                if not above.strip():
                    break
                block.append(above)
            if not any("#" in above for above in block):
                unexplained.append(line)
    assert unexplained in ([], [next(line for line in lines if line.startswith("description"))])


@pytest.mark.parametrize("level", APEX)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_levels_are_those_of_apex(level, dtype, here):
    policy = resolve(level, overrides=[Override("dtype", dtype)], cwd=here).policy
    cast, patch, keep, masters, *modes = APEX[level]
    assert (policy.cast_model_type, policy.patch_torch_functions) == (cast, patch)
    assert (policy.keep_batchnorm_fp32, policy.master_weights) == (keep, masters)
    assert policy.loss_scale.mode == modes[dtype == "bfloat16"]


@pytest.mark.parametrize(("bf16", "level"), [("O1-bf16", "O1"), ("O2-bf16", "O2")])
def test_a_bf16_preset_is_its_level_in_bfloat16(bf16, level, resolved):
    by_name = resolved(bf16).policy.flat()
    by_option = resolved(level, Override("dtype", "bfloat16")).policy.flat()
    for identity in ("name", "description"):
        del by_name[identity], by_option[identity]
    assert by_name == by_option


def test_the_floor_of_the_scale_is_below_one(resolved):
    scale = resolved("O1").policy.loss_scale
    assert scale.min < 1 < scale.init < scale.max


@pytest.mark.parametrize("group", op_groups())
def test_every_group_is_readable_and_described(group):
    table, problems = read_yaml(configs_dir() / "ops" / f"{group}.yaml", group)
    assert problems == []
    assert {"description", "ops"} <= {name for name, _, _ in table.pairs}
    assert check_op_entry(f"@{group}") is None


def test_every_group_is_used_by_a_level(resolved):
    used = {entry for name in preset_names() for entry in _entries(resolved(name).policy)}
    assert {f"@{group}" for group in op_groups()} <= used


def test_every_shipped_op_is_a_valid_and_listed_entry():
    ops = shipped_ops()
    assert ops
    assert [op for op in ops if check_op_entry(op)] == []
    assert unlisted(ops) == []


@pytest.mark.parametrize(
    "entry",
    [
        "aten::softmax.int",
        "aten::softmax",
        "softmax",
        "softmax.int",
        "torch.softmax",
        "torch.nn.functional.softmax",
    ],
)
def test_an_op_is_known_in_each_of_its_spellings(entry):
    assert check_op_entry(entry) is None
    assert unlisted([entry]) == []


def test_an_op_that_no_group_has_is_passed_on_once():
    assert unlisted(["frobnicate", "@matmul", "softmax", "frobnicate", "my::op"]) == ["frobnicate", "my::op"]


@pytest.mark.parametrize("entry", ["a b", "", "aten::", "::mm", "mm(", "-x", "1mm", "a..b"])
def test_what_cannot_name_an_op_is_refused(entry):
    assert "not the name of an operation" in check_op_entry(entry).what


def test_an_unknown_group_is_told_the_nearest_and_all():
    complaint = check_op_entry("@matmull")
    assert complaint.suggestion == "did you mean `@matmul`?"
    assert all(f"`@{group}`" in complaint.expected for group in op_groups())


def test_a_group_without_its_mark_is_told_so():
    assert check_op_entry("losses").suggestion == "did you mean `@losses`?"
    assert check_op_entry("matmul") is None, "an op by that name goes first"


def test_a_broken_group_file_is_told_by_place(tmp_path, monkeypatch):
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "bad.yaml").write_text("description: x\nops: 3\n")
    monkeypatch.setattr(shipped, "configs_dir", lambda: tmp_path)
    shipped.shipped_ops.cache_clear()
    try:
        with pytest.raises(PresetError, match=r"configs/ops/bad\.yaml:1:1  ops: the group has no operations"):
            unlisted(["mm"])
    finally:
        shipped.shipped_ops.cache_clear()


def _entries(policy):
    return [entry for key, value in policy.flat().items() if key.startswith("ops.") for entry in value]
