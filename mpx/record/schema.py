"""The JSON schema of `run.json`, from the dataclasses that it is written from and read into."""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any

from mpx.record.codec import NON_FINITE, has_default
from mpx.record.model import RunRecord

__all__ = ["record_schema", "record_schema_text"]

_SCALARS: Mapping[Any, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    str: {"type": "string"},
    Any: {},
}


def record_schema_text() -> str:
    """Return the schema as the text of a file."""
    return json.dumps(record_schema(), indent=2) + "\n"


def record_schema() -> dict[str, Any]:
    """Return the schema.

    Of a field that is absent the default holds, and there may be others: a later mpx of the same schema number adds
    fields, and never changes what one means.
    """
    parts: dict[str, Any] = {"number": {"description": "JSON has no NaN and no infinity", **_number()}}
    _define(RunRecord, parts)
    root = parts.pop(RunRecord.__name__)
    root["properties"]["schema"] = {"const": RunRecord.SCHEMA}
    root["required"] = ["schema"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "run.json: the record of an mpx run",
        **root,
        "$defs": dict(sorted(parts.items())),
    }


def _define(cls: Any, parts: dict[str, Any]) -> None:
    """Add the schema of a dataclass, and of those in it, to `parts` by its name."""
    if cls.__name__ in parts:
        return
    parts[cls.__name__] = {}  # known from here on, should it contain itself
    hints = typing.get_type_hints(cls)
    parts[cls.__name__] = {
        "description": " ".join((inspect.getdoc(cls) or "").split()),
        "type": "object",
        "properties": {item.name: _with_default(item, _of(hints[item.name], parts)) for item in fields(cls)},
        "required": [item.name for item in fields(cls) if not has_default(item)],
    }


def _of(hint: Any, parts: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        known = _of(arguments[0], parts)
        if isinstance(known.get("type"), str):
            return {**known, "type": [known["type"], "null"]}
        return {"anyOf": [known, {"type": "null"}]}
    if origin is list:
        return {"type": "array", "items": _of(arguments[0], parts)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of(arguments[1], parts)}
    if is_dataclass(hint):
        _define(hint, parts)
        return {"$ref": f"#/$defs/{typing.cast('type[Any]', hint).__name__}"}
    return {"$ref": "#/$defs/number"} if hint is float else dict(_SCALARS[hint])


def _number() -> dict[str, Any]:
    return {"anyOf": [{"type": "number"}, {"enum": list(NON_FINITE)}]}


def _with_default(item: Field[Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with what an absent field means, where that is a plain value."""
    return (
        {**schema, "default": item.default} if isinstance(item.default, (bool, int, float, str)) else schema
    )
