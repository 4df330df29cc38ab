"""What a file or an override says before anything is known about its meaning: text, lists and tables with places.

YAML, TOML and the command line all become this, so there is one reader of values and one form of complaint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from mpx.errors import Problem
from mpx.values import frozen

__all__ = ["Listing", "Place", "Scalar", "Table", "Tree", "from_object"]

# As much of a wrong value as a message repeats.
_SHOWN = 60


@frozen
class Place:
    """Where something was written. `origin` is what a report shows: `file:line`, or the option."""

    origin: str
    where: str
    source: str | None = None
    column: int | None = None

    @classmethod
    def option(cls, name: str) -> Place:
        """Return the place of something that an option said."""
        return cls(origin=name, where=name)

    def problem(
        self,
        key: str,
        what: str,
        *,
        expected: str | None = None,
        received: str | None = None,
        suggestion: str | None = None,
    ) -> Problem:
        """Return the complaint about what was written here."""
        return Problem(self.where, key, what, expected, received, suggestion, self.source, self.column)


@frozen
class Scalar:
    """A single value as it was written; `null` when the file says that there is none."""

    text: str
    place: Place
    null: bool = False

    def __str__(self) -> str:
        if self.null:
            return "no value" if self.text == "" else f"`{self.text}`"
        if not self.text.strip():
            return "empty text"
        shown = " ".join(self.text.split())
        return f"`{shown[:_SHOWN]}…`" if len(shown) > _SHOWN else f"`{shown}`"


@frozen
class Listing:
    """Values in order."""

    items: tuple[Tree, ...]
    place: Place

    def __str__(self) -> str:
        return "a list"


@frozen
class Table:
    """Keys with the place of the key, and values; a key occurs once."""

    pairs: tuple[tuple[str, Place, Tree], ...]
    place: Place

    def __str__(self) -> str:
        return "a mapping"


Tree: TypeAlias = "Scalar | Listing | Table"


def from_object(value: Any, place_of: Callable[[str], Place], key: str = "") -> Tree:
    """Return what a plain Python value says, as if it had been written in a file.

    Args:
        value: A scalar, a sequence or a mapping, as TOML or a caller gives it.
        place_of: The place of a dotted key.
        key: The dotted key of `value`.
    """
    place = place_of(key)
    if isinstance(value, Mapping):
        prefix = f"{key}." if key else ""
        pairs = tuple(
            (str(name), place_of(f"{prefix}{name}"), from_object(item, place_of, f"{prefix}{name}"))
            for name, item in value.items()
        )
        return Table(pairs, place)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return Listing(tuple(from_object(item, place_of, key) for item in value), place)
    if value is None:
        return Scalar("null", place, null=True)
    if isinstance(value, bool):
        return Scalar("true" if value else "false", place)
    return Scalar(str(value), place)
