"""Gates in a preset: read and checked where presets are, so that a mistake in one is told before the script starts."""

from __future__ import annotations

from mpx.errors import Problem
from mpx.gates import GateError, parse_gate
from mpx.presets.tree import Listing, Place, Scalar, Table, Tree

__all__ = ["EXPRESSION", "GATE_KEYS", "WARM_UP", "gate_problem", "in_one_line"]

# The keys that hold expressions, and whether these are asked while the script trains.
GATE_KEYS = {"gates": False, "abort_on": True}
EXPRESSION, WARM_UP = "expr", "after"


def in_one_line(tree: Tree) -> Tree:
    """Return a list of gates with each `{expr: EXPR, after: N}` written `EXPR after N`; anything else as it is."""
    if isinstance(tree, Table):  # one gate where a list is meant reads as if it were in brackets
        return Listing((_joined(tree),), tree.place)
    if isinstance(tree, Listing):
        return Listing(tuple(_joined(item) for item in tree.items), tree.place)
    return tree


def gate_problem(key: str, item: Tree) -> Problem | None:
    """Return what is wrong with one gate, with a caret below the place; None when nothing is."""
    if isinstance(item, Table):
        what = "this is no gate"
        expected = f"an expression, or a mapping with `{EXPRESSION}` and `{WARM_UP}`"
        return item.place.problem(key, what, expected=expected, received=_keys(item))
    if not isinstance(item, Scalar) or item.null:
        return None  # a list in a list, or no value: told by the reader of lists
    try:
        parse_gate(item.text, live=GATE_KEYS[key])
    except GateError as error:
        source, column = _pointer(item, error.position)
        return Problem(
            item.place.where,
            key,
            error.what,
            expected=error.expected,
            suggestion=error.suggestion,
            source=source,
            column=column,
        )
    return None


def _joined(item: Tree) -> Tree:
    if not isinstance(item, Table):
        return item
    parts = {name: value for name, _, value in item.pairs}
    expression, warm_up = parts.get(EXPRESSION), parts.get(WARM_UP)
    if parts.keys() - {EXPRESSION, WARM_UP} or not isinstance(expression, Scalar):
        return item
    if warm_up is None:
        return expression
    if not isinstance(warm_up, Scalar) or warm_up.null:
        return item
    return Scalar(f"{expression.text} after {warm_up.text}", expression.place)


def _pointer(item: Scalar, position: int) -> tuple[str, int]:
    """Return the line to show and the column of the caret: in the file where it can be told, else in the gate alone."""
    place: Place = item.place
    if place.source is not None and place.column is not None:
        begin = place.column - 1
        for quote in (0, 1):
            if place.source[begin + quote :].startswith(item.text[: position + 1]):
                return place.source, place.column + quote + position
        return place.source, place.column
    return item.text, position + 1


def _keys(table: Table) -> str:
    return "a mapping with " + ", ".join(f"`{name}`" for name, _, _ in table.pairs)
