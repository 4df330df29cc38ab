import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from mpx.errors import PresetError
from mpx.presets import Override, list_presets, resolve, show
from mpx.presets.policy import field_specs
from mpx.presets.spelling import show_value

LEVELS = [info.name for info in list_presets()]
TEXT = st.text(alphabet=st.characters(codec="utf-8"))
NAMES = TEXT.filter(str.strip)


def values(spec):
    """Strategies for what a field may be set to, made from its spec."""
    if spec.key == "schema":
        return st.just(1)
    if spec.key == "name":
        return NAMES
    if spec.key.startswith("ops."):
        return st.lists(st.sampled_from(["@matmul", "@losses", "softmax", "aten::mm", "my::op"]), max_size=3)
    by_kind = {
        "bool": st.booleans(),
        "choice": st.sampled_from(spec.written),
        "list": st.lists(NAMES, max_size=3),
        "str": TEXT,
        "int": st.integers(min_value=0, max_value=2**53),
        "float": st.integers(min_value=-40, max_value=40).map(lambda exponent: 2.0**exponent)
        | st.floats(0, 1e300),
    }
    strategy = by_kind[spec.kind]
    return strategy | st.none() if spec.optional else strategy


OVERRIDES = st.lists(
    st.sampled_from(list(field_specs().values())).flatmap(
        lambda spec: st.builds(Override, st.just(spec.key), values(spec))
    ),
    max_size=6,
    unique_by=lambda override: override.key,
)


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@given(level=st.sampled_from(LEVELS), overrides=OVERRIDES)
def test_what_is_shown_resolves_to_the_same_policy(folder, level, overrides):
    try:
        first = resolve(level, overrides=overrides, cwd=folder)
    except PresetError:
        assume(False)
    (folder / "shown.yaml").write_text(show(first), encoding="utf-8")
    assert resolve("./shown.yaml", cwd=folder).policy == first.policy
    (folder / "shown.yaml").write_text(show(first, origin=True), encoding="utf-8")
    assert resolve("./shown.yaml", cwd=folder).policy == first.policy


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_shown_is_a_project_file_too(level, resolved, here):
    shown = resolved(level)
    (here / "mpx.yaml").write_text(show(shown))
    assert resolved(None).policy == shown.policy


@pytest.mark.parametrize("level", LEVELS)
def test_any_yaml_reader_reads_the_values_that_are_shown(level, resolved):
    """Numbers stay numbers, names stay text: an editor or a script needs no mpx to read it."""
    result = resolved(level)
    loaded = yaml.safe_load(show(result, origin=True))
    assert loaded.pop("extends") == "O0"
    assert loaded == result.policy.to_dict()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_yaml_reader_reads_a_number(number):
    assert yaml.safe_load(show_value(number)) == number


@pytest.mark.parametrize(
    "word", ["null", "true", "off", "No", "y", "1e4", "010", "@x", "a: b", "", "a #b", "*x", "é"]
)
def test_any_yaml_reader_reads_text_as_text(word):
    assert yaml.safe_load(f"key: {show_value(word)}") == {"key": word}


@pytest.mark.parametrize("level", LEVELS)
def test_each_line_with_a_value_says_its_origin(level, resolved):
    result = resolved(level)
    lines = [line for line in show(result, origin=True).splitlines() if not line.endswith(":")]
    comments = [line.partition(" # ")[2] for line in lines if not line.startswith("extends")]
    assert comments == [result.origin[key] for key in field_specs()]
