"""The groups of operations as data, and how they come to who reads no YAML."""

import json
import subprocess
import sys

import pytest
import yaml

from mpx.presets import groups
from mpx.presets.groups import groups_of, hand_over, op_group
from mpx.presets.shipped import configs_dir, op_groups, preset_names
from mpx.presets.yaml_file import parse_text


@pytest.fixture
def unread(monkeypatch):
    """Nobody has read a group yet."""
    monkeypatch.setattr(groups, "_known", {})


@pytest.mark.parametrize("group", op_groups())
def test_a_group_says_the_same_as_json(group):
    """It is handed over as such: a key that is no text, or a value that JSON lacks, would not arrive."""
    assert json.loads(json.dumps(op_group(group))) == op_group(group)


@pytest.mark.parametrize("level", preset_names())
def test_the_groups_of_a_policy_are_those_that_its_lists_name(resolved, level):
    policy = resolved(level).policy
    named = {entry[1:] for key, value in policy.flat().items() if key.startswith("ops.") for entry in value}
    assert set(groups_of(policy)) == named & set(op_groups())
    assert resolved(level).op_groups == groups_of(policy)


def test_what_was_handed_over_is_used_and_the_rest_is_read(unread):
    hand_over({"matmul": {"ops": {"aten::mm": None}}})
    assert op_group("matmul") == {"ops": {"aten::mm": None}}
    assert "aten::softmax.int" in op_group("softmax")["ops"]


@pytest.mark.parametrize(
    "path", [*configs_dir().glob("*.yaml"), *configs_dir().glob("ops/*.yaml")], ids=lambda path: path.stem
)
@pytest.mark.skipif(not hasattr(yaml, "CSafeLoader"), reason="PyYAML was built without libyaml")
def test_both_readers_of_yaml_see_the_same_in_a_shipped_file(path):
    """Values, and the places that origins name."""
    text = path.read_text(encoding="utf-8")
    assert parse_text(text, path.name, shipped=True) == parse_text(text, path.name)


def test_a_policy_is_read_without_what_resolves_one():
    """A process that trains does that, and pays for what it loads."""
    code = "import sys; from mpx.presets import Policy; from mpx.presets.groups import op_group; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {name for name in loaded if name.startswith("mpx.presets.")} == {
        "mpx.presets.groups",
        "mpx.presets.policy",
    }
    assert "yaml" not in loaded
