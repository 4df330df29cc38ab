"""What a chart shows, as values: no format's business, and no pixel in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpx.report.wording import amount
from mpx.values import frozen

__all__ = ["Axis", "Bar", "Chart", "Edge", "Level", "Line", "Mark", "Plot", "Point", "finite", "pairs"]

Point = tuple[float, float]

LARGEST = 1e300


def counted(value: float) -> str:
    """Return what is counted as text: `1,200`."""
    return amount(int(value))


@frozen
class Axis:
    """A vertical axis: `kind` is a row of `axes.KINDS`, `word` writes a value on it with its unit."""

    name: str
    kind: str
    word: Callable[[float], str]
    names: tuple[str, ...] = ()


@frozen
class Line:
    """A series of finite points by rising x. `stairs`: a value holds until the next. Elsewhere a gap splits a line."""

    name: str
    points: tuple[Point, ...]
    stairs: bool = False


@frozen
class Mark:
    """Something that happened at a point; `kind` is a row of `draw.MARKS`."""

    kind: str
    x: float
    y: float
    text: str


@frozen
class Level:
    """A value that holds for the whole run, drawn across."""

    name: str
    y: float


@frozen
class Bar:
    """So much, `y`, of what lies between `x` and `x` + 1."""

    x: float
    y: float


@frozen
class Edge:
    """A value of x at which something begins, drawn from top to bottom."""

    name: str
    x: float


@frozen
class Plot:
    """What is drawn over `x` from `begin` to `end`; `unit` names x, and what it counts in the singular."""

    unit: str
    end: float
    y: Axis
    begin: float = 0.0
    at: Callable[[float], str] = counted
    lines: tuple[Line, ...] = ()
    bars: tuple[Bar, ...] = ()
    edges: tuple[Edge, ...] = ()
    marks: tuple[Mark, ...] = ()
    levels: tuple[Level, ...] = ()


@frozen
class Chart:
    """A plot with what one needs to know without seeing it: a sentence, and the values as a table."""

    id: str
    title: str
    summary: str
    plot: Plot
    table: tuple[tuple[str, ...], ...]  # the first row names the columns
    note: str = ""


def pairs(history: Sequence[Sequence[float]]) -> tuple[Point, ...]:
    """Return the finite points of a record's history, by rising x: what a restored checkpoint enters late moves up."""
    points: list[Point] = []
    for point in history:
        if len(point) == 2 and finite(*point):
            points.append((max(point[0], points[-1][0] if points else 0.0), point[1]))
    return tuple(points)


def finite(*values: float | None) -> bool:
    """Tell whether every value is a number that can be drawn: finite, with room for an axis around it."""
    return all(value is not None and abs(value) < LARGEST for value in values)
