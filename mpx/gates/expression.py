"""The language of gates: `overflow_rate>5%`, `peak_memory > 8GiB`, `nonfinite_loss`, `skipped_steps>2 after 100`.

A gate describes what must not be: it fails when its expression is true. So several gates mean "none of these".
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping

from mpx.gates.measures import MEASURES, UNITS, Measure
from mpx.values import frozen

__all__ = ["Gate", "GateError", "parse_gate"]

_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_COMPARISONS = "one of " + ", ".join(f"`{symbol}`" for symbol in (">", ">=", "<", "<=", "==", "!="))
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_RUN = re.compile(r"\(([^()]*)\)")
_OPERATOR = re.compile(r"[<>=!]+")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
_UNIT = re.compile(r"%|[A-Za-z]+", re.ASCII)
_AFTER = re.compile(r"after\b\s*:?", re.ASCII)
_WHOLE = re.compile(r"\d[\d_]*\b", re.ASCII)
_SPACE = re.compile(r"\s*")


class GateError(Exception):
    """An expression that is none; `position` counts its characters from 0. The caller knows where it was written."""

    def __init__(
        self, what: str, *, position: int, expected: str | None = None, suggestion: str | None = None
    ) -> None:
        super().__init__(what)
        self.what = what
        self.position = position
        self.expected = expected
        self.suggestion = suggestion


@frozen
class Gate:
    """An expression that was understood. `bound` is in the measure's own unit; `run` names what it compares with."""

    text: str
    measure: Measure
    symbol: str
    bound: float
    run: str | None = None
    after: int = 0

    def is_true_of(self, value: float) -> bool:
        """Tell whether the gate fails at `value`. A value that is no number is never within a bound."""
        return math.isnan(value) or _OPERATORS[self.symbol](value, self.bound)


def parse_gate(text: str, *, live: bool = False) -> Gate:
    """Return the gate that `text` writes.

    Args:
        text: The expression.
        live: Whether it is to be asked while the script trains: not every measure is known then.

    Raises:
        GateError: It is not an expression, or not one that can be asked.
    """
    read = _Reader(text)
    measure = _measure(read, live=live)
    run = _named_run(read, measure)
    symbol, bound = _comparison(read, measure)
    after = _warm_up(read, measure)
    if read.rest:
        raise read.error("this is not part of an expression", expected="nothing more, or `after N`")
    return Gate(" ".join(text.split()), measure, symbol, bound, run, after)


class _Reader:
    """The text and how far it was read."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.at = 0
        self._skip()

    @property
    def rest(self) -> str:
        return self._text[self.at :]

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Return what stands here if it fits, and go beyond it and the blanks after it."""
        found = pattern.match(self._text, self.at)
        if found:
            self.at = found.end()
            self._skip()
        return found

    def error(
        self, what: str, *, at: int | None = None, expected: str | None = None, suggestion: str | None = None
    ) -> GateError:
        """Return the complaint about what stands at `at`, else about what stands next."""
        position = self.at if at is None else at
        return GateError(what, position=position, expected=expected, suggestion=suggestion)

    def _skip(self) -> None:
        blank = _SPACE.match(self._text, self.at)
        self.at = blank.end() if blank else self.at


def _measure(read: _Reader, *, live: bool) -> Measure:
    known = [name for name, measure in MEASURES.items() if measure.live or not live]
    start = read.at
    name = read.take(_NAME)
    if name is None:
        raise read.error("an expression begins with a name", expected=_one_of(known))
    measure = MEASURES.get(name[0])
    if measure is None:
        guess = _nearest(name[0], known)
        suggestion = f"did you mean `{guess}`?" if guess else None
        expected = None if guess else _one_of(known)
        raise read.error(f"nothing is called `{name[0]}`", at=start, expected=expected, suggestion=suggestion)
    if live and not measure.live:
        what = f"`{measure.name}` is known when the run has ended, not while it goes on"
        suggestion = "ask for it with `--fail-on`"
        raise read.error(what, at=start, expected=_one_of(known), suggestion=suggestion)
    return measure


def _named_run(read: _Reader, measure: Measure) -> str | None:
    start = read.at
    found = read.take(_RUN)
    if found is None and measure.of_run:
        expected = f"`{measure.name}(RUN)`, with a run directory, a part of its name or `latest`"
        raise read.error(f"`{measure.name}` compares with another run", expected=expected)
    if found is None:
        return None
    if not measure.of_run:
        raise read.error(f"`{measure.name}` compares with no other run", at=start, expected="a comparison")
    if not found[1].strip():
        raise read.error("the parentheses are empty", at=start, expected="a run directory, or `latest`")
    return found[1].strip()


