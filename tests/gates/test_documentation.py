"""docs/ci.md and docs/compare.md say what is so: every name, every option, every finding."""

import re
from pathlib import Path

import pytest

from mpx.cli import cli
from mpx.gates import MEASURES, GateError, parse_gate

DOCS = Path(__file__).parent.parent.parent / "docs"
CI = (DOCS / "ci.md").read_text(encoding="utf-8")
COMPARE = (DOCS / "compare.md").read_text(encoding="utf-8")


def test_the_table_of_names_is_the_table_of_measures():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in CI.splitlines()
        if line.startswith("| `")
    ]
    table = {
        cells[0].strip("`").removesuffix("(RUN)"): (cells[3] == "yes", cells[4] == "yes", cells[5] == "yes")
        for cells in rows
        if len(cells) == 6
    }
    assert table == {name: (one.bare, one.warm_up, one.live) for name, one in MEASURES.items()}


def test_every_expression_that_is_shown_is_one():
    shown = re.findall(r"`([a-z_]+(?:\([A-Za-z]+\))?\s*[<>]=?\s*[^`]+?)`", CI) + re.findall(
        r"--fail-on '([^']+)'", CI
    )
    assert len(shown) >= 4
    for text in shown:
        parse_gate(text)


def test_the_mistake_that_is_shown_is_told_like_that():
    with pytest.raises(GateError) as caught:
        parse_gate("overflow_rat>5%")
    told = f"{caught.value.what}; {caught.value.suggestion}".replace("`", "'")
    assert told in " ".join(CI.split())


@pytest.mark.parametrize("text", [CI, COMPARE], ids=["ci", "compare"])
def test_every_option_of_a_command_that_is_shown_exists(text):
    lines = re.findall(r"^ *(?:- run: )?mpx (\w+) (.*)$", text, re.MULTILINE)
    assert lines
    for name, rest in lines:
        command = cli.get_command(None, name)
        known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
        for sub in getattr(command, "commands", {}).values():
            known |= {option for one in sub.params for option in one.opts}
        own = re.split(r"\S+\.py|  #|\.\.\.", rest)[0]
        assert set(re.findall(r"(?<!\S)(--?[A-Za-z][\w-]*)", own)) <= known


def test_every_finding_of_a_comparison_is_explained():
    weigh = (DOCS.parent / "mpx" / "report" / "compare" / "weigh.py").read_text(encoding="utf-8")
    named = set(re.findall(r'Issue\(\s*level, "([a-z-]+)"', weigh)) | set(
        re.findall(r'"(scale-collapse|long-skip-run)"', weigh)
    )
    assert len(named) >= 6
    assert named <= set(re.findall(r"^\| `([a-z-]+)`", COMPARE, re.MULTILINE))
