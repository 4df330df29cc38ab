"""A chart as SVG: drawn by hand, readable without a script, and with the values that a script shows on hover."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby, pairwise

from mpx.report.charts.axes import KINDS, Scale, counted
from mpx.report.charts.plot import Chart, Line, Plot, Point
from mpx.report.markup import Markup, tag
from mpx.values import frozen

__all__ = ["MARKS", "Shape", "draw", "legend"]

WIDTH = 760.0
HEIGHT = 250.0
ROW_HEIGHT = 24.0
TOP, RIGHT, BOTTOM = 28.0, 26.0, 44.0
LETTER = 6.6  # the width of a letter of the ticks, on average
LONGEST_LABEL = 34  # letters
DOTS_UP_TO = 40  # points of a line that are drawn as dots too


@frozen
class Shape:
    """The sign for a kind of event: its path around the origin, and what a legend calls it."""

    path: str
    name: str


MARKS: Mapping[str, Shape] = {
    "raised": Shape("M0 -5.5L5 4H-5Z", "scale raised"),
    "lowered": Shape("M0 5.5L5 -4H-5Z", "scale lowered"),
    "skipped": Shape("M-4 -4L4 4M-4 4L4 -4", "step skipped"),
    "overflow": Shape("M-4 -4L4 4M-4 4L4 -4", "gradient not finite"),
    "forward": Shape("M-4 -4H4V4H-4Z", "module's output not finite"),
    "not-finite": Shape("M0 -5.5L5.5 0L0 5.5L-5.5 0Z", "loss NaN or infinite"),
    "begins": Shape("M-5 0A5 5 0 1 1 5 0A5 5 0 1 1 -5 0Z", "something found begins"),
}


@frozen
class _Frame:
    """Where things go: from values to pixels of the picture."""

    plot: Plot
    x: Scale
    y: Scale
    left: float
    height: float

    def px(self, value: float) -> float:
        return self.left + self.x.at(value) * (WIDTH - RIGHT - self.left)

    def py(self, value: float) -> float:
        bottom = self.height - BOTTOM
        return bottom - self.y.at(value) * (bottom - TOP)


def draw(chart: Chart) -> Markup:
    """Return the picture, named by its title and described by its summary, and its values for the page's script."""
    frame = _framed(chart.plot)
    parts = [part for layer in _LAYERS for part in layer(frame)]
    picture = tag(
        "svg",
        tag("title", chart.title, id=f"{chart.id}-title"),
        tag("desc", chart.summary.replace("`", ""), id=f"{chart.id}-desc"),
        *parts,
        viewBox=f"0 0 {WIDTH:.0f} {frame.height:.0f}",
        role="img",
        aria_labelledby=f"{chart.id}-title {chart.id}-desc",
    )
    values = json.dumps(_values(frame), separators=(",", ":")).replace("<", "\\u003c")
    return Markup(picture + tag("script", Markup(values), type="application/json"))


def legend(plot: Plot) -> Markup:
    """Return the names of the lines and signs of a plot; nothing for a single line without signs."""
    entries = [
        (f"line s{index}", "M-8 0H8", line.name)
        for index, line in enumerate(plot.lines)
        if len(plot.lines) > 1
    ]
    kinds = {mark.kind for mark in plot.marks}
    entries += [(f"mark {kind}", shape.path, shape.name) for kind, shape in MARKS.items() if kind in kinds]
    items = [
        tag(
            "li",
            tag("svg", tag("path", class_=style, d=path), viewBox="-9 -7 18 14", aria_hidden="true"),
            name,
        )
        for style, path, name in entries
    ]
    return tag("ul", *items, class_="legend") if items else Markup()


def _framed(plot: Plot) -> _Frame:
    seen = [y for line in plot.lines for _, y in line.points if math.isfinite(y)]
    seen += (
        [mark.y for mark in plot.marks] + [level.y for level in plot.levels] + [bar.y for bar in plot.bars]
    )
    y = KINDS[plot.y.kind](seen)
    letters = max((len(_shortened(plot.y.word(tick))) for tick in y.ticks), default=0)
    left = max(44.0, 16.0 + letters * LETTER)
    height = TOP + BOTTOM + ROW_HEIGHT * len(plot.y.names) if plot.y.names else HEIGHT
    return _Frame(plot, counted(plot.begin, plot.end), y, left, height)


def _axes(frame: _Frame) -> Iterator[Markup]:
    bottom, right = frame.height - BOTTOM, WIDTH - RIGHT
    for tick in frame.y.ticks:
        at = frame.py(tick)
        yield tag("line", class_="grid", x1=frame.left, x2=right, y1=at, y2=at)
        label = _shortened(frame.plot.y.word(tick))
        yield tag("text", label, class_="tick end", x=frame.left - 8, y=at + 4)
    yield tag("line", class_="base", x1=frame.left, x2=right, y1=bottom, y2=bottom)
    for tick in frame.x.ticks:
        yield tag("text", frame.plot.at(tick), class_="tick middle", x=frame.px(tick), y=bottom + 18)
    yield tag("text", frame.plot.y.name, class_="name", x=0.0, y=13.0)
    yield tag("text", frame.plot.unit, class_="name end", x=right, y=frame.height - 6)


