import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpx.errors import PresetError
from mpx.presets import Override, parse_set
from mpx.presets.overrides import override_layer
from mpx.presets.policy import field_specs


@pytest.mark.parametrize(
    ("text", "key", "value", "op"),
    [
        ("a.b=1", "a.b", "1", "="),
        ("a.b+=1", "a.b", "1", "+="),
        ("a.b = 1 ", "a.b", "1", "="),
        ("a.b += 1", "a.b", "1", "+="),
        ("a.b==", "a.b", "=", "="),
        ("a.b=c=d", "a.b", "c=d", "="),
        ("a.b=", "a.b", "", "="),
    ],
)
def test_set_is_a_key_and_a_value(text, key, value, op):
    assert parse_set(text) == Override(key, value, op, f"--set {key}")


@pytest.mark.parametrize("text", ["", "a", "=1", "+=1", " =1"])
def test_set_without_a_key_or_a_value_is_refused(text):
    with pytest.raises(PresetError, match="this sets nothing") as caught:
        parse_set(text)
    assert "--set" in caught.value.hint


@given(st.lists(st.builds(Override, st.text() | st.sampled_from(list(field_specs())), st.text())))
def test_any_override_is_read_or_told(overrides):
    layer = override_layer(overrides)
    assert (
        len(layer.settings) + len(layer.problems)
        >= len({item.key for item in overrides if item.key != "loss_scale"}) - 1
    )
    assert all(setting.key in field_specs() for setting in layer.settings)


@pytest.mark.parametrize(
    ("value", "entries"),
    [("A", ("A",)), ("[A, B]", ("A", "B")), ("[]", ()), ("*.lm_head", ("*.lm_head",)), ("['[ab]*']", ("[ab]*",)),
     ("[ab]*", ("[ab]*",)), (["[ab]", "B"], ("[ab]", "B"))],
)  # fmt: skip
def test_a_list_takes_one_entry_or_those_in_brackets(value, entries, resolved):
    assert resolved("O1", Override("fp32_modules", value)).policy.fp32_modules == entries


def test_what_replaces_a_list_comes_before_what_adds_to_it(resolved):
    result = resolved(
        "O1", parse_set("fp32_modules+=B"), parse_set("fp32_modules=A"), parse_set("fp32_modules+=C")
    )
    assert result.policy.fp32_modules == ("A", "B", "C")


@pytest.mark.parametrize("value", ["[A, [B]]", "[A, null]", "[A, {b: c}]", "['']", ""])
def test_an_entry_that_is_no_name_is_refused(value, problems):
    (problem,) = problems("O1", Override("fp32_modules", value, "=", "--set fp32_modules"))
    assert "not a name" in problem.what


def test_only_a_list_can_be_added_to(problems):
    (problem,) = problems("O1", parse_set("collapse.after+=3"))
    assert "only a list" in problem.what


def test_two_options_that_agree_are_one(resolved):
    same = [Override("dtype", "bf16", "=", "--dtype"), parse_set("dtype=bfloat16")]
    assert resolved("O1", *same).policy.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("first", "second", "key"),
    [
        (Override("dtype", "fp16", "=", "--dtype"), parse_set("dtype=bf16"), "dtype"),
        (parse_set("collapse.after=3"), parse_set("collapse.after=4"), "collapse.after"),
        (Override("loss_scale", "128", "=", "--loss-scale"), parse_set("loss_scale.init=64"), "loss_scale.init"),
        (Override("loss_scale", "128", "=", "--loss-scale"), parse_set("loss_scale.mode=dynamic"), "loss_scale.mode"),
        (Override("keep_batchnorm_fp32", value=True, origin="--keep"), parse_set("keep_batchnorm_fp32=false"),
         "keep_batchnorm_fp32"),
    ],
)  # fmt: skip
def test_two_options_that_disagree_are_refused_by_name(first, second, key, problems):
    (problem,) = problems("O2", first, second)
    assert problem.key == key
    assert f"{first.origin} sets this to" in problem.what


def test_a_mode_and_a_number_that_belong_together_do_not_disagree(resolved):
    result = resolved(
        "O1", Override("loss_scale", "dynamic", "=", "--loss-scale"), parse_set("loss_scale.init=2**10")
    )
    assert (result.policy.loss_scale.mode, result.policy.loss_scale.init) == ("dynamic", 1024)


@pytest.mark.parametrize("key", ["loss_scale", "ops", "monitors", "collapse", "optimizer"])
def test_a_group_takes_no_single_value(key, problems):
    (problem,) = problems("O1", Override(key, "[x]" if key != "loss_scale" else "dynmic"))
    assert problem.key == key


def test_the_preset_is_no_setting(problems):
    (problem,) = problems("O1", parse_set("extends=O2"))
    assert "--opt-level" in problem.suggestion


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("loss_scale.growht_interval", "loss_scale.growth_interval"),
        ("loss_scal.init", "loss_scale.init"),
        ("init", "loss_scale.init"),
        ("init_scale", "loss_scale.init"),
        ("min_loss_scale", "loss_scale.min"),
        ("max_loss_scale", "loss_scale.max"),
        ("fp32_ops", "ops.user_float32"),
        ("keep_batchnorm_fp23", "keep_batchnorm_fp32"),
        ("Dtype", "dtype"),
        ("opt_level", "extends"),
        ("monitors.los", "monitors.losses"),
    ],
)
def test_an_unknown_key_is_told_the_nearest(key, meant, problems):
    (problem,) = problems("O1", Override(key, "1"))
    assert problem.suggestion == f"did you mean `{meant}`?"


def test_an_unknown_key_without_a_near_one_is_told_all(problems):
    (problem,) = problems("O1", Override("monitors.zzz", "1"))
    members = [key.partition(".")[2] for key in field_specs() if key.startswith("monitors.")]
    assert problem.expected == "one of " + ", ".join(f"`{name}`" for name in members)
    (problem,) = problems("O1", Override("zzzzzz", "1"))
    assert "`extends`" in problem.expected
    assert "`loss_scale`" in problem.expected


@pytest.mark.parametrize(
    ("value", "what"), [("2", "newer mpx"), ("0", "no such version"), ("one", "no such version")]
)
def test_another_schema_is_refused(value, what, problems):
    (problem,) = problems("O1", Override("schema", value))
    assert what in problem.what
