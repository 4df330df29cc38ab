"""What the command line changes about a preset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from mpx.errors import PresetError
from mpx.presets.policy import field_specs
from mpx.presets.settings import EXTENDS, Layer, interpret
from mpx.presets.tree import Listing, Place, Scalar, Tree, from_object
from mpx.presets.yaml_file import parse_text
from mpx.values import frozen

__all__ = ["Override", "override_layer", "parse_set"]

_OPTIONS = "the command line"


@frozen
class Override:
    """One value from outside any file, and the option that gave it.

    A string is read by the type of the field; a list replaces, or with `+=` extends, a list.
    """

    key: str
    value: Any
    op: Literal["=", "+="] = "="
    origin: str = "--set"


def parse_set(text: str) -> Override:
    """Return the override that `--set KEY=VALUE` or `--set KEY+=VALUE` asks for."""
    name, equals, value = text.partition("=")
    op: Literal["=", "+="] = "="
    if name.endswith("+"):
        name, op = name[:-1], "+="
    key = name.strip()
    if not equals or not key:
        problem = Place.option("--set").problem(
            "", "this sets nothing", expected="`KEY=VALUE` or `KEY+=VALUE`", received=f"`{text}`"
        )
        raise PresetError.of([problem], hint="for example `--set loss_scale.init=2**14`")
    return Override(key, value.strip(), op, f"--set {key}")


def override_layer(overrides: Sequence[Override]) -> Layer:
    """Return the layer above all files. What replaces a list comes before what adds to it, in whatever order."""
    layer = Layer(_OPTIONS, Place.option(_OPTIONS))
    for override in sorted(overrides, key=lambda item: item.op == "+="):
        place = Place(override.origin, override.origin.removesuffix(f" {override.key}"))
        if override.key == EXTENDS:
            problem = place.problem(
                EXTENDS, "the preset is not a setting", suggestion="choose it with `--opt-level`"
            )
            layer.problems.append(problem)
            continue
        interpret(layer, override.key, place, _tree(override, place), append=override.op == "+=")
    return layer


def _tree(override: Override, place: Place) -> Tree:
    value = override.value
    spec = field_specs().get(override.key)
    if spec is not None and spec.kind == "list" and isinstance(value, str):
        value = _entries(value, override.origin)
    return from_object(value, lambda _: place)


def _entries(text: str, origin: str) -> list[str | None]:
    """Return one entry, or those of a list in brackets."""
    if not (text.startswith("[") and text.endswith("]")):
        return [text]
    tree, _ = parse_text(text, origin)
    items = tree.items if isinstance(tree, Listing) else (tree,)
    return [item.text if isinstance(item, Scalar) and not item.null else None for item in items]
