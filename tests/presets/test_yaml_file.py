import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mpx.errors import PresetError
from mpx.presets.tree import Listing, Scalar, Table
from mpx.presets.yaml_file import parse_text, quote, read_yaml


def plain(tree):
    """Return a tree without places."""
    if isinstance(tree, Table):
        return {name: plain(item) for name, _, item in tree.pairs}
    if isinstance(tree, Listing):
        return [plain(item) for item in tree.items]
    return None if tree.null else tree.text


def refusal(text):
    with pytest.raises(PresetError) as caught:
        parse_text(text, "f.yaml")
    (problem,) = caught.value.problems
    return problem


TREES = st.recursive(
    st.text(alphabet=st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abc+.", min_size=1), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(TREES)
def test_text_is_read_as_it_was_written(data):
    tree, problems = parse_text(yaml.safe_dump(data, default_style='"'), "f.yaml")
    assert problems == []
    assert plain(tree) == data


@given(st.text())
def test_any_text_is_read_or_refused(text):
    try:
        tree, _ = parse_text(text, "f.yaml")
    except PresetError:
        return
    assert isinstance(tree, (Scalar, Listing, Table))


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_a_quoted_text_is_one_line_that_reads_back(text):
    quoted = quote(text)
    assert len(quoted.splitlines()) == 1
    assert yaml.safe_load(f"key: {quoted}") == {"key": text}
    tree, _ = parse_text(f"key: {quoted}", "f.yaml")
    assert plain(tree) == {"key": text}


@pytest.mark.parametrize("text", ["1e4", "010", "off", "0x10", "1:30", "2**16", "64Ki", "1_000"])
def test_no_type_is_guessed(text):
    tree, _ = parse_text(f"key: {text}", "f.yaml")
    assert plain(tree) == {"key": text}


def test_places_point_at_the_text():
    text = "a: 1\nb:\n  - x\n  - {c: d}\n"
    tree, _ = parse_text(text, "f.yaml")
    (_, a_key, a), (_, _, b) = tree.pairs
    (_, c_key, d) = b.items[1].pairs[0]
    assert (a_key.where, a.place.where) == ("f.yaml:1:1", "f.yaml:1:4")
    assert b.items[0].place.where == "f.yaml:3:5"
    assert (c_key.where, d.place.where) == ("f.yaml:4:6", "f.yaml:4:9")
    assert (d.place.origin, d.place.source) == ("f.yaml:4", "  - {c: d}")


def test_a_repeated_key_is_told_with_both_places_at_every_depth():
    _, problems = parse_text("a: 1\nb: {c: 1, c: 1}\na: 1\n", "f.yaml")
    assert [(p.where, p.key) for p in problems] == [("f.yaml:2:11", "b.c"), ("f.yaml:3:1", "a")]
    assert "f.yaml:1" in problems[1].what


def test_merge_keys_point_to_extends():
    _, problems = parse_text("a: &a {b: c}\nd: {<<: *a}\n", "f.yaml")
    assert "extends" in problems[0].what


def test_an_alias_is_what_it_names_and_may_not_hold_itself():
    tree, problems = parse_text("a: &a [x]\nb: *a\nc: &c [*c]\n", "f.yaml")
    assert problems == []
    assert plain(tree) == {"a": ["x"], "b": ["x"], "c": ["an alias of itself"]}


def test_nested_aliases_cost_no_more_than_their_text():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    tree, _ = parse_text("\n".join(lines), "f.yaml")
    assert len(tree.pairs) == 30


def test_a_key_is_a_name():
    _, problems = parse_text("? [a]\n: 1\n", "f.yaml")
    assert "a key must be a name" in problems[0].what


def test_deep_nesting_ends_in_a_message():
    assert "deep" in refusal("[" * 100_000).what or "not valid YAML" in refusal("[" * 100_000).what


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("a: b: c\n", "f.yaml:1:5"),
        ("a: 1\nb: [1, 2\n", "f.yaml:2:4"),
        ("a:\n\tb: 1\n", "f.yaml:2:1"),
        ("a: *nothing\n", "f.yaml:1:4"),
        ("a: 'open\n", "f.yaml:1:4"),
        ("a: 1\n--- \nb: 2\n", "f.yaml:2:1"),
    ],
)
def test_what_is_not_yaml_is_told_where(text, where):
    problem = refusal(text)
    assert problem.what.startswith("not valid YAML")
    assert problem.where == where


def test_a_tab_is_called_a_tab():
    assert "tab" in refusal("a:\n\tb: 1\n").what


def test_control_characters_are_refused_without_a_place():
    assert "not valid YAML" in refusal("a: \x00").what


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "the file is empty"),
        (b"# only a comment\n", "the file is empty"),
        (b"- a\n", "holds a list"),
        (b"text\n", "holds `text`"),
        (b"a: \xff\n", "not UTF-8: byte 3 is 0xff"),
    ],
)
def test_a_file_that_holds_no_mapping_is_refused(tmp_path, content, what):
    path = tmp_path / "f.yaml"
    path.write_bytes(content)
    with pytest.raises(PresetError, match=what):
        read_yaml(path, "f.yaml")


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    table, problems = read_yaml(path, "f.yaml")
    assert (plain(table), problems) == ({"a": "1"}, [])


def test_a_folder_and_nothing_are_no_files(tmp_path):
    with pytest.raises(PresetError, match="this is a folder"):
        read_yaml(tmp_path, "f.yaml")
    with pytest.raises(PresetError, match="no such file"):
        read_yaml(tmp_path / "nothing.yaml", "nothing.yaml")
