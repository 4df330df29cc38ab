"""Gates in preset files and options: read like every other value, refused like every other mistake."""

import pytest

from mpx.errors import PresetError
from mpx.presets import Override, resolve, validate


def preset(tmp_path, text):
    path = tmp_path / "ci.yaml"
    path.write_text(f"schema: 1\nextends: O1\n{text}")
    return path


def policy(tmp_path, text, *overrides):
    return resolve(str(preset(tmp_path, text)), overrides=overrides, cwd=tmp_path).policy


def test_no_level_has_gates_or_a_budget_of_its_own(tmp_path):
    plain = resolve("O0", cwd=tmp_path).policy
    assert (plain.gates, plain.abort_on, plain.max_steps) == ((), (), 0)


def test_a_mapping_says_the_same_as_the_line(tmp_path):
    text = "gates:\n  - nonfinite_loss\n  - {expr: 'skipped_steps>2', after: 100}\n"
    assert policy(tmp_path, text).gates == ("nonfinite_loss", "skipped_steps>2 after 100")


def test_one_mapping_reads_as_a_list_of_one(tmp_path):
    text = "gates:\n  expr: skipped_steps>2\n  after: 100\n"
    assert policy(tmp_path, text).gates == ("skipped_steps>2 after 100",)


def test_an_option_adds_to_the_gates_of_the_file(tmp_path):
    more = Override("gates", ["steps<10"], "+=", "--fail-on")
    assert policy(tmp_path, "gates: [nonfinite_loss]\n", more).gates == ("nonfinite_loss", "steps<10")


@pytest.mark.parametrize(
    ("text", "says", "caret"),
    [
        ("gates:\n  - overflow_rat>5%\n", "did you mean `overflow_rate`?", "overflow_rat>5%"),
        ("gates: ['peak_memory>8']\n", "has no unit", "8"),
        ("gates:\n  - {expr: 'steps<1.5', after: 3}\n", "whole number", "1.5"),
        ("gates: [{expresion: steps}]\n", "Expected an expression", "{"),
        ("abort_on: [step_time>3ms]\n", "--fail-on", "step_time"),
    ],
)
def test_a_mistake_is_told_with_the_line_and_a_caret(tmp_path, text, says, caret):
    (problem,) = validate(preset(tmp_path, text))
    told, line, below = str(problem).split("\n")
    assert says in told
    assert line[below.index("^") :].startswith(caret)


def test_every_mistake_is_told_at_once(tmp_path):
    assert len(validate(preset(tmp_path, "gates: [a>1, steps<2, b>1]\nabort_on: [c]\nmax_steps: -1\n"))) == 4


def test_a_mistake_on_the_command_line_shows_the_expression(tmp_path):
    with pytest.raises(PresetError) as caught:
        resolve("O1", overrides=[Override("gates", ["steps => 3"], "+=", "--fail-on")], cwd=tmp_path)
    assert "--fail-on  gates: `=>` is no comparison" in caught.value.message
    assert caught.value.message.split("\n")[1:] == ["    steps => 3", "          ^"]
