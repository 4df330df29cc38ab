import dataclasses
import json
import typing

import pytest

from mpx.errors import PresetError
from mpx.presets import Policy, list_presets, resolve
from mpx.presets.policy import field_specs, group_names

LEVELS = [info.name for info in list_presets()]


@pytest.fixture(params=LEVELS)
def policy(request, tmp_path):
    return resolve(request.param, cwd=tmp_path).policy


def test_a_policy_survives_json(policy):
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy


def test_a_policy_survives_being_flat(policy):
    assert Policy.from_flat(policy.flat()) == policy


def test_flat_keys_are_the_specs_in_order(policy):
    assert list(policy.flat()) == list(field_specs())


def test_a_policy_can_be_a_key(policy):
    """Frozen all the way down: a list inside would make it unhashable."""
    assert {policy: 1}[Policy.from_dict(policy.to_dict())] == 1


def test_nothing_in_the_tree_has_a_default():
    """Values live in configs/: a default here would be a second home of a number."""

    def owners(owner):
        yield owner
        for hint in typing.get_type_hints(owner).values():
            if dataclasses.is_dataclass(hint):
                yield from owners(hint)

    assert len(list(owners(Policy))) == 1 + len(group_names())
    with_default = [
        f"{owner.__name__}.{item.name}"
        for owner in owners(Policy)
        for item in dataclasses.fields(owner)
        if item.default is not dataclasses.MISSING or item.default_factory is not dataclasses.MISSING
    ]
    assert with_default == []


def test_groups_are_not_fields():
    assert group_names().isdisjoint(field_specs())
    assert "loss_scale" in group_names()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("dtype",), "float64"),
        (("patch_torch_functions",), 1),
        (("collapse", "after"), True),
        (("collapse", "after"), 3.5),
        (("loss_scale", "init"), "65536"),
        (("loss_scale", "mode"), "auto"),
        (("fp32_modules",), "LayerNorm"),
        (("fp32_modules",), [1]),
        (("name",), None),
        (("monitors",), 3),
    ],
)
def test_a_mistyped_value_is_refused_by_name(policy, path, value):
    tree = policy.to_dict()
    branch = tree
    for part in path[:-1]:
        branch = branch[part]
    branch[path[-1]] = value
    with pytest.raises(PresetError, match=path[-1]):
        Policy.from_dict(tree)


def test_a_missing_and_an_unknown_key_are_refused(policy):
    tree = policy.to_dict()
    del tree["monitors"]["memory"]
    with pytest.raises(PresetError, match="`monitors` of the policy has other keys"):
        Policy.from_dict(tree)
    with pytest.raises(PresetError, match="extra"):
        Policy.from_dict({**policy.to_dict(), "extra": 1})
