"""Text to values, by the type of the field that it is for and never by what the text looks like."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mpx.presets.policy import FieldSpec
from mpx.presets.tree import Listing, Scalar, Table, Tree

__all__ = [
    "InvalidValueError",
    "nearest",
    "parse_entry",
    "parse_number",
    "parse_value",
    "power_text",
    "spellings",
]

# What people call the half types elsewhere. Names inside are torch's.
_DTYPE_ALIASES: Mapping[str, str] = {
    "fp16": "float16",
    "half": "float16",
    "f16": "float16",
    "torch.float16": "float16",
    "torch.half": "float16",
    "bf16": "bfloat16",
    "torch.bfloat16": "bfloat16",
}
_CAST_ALIASES: Mapping[str, str] = {"fp32": "float32", "float": "float32", "torch.float32": "float32"}
_ALIASES: Mapping[str, Mapping[str, str]] = {
    "dtype": _DTYPE_ALIASES,
    "ddp.comm_dtype": _DTYPE_ALIASES,
    "cast_model_type": _CAST_ALIASES,
}

# TOML and the command line have no null.
_NOTHING = frozenset({"none", "None", "null", "~"})
_TRUTH: Mapping[str, bool] = {
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_YAML_BOOLEANS: Mapping[str, bool] = {
    "yes": True, "y": True, "on": True, "1": True,
    "no": False, "n": False, "off": False, "0": False,
}  # fmt: skip
_SUFFIXES: Mapping[str, int] = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}

_DIGITS = r"\d+(?:_\d+)*"
_PLAIN = re.compile(rf"[+-]?(?:{_DIGITS}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{{1,4}})?", re.ASCII)
_SUFFIXED = re.compile(rf"([+-]?{_DIGITS}(?:\.\d+)?)(Ki|Mi|Gi)", re.ASCII)
_POWER = re.compile(r"(\d{1,6}) ?\*\* ?\(?([+-]?\d{1,4})\)?", re.ASCII)
_LEADING_ZERO = re.compile(r"([+-]?)0[\d_]{1,30}", re.ASCII)

_LARGEST_EXACT_INT = 2**53
# The scales that FP32 holds as normal numbers.
_POWER_RANGE = (2.0**-126, 2.0**127)


class InvalidValueError(Exception):
    """A value that its field cannot take; the caller knows the field and the place."""

    def __init__(self, what: str, expected: str | None = None, suggestion: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.expected = expected
        self.suggestion = suggestion


def parse_value(spec: FieldSpec, tree: Tree) -> Any:
    """Return the value that `tree` gives to the field, or raise `InvalidValueError`."""
    if spec.kind == "list":
        return _list(tree)
    if isinstance(tree, (Listing, Table)):
        raise InvalidValueError("one value is needed", _expected(spec))
    if tree.null or (spec.optional and tree.text in _NOTHING):
        if spec.optional:
            return None
        raise InvalidValueError("the value is missing", _expected(spec), _none_hint(spec))
    return _PARSERS[spec.kind](spec, tree.text)


def parse_number(text: str) -> float:
    """Return the number that `text` writes: `1e4`, `65536.0`, `2**16`, `64Ki`; raise `InvalidValueError` else."""
    stripped = text.strip()
    if match := _LEADING_ZERO.fullmatch(stripped):
        raise _leading_zero(stripped, match[1])
    try:
        number = _number(stripped)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidValueError("the number is too large for a float")
    return number


def power_text(power: float) -> str:
    """Return a power of two as people write it: `128`, `2**16`, `2**-14`."""
    exponent = math.frexp(power)[1] - 1
    return str(2**exponent) if 0 <= exponent <= 12 else f"2**{exponent}"


def spellings(spec: FieldSpec) -> list[str]:
    """Return every word that a file may write for a choice: its values, and what they are called elsewhere."""
    return [*spec.written, *_ALIASES.get(spec.key, {})]


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that was probably meant, if any is near."""
    options = {candidate.lower(): candidate for candidate in candidates}
    import difflib

    close = difflib.get_close_matches(name.lower(), options, n=1, cutoff=0.6)
    return options[close[0]] if close else None


def _number(text: str) -> float:
    if _PLAIN.fullmatch(text):
        return float(text.replace("_", ""))
    if match := _SUFFIXED.fullmatch(text):
        return float(match[1].replace("_", "")) * _SUFFIXES[match[2]]
    if match := _POWER.fullmatch(text):
        base, exponent = int(match[1]), int(match[2])
        if base == 0 and exponent < 0:
            raise InvalidValueError("the number is too large for a float")
        return float(base) ** exponent
    if text.lower().lstrip("+-.") in ("inf", "infinity", "nan"):
        raise InvalidValueError("the number must be finite")
    raise InvalidValueError("this is not a number")


def _leading_zero(text: str, sign: str) -> InvalidValueError:
    digits = text.replace("_", "").lstrip("+-")
    decimal = sign + (digits.lstrip("0") or "0")
    if set(digits) <= set("01234567"):
        octal = f"{sign}{int(digits, 8)}"
        what = f"a leading zero is ambiguous (YAML 1.1 reads {text} as the octal number {octal})"
        choice = f"write `{decimal}` or `{octal}`" if octal != decimal else f"write `{decimal}`"
        return InvalidValueError(what, suggestion=choice)
    return InvalidValueError("a leading zero is ambiguous", suggestion=f"write `{decimal}`")


