"""What one file or one option sets: keys looked up, values typed, everything that is wrong collected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mpx.errors import Problem
from mpx.presets.gate_entries import GATE_KEYS, gate_problem, in_one_line
from mpx.presets.policy import SCHEMA, field_specs, group_names
from mpx.presets.shipped import check_op_entry
from mpx.presets.spelling import show_value
from mpx.presets.tree import Listing, Place, Scalar, Table, Tree
from mpx.presets.values import InvalidValueError, nearest, parse_entry, parse_value
from mpx.values import frozen

__all__ = ["EXTENDS", "UNKNOWN_KEY", "Layer", "Setting", "interpret", "read_layer"]

EXTENDS = "extends"
UNKNOWN_KEY = "unknown key"
# What the same thing is called by Apex, torch and common frameworks.
_FOREIGN_NAMES: Mapping[str, str] = {
    "opt_level": EXTENDS,
    "min_loss_scale": "loss_scale.min",
    "max_loss_scale": "loss_scale.max",
    "init_scale": "loss_scale.init",
    "loss_scale.init_scale": "loss_scale.init",
    "half_dtype": "dtype",
    "precision": "dtype",
    "fp32_ops": "ops.user_float32",
    "half_ops": "ops.user_half",
    "keep_fp32": "fp32_modules",
}


@frozen
class Setting:
    """One value for one field. `append` adds to the list below instead of replacing it."""

    key: str
    value: Any
    place: Place
    append: bool = False


@dataclass(eq=False)
class Layer:
    """Everything that one source sets. `broken` are fields that it meant to set and got wrong."""

    display: str
    start: Place
    settings: list[Setting] = field(default_factory=list)
    extends: Setting | None = None
    problems: list[Problem] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)

    def add(self, setting: Setting) -> None:
        """Add a setting; a key that this layer has already set otherwise is a problem, whichever spelling it took."""
        first = self.sets(setting.key)
        if first is None or setting.append:
            self.settings.append(setting)
        elif first.value != setting.value or first.append:
            what = f"{first.place.origin} sets this to `{show_value(first.value)}` already"
            self.broken.add(setting.key)
            received = f"`{show_value(setting.value)}`"
            self.problems.append(
                setting.place.problem(setting.key, what, expected="one value", received=received)
            )

    def sets(self, key: str) -> Setting | None:
        """Return what this layer says about a field."""
        return next((setting for setting in self.settings if setting.key == key), None)


def read_layer(table: Table, display: str, problems: list[Problem]) -> Layer:
    """Return the settings of a file; `problems` are what reading its text already found."""
    layer = Layer(display, table.place, problems=list(problems))
    for name, place, tree in table.pairs:
        if name == EXTENDS:
            layer.extends = _extends(layer, place, tree)
        else:
            interpret(layer, name, place, tree, append=False)
    return layer


def interpret(layer: Layer, key: str, place: Place, tree: Tree, *, append: bool) -> None:
    """Add to `layer` what `tree` means for `key`, or the reason why it means nothing."""
    if key.endswith("+") and key[:-1] in field_specs():
        key, append = key[:-1], True
    if key == "schema":
        _schema(layer, place, tree)
    elif key in field_specs():
        _leaf(layer, key, place, tree, append=append)
    elif key not in group_names():
        layer.problems.append(_unknown(key, place))
    elif isinstance(tree, Table) and not append:
        for name, inner_place, inner in tree.pairs:
            interpret(layer, f"{key}.{name}", inner_place, inner, append=False)
    elif key == "loss_scale" and isinstance(tree, Scalar) and not tree.null and not append:
        _loss_scale(layer, place, tree)
    else:
        layer.broken.update(_members(key))
        names = ", ".join(f"`{name}`" for name in _members(key))
        expected = f"a mapping with some of {names}"
        if key == "loss_scale":
            expected = f"`dynamic`, a number such as `128`, or {expected}"
        problem = place.problem(key, "this is a group of settings", expected=expected, received=str(tree))
        layer.problems.append(problem)


def _leaf(layer: Layer, key: str, place: Place, tree: Tree, *, append: bool) -> None:
    spec = field_specs()[key]
    if append and spec.kind != "list":
        layer.broken.add(key)
        what = "only a list can be added to"
        layer.problems.append(place.problem(key, what, suggestion="leave out the `+`"))
        return
    if key in GATE_KEYS:
        tree = in_one_line(tree)
    # Each entry is looked at, so that a list with three mistakes is told three.
    entries = tree.items if spec.kind == "list" and isinstance(tree, Listing) else ()
    wrong = [problem for item in entries if (problem := _entry_problem(key, item)) is not None]
    if wrong:
        layer.broken.add(key)
        layer.problems += wrong
        return
    try:
        value = parse_value(spec, tree)
    except InvalidValueError as error:
        layer.broken.add(key)
        layer.problems.append(_complaint(key, tree, error))
        return
    layer.add(Setting(key, value, place, append))


def _entry_problem(key: str, item: Tree) -> Problem | None:
    if key in GATE_KEYS and (problem := gate_problem(key, item)) is not None:
        return problem
    try:
        entry = parse_entry(item)
    except InvalidValueError as error:
        return _complaint(key, item, error)
    complaint = check_op_entry(entry) if key.startswith("ops.") else None
    return None if complaint is None else _complaint(key, item, complaint)


def _loss_scale(layer: Layer, place: Place, tree: Scalar) -> None:
    """Read the short form: a mode, or a number, which is a static scale; 1 scales nothing, as in Apex."""
    mode, init = field_specs()["loss_scale.mode"], field_specs()["loss_scale.init"]
    if tree.text in mode.written:
        layer.add(Setting(mode.key, tree.text, place))
        return
    try:
        scale = parse_value(init, tree)
    except InvalidValueError as error:
        expected = "`dynamic`, `none`, `auto` or a power of two such as `128`"
        guess = nearest(tree.text, mode.written) if tree.text.isalpha() else None
        suggestion = f"did you mean `{guess}`?" if guess else error.suggestion
        layer.broken.update((mode.key, init.key))
        layer.problems.append(
            _complaint("loss_scale", tree, InvalidValueError(error.what, expected, suggestion))
        )
        return
    if scale == 1.0:
        layer.add(Setting(mode.key, "none", place))
    else:
        layer.add(Setting(mode.key, "static", place))
        layer.add(Setting(init.key, scale, place))


def _schema(layer: Layer, place: Place, tree: Tree) -> None:
    if isinstance(tree, Scalar) and tree.text == str(SCHEMA):
        layer.add(Setting("schema", SCHEMA, place))
        return
    layer.broken.add("schema")
    newer = isinstance(tree, Scalar) and tree.text.isdecimal() and int(tree.text) > SCHEMA
    what = "the file is for a newer mpx" if newer else "there is no such version of the format"
    suggestion = "update mpx" if newer else None
    problem = tree.place.problem(
        "schema", what, expected=f"`{SCHEMA}`", received=str(tree), suggestion=suggestion
    )
    layer.problems.append(problem)


def _extends(layer: Layer, place: Place, tree: Tree) -> Setting | None:
    if isinstance(tree, Scalar) and not tree.null and tree.text.strip():
        return Setting(EXTENDS, tree.text, tree.place)
    what = "a preset extends one other preset"
    expected = "the name of a preset or the path of a file"
    layer.problems.append(place.problem(EXTENDS, what, expected=expected, received=str(tree)))
    layer.broken.update(field_specs())
    return None


def _complaint(key: str, tree: Tree, error: InvalidValueError) -> Problem:
    return tree.place.problem(
        key, error.what, expected=error.expected, received=str(tree), suggestion=error.suggestion
    )


def _unknown(key: str, place: Place) -> Problem:
    group, _, last = key.rpartition(".")
    siblings = _members(group) if group in group_names() else sorted({*_top_level(), EXTENDS} - {"schema"})
    guess = _FOREIGN_NAMES.get(key) or nearest(last, siblings)
    if guess in siblings and group:
        guess = f"{group}.{guess}"
    guess = guess or next((known for known in field_specs() if known.rpartition(".")[2] == last), None)
    if guess is None and group not in group_names():
        guess = nearest(key, field_specs())
    suggestion = f"did you mean `{guess}`?" if guess else None
    expected = None if guess else "one of " + ", ".join(f"`{name}`" for name in siblings)
    return place.problem(key, UNKNOWN_KEY, expected=expected, suggestion=suggestion)


def _members(group: str) -> list[str]:
    return [key.rpartition(".")[2] for key in field_specs() if key.rpartition(".")[0] == group]


def _top_level() -> Iterator[str]:
    for key in field_specs():
        yield key.partition(".")[0]
