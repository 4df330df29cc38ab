import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpx.presets.policy import field_specs
from mpx.presets.tree import Listing, Place, Scalar, Table
from mpx.presets.values import InvalidValueError, nearest, parse_number, parse_value, power_text

PLACE = Place.option("--set")
FINITE = st.floats(allow_nan=False, allow_infinity=False)


def read(key, text):
    return parse_value(field_specs()[key], Scalar(text, PLACE))


def refusal(key, text):
    with pytest.raises(InvalidValueError) as caught:
        read(key, text)
    return caught.value


@given(FINITE)
def test_a_float_reads_back_from_its_own_text(number):
    assert parse_number(repr(number)) == number


@given(st.integers(min_value=-(2**53), max_value=2**53))
def test_an_integer_reads_back_from_its_own_text(number):
    assert parse_number(str(number)) == number


@given(st.integers(min_value=-1074, max_value=1023))
def test_a_power_of_two_is_exact(exponent):
    assert parse_number(f"2**{exponent}") == math.ldexp(1.0, exponent)


@given(st.integers(min_value=-126, max_value=127))
def test_powers_read_back_from_how_they_are_shown(exponent):
    power = math.ldexp(1.0, exponent)
    assert parse_number(power_text(power)) == power


@given(
    st.integers(min_value=0, max_value=2**20), st.sampled_from([("Ki", 2**10), ("Mi", 2**20), ("Gi", 2**30)])
)
def test_binary_suffixes_multiply(count, suffix):
    if str(count) == "0":
        count = 1
    assert parse_number(f"{count}{suffix[0]}") == count * suffix[1]


@given(st.text())
def test_any_other_text_is_refused_and_never_breaks(text):
    try:
        number = parse_number(text)
    except InvalidValueError:
        return
    assert math.isfinite(number)


@given(st.text(alphabet="0123456789_", min_size=1, max_size=29))
def test_a_leading_zero_is_always_refused(digits):
    """YAML 1.1 reads `010` as 8, YAML 1.2 as 10: a loss scale must not depend on it."""
    with pytest.raises(InvalidValueError, match="leading zero"):
        parse_number("0" + digits)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1e4", 10000.0),
        ("1E+4", 10000.0),
        ("1.0e-4", 0.0001),
        (".5", 0.5),
        ("5.", 5.0),
        ("+3", 3.0),
        ("65_536", 65536.0),
        ("64Ki", 65536.0),
        ("0.5Mi", 524288.0),
        ("2**16", 65536.0),
        ("2 ** 16", 65536.0),
        ("2**-14", 2.0**-14),
        ("2**(-14)", 2.0**-14),
        ("10**3", 1000.0),
        ("0", 0.0),
        (" 7 ", 7.0),
    ],
)
def test_numbers_as_people_write_them(text, number):
    assert parse_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1:30",
        "0x10",
        "64k",
        "64KiB",
        "1e",
        "1_",
        "_1",
        "1__0",
        "2**",
        "**2",
        "2**2**2",
        "--1",
        "1,5",
        "٣",
        "1e4x",
    ],
)
def test_what_is_not_a_number(text):
    with pytest.raises(InvalidValueError, match="not a number"):
        parse_number(text)


@pytest.mark.parametrize("text", ["1e999", "9**9999", "0**-1", "9" * 400])
def test_what_no_float_holds(text):
    with pytest.raises(InvalidValueError, match="too large"):
        parse_number(text)


@pytest.mark.parametrize("text", ["inf", "-inf", ".inf", "nan", ".NaN", "Infinity"])
def test_infinity_and_nan_are_no_settings(text):
    with pytest.raises(InvalidValueError, match="finite"):
        parse_number(text)


@given(st.floats(min_value=2.0**-126, max_value=2.0**127))
def test_a_scale_is_a_power_of_two_or_told_the_nearest(number):
    """The suggestion is itself accepted, and no power of two is nearer."""
    try:
        value = read("loss_scale.init", repr(number))
    except InvalidValueError as error:
        near = parse_number(error.suggestion.split("`")[1])
        assert math.frexp(near)[0] == 0.5
        assert read("loss_scale.max", power_text(near)) == near
        assert abs(near - number) <= min(abs(near / 2 - number), abs(near * 2 - number))
    else:
        assert value == number
        assert math.frexp(number)[0] == 0.5