def _levels(frame: _Frame) -> Iterator[Markup]:
    right = WIDTH - RIGHT
    for later, level in enumerate(reversed(frame.plot.levels)):
        at = frame.py(level.y)
        label = f"{level.name} {frame.plot.y.word(level.y)}"
        yield tag("line", class_="level", x1=frame.left, x2=right, y1=at, y2=at)
        # The lower of two is named below its line: near ones do not write over each other.
        yield tag("text", label, class_="tick end", x=right, y=at + 14 if later else at - 5)


def _bars(frame: _Frame) -> Iterator[Markup]:
    width = _width(frame.plot)
    for bar in frame.plot.bars:
        left, right, top, base = frame.px(bar.x), frame.px(bar.x + width), frame.py(bar.y), frame.py(0.0)
        told = f"{frame.plot.unit} {frame.plot.at(bar.x)}: {frame.plot.y.word(bar.y)}"
        size = {"width": max(0.5, right - left - 1), "height": max(0.0, base - top)}
        yield tag("rect", tag("title", told), class_="bar", x=left + 0.5, y=top, **size)


def _width(plot: Plot) -> float:
    """Return how much of x a bar covers."""
    return 1.0 if plot.bars else 0.0


def _edges(frame: _Frame) -> Iterator[Markup]:
    for number, edge in enumerate(frame.plot.edges):
        at, top = frame.px(edge.x), TOP + 16.0 * number
        yield tag("line", class_="edge", x1=at, x2=at, y1=top, y2=frame.height - BOTTOM)
        far = at > (WIDTH + frame.left) / 2
        yield tag(
            "text", edge.name, class_="tick end" if far else "tick", x=at - 5 if far else at + 5, y=top + 9
        )


def _lines(frame: _Frame) -> Iterator[Markup]:
    for index, line in enumerate(frame.plot.lines):
        yield tag("path", tag("title", line.name), class_=f"line s{index}", d=_path(frame, line))
        known = [point for point in line.points if math.isfinite(point[1])]
        if len(known) <= DOTS_UP_TO and not line.stairs:
            for x, y in known:
                yield tag("circle", class_=f"dot s{index}", cx=frame.px(x), cy=frame.py(y), r=2.5)


def _path(frame: _Frame, line: Line) -> str:
    """Return the line, in one piece for each run of finite values; a lone value is a dash of its own."""
    pieces = [list(group) for known, group in groupby(line.points, lambda p: math.isfinite(p[1])) if known]
    return "".join(_piece(frame, piece, stairs=line.stairs) for piece in pieces)


def _piece(frame: _Frame, points: list[Point], *, stairs: bool) -> str:
    (x, y), *_ = points
    written = f"M{_short(frame.px(x))} {_short(frame.py(y))}"
    if len(points) == 1:
        return written + "h1"
    for (_, before), (x, y) in pairwise(points):
        if not stairs:
            written += f"L{_short(frame.px(x))} {_short(frame.py(y))}"
        else:
            written += f"H{_short(frame.px(x))}" + (f"V{_short(frame.py(y))}" if y != before else "")
    return written


def _marks(frame: _Frame) -> Iterator[Markup]:
    for mark in frame.plot.marks:
        place = f"translate({_short(frame.px(mark.x))} {_short(frame.py(mark.y))})"
        told = f"{frame.plot.unit} {frame.plot.at(mark.x)}: {mark.text}"
        shape = MARKS[mark.kind].path
        yield tag("path", tag("title", told), class_=f"mark {mark.kind}", d=shape, transform=place)


_LAYERS: tuple[Callable[[_Frame], Iterator[Markup]], ...] = (_axes, _bars, _edges, _lines, _levels, _marks)


def _values(frame: _Frame) -> list[list[object]]:
    """Return, for each x that has something: its pixel, its name, and what is there as `[style, text, pixel]`."""
    plot = frame.plot
    named = len(plot.lines) > 1
    middle = _width(plot) / 2
    there: dict[float, list[list[object]]] = {}
    for index, line in enumerate(plot.lines):
        for x, y in line.points:
            if math.isfinite(y):
                said = f"{line.name}: {plot.y.word(y)}" if named else plot.y.word(y)
                there.setdefault(x, []).append([f"line s{index}", said, round(frame.py(y), 1)])
    for bar in plot.bars:
        there.setdefault(bar.x, []).append(["bar", plot.y.word(bar.y), round(frame.py(bar.y), 1)])
    for mark in plot.marks:
        there.setdefault(mark.x, []).append([f"mark {mark.kind}", mark.text, round(frame.py(mark.y), 1)])
    return [[round(frame.px(x + middle), 1), f"{plot.unit} {plot.at(x)}", there[x]] for x in sorted(there)]


def _shortened(text: str) -> str:
    # The end of a module's path tells more than its beginning.
    return text if len(text) <= LONGEST_LABEL else f"…{text[1 - LONGEST_LABEL :]}"


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
