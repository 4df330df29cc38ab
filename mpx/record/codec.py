"""JSON of dataclasses, derived from their fields, in both directions.

JSON has no infinity and no NaN, and a report on precision is full of them: they are written as the strings
`inf`, `-inf` and `nan`, so that every JSON parser can read a record, and come back as floats.
"""

from __future__ import annotations

import functools
import json
import math
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar

from mpx.errors import RecordError

__all__ = ["NON_FINITE", "dumps", "from_json", "has_default", "plain"]

T = TypeVar("T")
OnError = Callable[[RecordError], None]

NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def plain(value: Any) -> Any:
    """Return `value` as what JSON can hold.

    Scalars of array libraries become numbers; a value of any other kind becomes its text.
    """
    result = value
    if isinstance(value, float):
        result = value if math.isfinite(value) else str(float(value))
    elif is_dataclass(value) and not isinstance(value, type):
        result = {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    elif isinstance(value, Mapping):
        result = {str(key): plain(item) for key, item in value.items()}
    elif isinstance(value, (list, tuple, set, frozenset)):
        result = [plain(item) for item in value]
    elif callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:
        result = plain(value.item())
    elif value is not None and not isinstance(value, (bool, int, str)):
        result = str(value)
    return result


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Return strict JSON: every parser reads it."""
    separators = None if indent else (",", ":")
    return json.dumps(plain(value), indent=indent, separators=separators, allow_nan=False)


def from_json(cls: type[T], data: Any, *, on_error: OnError | None = None, where: str = "") -> T:
    """Return the dataclass `cls` that `data` describes; unknown keys (of a later mpx) are left out.

    Args:
        cls: A dataclass whose fields are annotated with what JSON can hold.
        data: What `json.loads` returned.
        on_error: Receives what does not fit, and the field takes its default instead; without it the first
            misfit is raised. A field without a default always raises.
        where: The path of `data` in the document, for the message.
    """
    if not isinstance(data, Mapping):
        raise _misfit(where or cls.__name__, "an object", data)
    values = {}
    for name, field, hint in _fields(typing.cast("Hashable", cls)):
        if name not in data:
            if not has_default(field):
                raise RecordError(f"`{_join(where, name)}` is missing")
            continue
        try:
            values[name] = _decode(hint, data[name], on_error, _join(where, name))
        except RecordError as error:
            if on_error is None or not has_default(field):
                raise
            on_error(error)
    return cls(**values)


def _decode(hint: Any, data: Any, on_error: OnError | None, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (data is None and type(None) in arguments):
        return data
    if origin in (types.UnionType, typing.Union):
        return _decode(arguments[0], data, on_error, where)
    if origin is list:
        return _decode_list(arguments[0], data, on_error, where)
    if origin is dict:
        return _decode_dict(arguments[1], data, on_error, where)
    if is_dataclass(hint):
        return from_json(typing.cast("type[Any]", hint), data, on_error=on_error, where=where)
    return _decode_scalar(hint, data, where)


def _decode_list(item: Any, data: Any, on_error: OnError | None, where: str) -> list[Any]:
    if not isinstance(data, (list, tuple)):
        raise _misfit(where, "a list", data)
    if item is float and all(type(value) in (float, int) for value in data):
        return [float(value) for value in data]  # series: most of what a record holds
    return [_decode(item, value, on_error, f"{where}[{index}]") for index, value in enumerate(data)]


def _decode_dict(item: Any, data: Any, on_error: OnError | None, where: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise _misfit(where, "an object", data)
    return {str(key): _decode(item, value, on_error, _join(where, str(key))) for key, value in data.items()}


def _decode_scalar(hint: Any, data: Any, where: str) -> Any:
    if hint is float:
        if isinstance(data, str) and data in NON_FINITE:
            return NON_FINITE[data]
        if isinstance(data, (int, float)) and not isinstance(data, bool):
            return float(data)
        raise _misfit(where, "a number", data)
    if hint is int and isinstance(data, float) and data.is_integer():
        return int(data)
    if not isinstance(data, hint) or (hint is int and isinstance(data, bool)):
        raise _misfit(where, {int: "a whole number", str: "a text", bool: "true or false"}[hint], data)
    return data


@functools.cache
def _fields(cls: Hashable) -> tuple[tuple[str, Field[Any], Any], ...]:
    record = typing.cast("type[Any]", cls)
    hints = typing.get_type_hints(record)
    return tuple((field.name, field, hints[field.name]) for field in fields(record))


def has_default(field: Field[Any]) -> bool:
    """Tell whether a field may be left out of the data."""
    return field.default is not MISSING or field.default_factory is not MISSING


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _misfit(where: str, expected: str, data: Any) -> RecordError:
    text = repr(data)
    return RecordError(f"`{where}` does not fit. Expected {expected}. Received: {text[:80]}")