def _bool(spec: FieldSpec, text: str) -> bool:
    if text in _TRUTH:
        return _TRUTH[text]
    meant = _YAML_BOOLEANS.get(text.lower())
    if meant is None:
        raise InvalidValueError("this is not a boolean", _expected(spec))
    word = "true" if meant else "false"
    what = f"`{text}` is not read as a boolean here, because YAML's versions disagree on it"
    raise InvalidValueError(what, _expected(spec), f"write `{word}`")


def _int(spec: FieldSpec, text: str) -> int:
    number = _parse_number_for(spec, text)
    if not number.is_integer():
        raise InvalidValueError("the number is not whole", _expected(spec))
    if abs(number) > _LARGEST_EXACT_INT:
        raise InvalidValueError("the number is too large", _expected(spec))
    return int(_in_range(spec, number))


def _float(spec: FieldSpec, text: str) -> float:
    return _in_range(spec, _parse_number_for(spec, text))


def _parse_number_for(spec: FieldSpec, text: str) -> float:
    """Return the number, or say what the field expects."""
    try:
        return parse_number(text)
    except InvalidValueError as error:
        raise InvalidValueError(error.what, _expected(spec), error.suggestion) from None


def _in_range(spec: FieldSpec, number: float) -> float:
    if spec.power_of_two:
        _check_power(spec, number)
    outside = (
        (spec.at_least is not None and number < spec.at_least)
        or (spec.above is not None and number <= spec.above)
        or (spec.below is not None and number >= spec.below)
    )
    if outside:
        raise InvalidValueError("the number is out of range", _expected(spec))
    return number


def _check_power(spec: FieldSpec, number: float) -> None:
    low, high = _POWER_RANGE
    if number <= 0:
        raise InvalidValueError("the number is not positive", _expected(spec))
    if not low <= number <= high:
        raise InvalidValueError("the number is outside 2**-126 to 2**127, the range of FP32", _expected(spec))
    if math.frexp(number)[0] != 0.5:  # the mantissa that every power of two has
        below = 2.0 ** math.floor(math.log2(number))
        near = below if number - below <= 2 * below - number else 2 * below
        what = "the number is not a power of two, so multiplying by it would round"
        raise InvalidValueError(what, _expected(spec), f"the nearest is `{power_text(near)}`")


def _str(spec: FieldSpec, text: str) -> str:
    if not text.strip() and spec.key == "name":
        raise InvalidValueError("the name is empty", _expected(spec))
    return text


def _choice(spec: FieldSpec, text: str) -> str:
    name = _ALIASES.get(spec.key, {}).get(text, text)
    if name in spec.written:
        return name
    if spec.key == "cast_model_type" and text in {*_DTYPE_ALIASES, *_DTYPE_ALIASES.values()}:
        what = "the half type is named by `dtype`"
        raise InvalidValueError(what, _expected(spec), "write `half`, and `dtype` beside it")
    guess = nearest(text, spellings(spec))
    suggestion = f"did you mean `{_ALIASES.get(spec.key, {}).get(guess, guess)}`?" if guess else None
    raise InvalidValueError("there is no such value", _expected(spec), suggestion)


def _list(tree: Tree) -> tuple[str, ...]:
    if isinstance(tree, Listing):
        return tuple(parse_entry(item) for item in tree.items)
    suggestion = None
    if isinstance(tree, Scalar):
        suggestion = "write `[]`" if tree.null else f"write `[{tree.text}]`"
    raise InvalidValueError("a list is needed", "a list of names", suggestion)


def parse_entry(tree: Tree) -> str:
    """Return the name that is one entry of a list, or raise `InvalidValueError`."""
    if isinstance(tree, Scalar) and not tree.null and tree.text.strip():
        return tree.text
    raise InvalidValueError("an entry of the list is not a name", "a list of names")


def _none_hint(spec: FieldSpec) -> str | None:
    return "did you mean `none`?" if "none" in spec.written else None


def _expected(spec: FieldSpec) -> str:
    """Return what the field takes, in words made from its spec."""
    if spec.choices:
        text = " or ".join(f"`{choice}`" for choice in (*spec.written, *(["null"] if spec.optional else [])))
    elif spec.kind == "bool":
        text = "`true`, `false` or `null`" if spec.optional else "`true` or `false`"
    elif spec.kind == "str":
        text = "text"
    else:
        noun = "a whole number" if spec.kind == "int" else "a number"
        if spec.power_of_two:
            noun = "a power of two"
        limits = [
            f"of at least {spec.at_least:g}" if spec.at_least is not None else "",
            f"above {spec.above:g}" if spec.above is not None else "",
            f"below {spec.below:g}" if spec.below is not None else "",
        ]
        text = " ".join([noun, *filter(None, limits)])
        if spec.power_of_two and spec.above is None and spec.below is None:
            text += " such as `128` or `2**16`"
    return text


_PARSERS: Mapping[str, Callable[[FieldSpec, str], Any]] = {
    "bool": _bool,
    "int": _int,
    "float": _float,
    "str": _str,
    "choice": _choice,
}