@pytest.mark.parametrize(
    ("key", "text", "what"),
    [
        ("loss_scale.init", "0", "not positive"),
        ("loss_scale.init", "-128", "not positive"),
        ("loss_scale.init", "2**128", "range of FP32"),
        ("loss_scale.growth_factor", "1", "out of range"),
        ("loss_scale.growth_factor", "0.5", "out of range"),
        ("loss_scale.backoff_factor", "1", "out of range"),
        ("loss_scale.growth_interval", "0", "out of range"),
        ("loss_scale.growth_interval", "0.5", "not whole"),
        ("loss_scale.growth_interval", "1e300", "too large"),
        ("slow_kernel_ratio", "0.9", "out of range"),
        ("flush_interval_s", "0", "out of range"),
        ("optimizer.min_eps", "-1e-8", "out of range"),
        ("monitors.history_points", "1", "out of range"),
    ],
)
def test_numbers_out_of_range_say_what_is_in_range(key, text, what):
    error = refusal(key, text)
    assert what in error.what
    assert error.expected


@pytest.mark.parametrize("text", ["true", "True", "TRUE"])
def test_true_is_true(text):
    assert read("monitors.losses", text) is True


@pytest.mark.parametrize(
    ("text", "word"),
    [("off", "false"), ("No", "false"), ("0", "false"), ("on", "true"), ("YES", "true"), ("1", "true")],
)
def test_what_only_some_yaml_takes_for_a_boolean_is_explained(text, word):
    error = refusal("monitors.losses", text)
    assert error.suggestion == f"write `{word}`"


@pytest.mark.parametrize("text", ["none", "None", "null", "~"])
def test_nothing_can_be_written_where_nothing_is_a_value(text):
    assert read("master_weights", text) is None


def test_a_missing_value_is_a_problem_elsewhere():
    with pytest.raises(InvalidValueError, match="missing"):
        parse_value(field_specs()["dtype"], Scalar("", PLACE, null=True))
    with pytest.raises(InvalidValueError) as caught:
        parse_value(field_specs()["cast_model_type"], Scalar("null", PLACE, null=True))
    assert caught.value.suggestion == "did you mean `none`?"


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("fp16", "float16"), ("half", "float16"), ("torch.float16", "float16"), ("bf16", "bfloat16")],
)
def test_dtypes_have_the_names_people_use(text, dtype):
    assert read("dtype", text) == dtype


def test_a_half_type_is_not_a_cast():
    error = refusal("cast_model_type", "float16")
    assert "`dtype`" in error.what
    assert "`half`" in error.suggestion


@pytest.mark.parametrize("spec", [s for s in field_specs().values() if s.choices], ids=lambda spec: spec.key)
def test_a_misspelt_choice_is_told_the_nearest(spec):
    for choice in spec.written:
        assert read(spec.key, choice) == choice
    error = refusal(spec.key, spec.choices[0] + "x")
    assert error.suggestion == f"did you mean `{spec.choices[0]}`?"


@pytest.mark.parametrize(
    "tree",
    [
        Table((), PLACE),
        Scalar("LayerNorm", PLACE),
        Scalar("", PLACE, null=True),
        Listing((Scalar("", PLACE, null=True),), PLACE),
        Listing((Listing((), PLACE),), PLACE),
        Listing((Scalar(" ", PLACE),), PLACE),
    ],
)
def test_a_list_is_a_list_of_names(tree):
    with pytest.raises(InvalidValueError) as caught:
        parse_value(field_specs()["fp32_modules"], tree)
    assert caught.value.expected == "a list of names"


@pytest.mark.parametrize(
    "spec", [s for s in field_specs().values() if s.kind != "list"], ids=lambda spec: spec.key
)
def test_one_value_is_one_value(spec):
    for tree in (Listing((), PLACE), Table((), PLACE)):
        with pytest.raises(InvalidValueError, match="one value"):
            parse_value(spec, tree)


def test_nearest_ignores_case_and_what_is_far():
    assert nearest("LAYERNORM", ["LayerNorm", "BatchNorm"]) == "LayerNorm"
    assert nearest("zebra", ["LayerNorm"]) is None