def _comparison(read: _Reader, measure: Measure) -> tuple[str, float]:
    start = read.at
    symbol = read.take(_OPERATOR)
    if symbol is None:
        # What is left, if anything, is for the caller to look at: `after N`, or nothing that belongs here.
        if measure.bare and (not read.rest or _AFTER.match(read.rest)):
            return ">", 0.0
        expected = f"{_COMPARISONS} and {_example(measure)}"
        raise read.error(f"`{measure.name}` is compared with nothing", expected=expected)
    if measure.kind == "flag":
        what = f"`{measure.name}` is so or is not, there is nothing to compare"
        raise read.error(what, at=start, suggestion=f"write `{measure.name}` alone")
    if symbol[0] not in _OPERATORS:
        guess = {"=": "==", "=>": ">=", "=<": "<=", "<>": "!="}.get(symbol[0])
        suggestion = f"did you mean `{guess}`?" if guess else None
        raise read.error(
            f"`{symbol[0]}` is no comparison", at=start, expected=_COMPARISONS, suggestion=suggestion
        )
    return symbol[0], _bound(read, measure)


def _bound(read: _Reader, measure: Measure) -> float:
    start = read.at
    number = read.take(_NUMBER)
    if number is None:
        raise read.error("here stands no number", expected=_example(measure))
    value = float(number[0].replace("_", ""))
    units = UNITS[measure.kind]
    unit_at = read.at
    written = "" if _AFTER.match(read.rest) else (_taken(read.take(_UNIT)))
    if written not in units:
        raise _unit_error(read, measure, number[0], written, at=unit_at if written else start)
    if measure.kind == "count" and not value.is_integer():
        raise read.error(f"`{measure.name}` is a whole number", at=start, expected=_example(measure))
    if measure.kind == "fraction" and not written and value > 1:
        what = f"`{number[0]}` without a unit is a fraction, from 0 to 1"
        raise read.error(what, at=start, suggestion=f"did you mean `{number[0]}%`?")
    return value * units[written]


def _unit_error(read: _Reader, measure: Measure, number: str, written: str, *, at: int) -> GateError:
    units = [unit for unit in UNITS[measure.kind] if unit]
    if not written:
        return read.error(
            f"`{number}` has no unit", at=at, expected=_one_of(f"{number}{unit}" for unit in units)
        )
    if not units:
        return read.error(f"`{measure.name}` has no unit", at=at, expected=f"`{number}` alone")
    guess = next((unit for unit in units if unit.lower() == written.lower()), None) or _nearest(
        written, units
    )
    suggestion = f"did you mean `{number}{guess}`?" if guess else None
    return read.error(
        f"`{written}` is no unit of `{measure.name}`", at=at, expected=_one_of(units), suggestion=suggestion
    )


def _warm_up(read: _Reader, measure: Measure) -> int:
    start = read.at
    if read.take(_AFTER) is None:
        return 0
    if not measure.warm_up:
        names = _one_of(name for name, one in MEASURES.items() if one.warm_up)
        what = f"the first steps cannot be left out of `{measure.name}`"
        raise read.error(what, at=start, expected=f"`after` with {names}")
    number = read.take(_WHOLE)
    if number is None:
        raise read.error("here stands no number of steps", expected="a whole number, such as `after 100`")
    return int(number[0].replace("_", ""))


def _example(measure: Measure) -> str:
    examples = {
        "fraction": "a share such as `5%` or `0.05`",
        "bytes": "a size such as `8GiB` or `500MiB`",
        "time": "a time such as `40ms` or `1.5s`",
        "count": "a whole number such as `10`",
        "number": "a number such as `2.5`",
    }
    return examples.get(measure.kind, "nothing")


def _taken(found: re.Match[str] | None) -> str:
    return found[0] if found else ""


def _one_of(names: Iterable[str]) -> str:
    return "one of " + ", ".join(f"`{name}`" for name in names)


def _nearest(name: str, candidates: Iterable[str]) -> str | None:
    options = {candidate.lower(): candidate for candidate in candidates}
    import difflib

    near = difflib.get_close_matches(name.lower(), options, n=1, cutoff=0.6)
    return options[near[0]] if near else None
