"""The JSON schema of preset files, for editors: from the tree that the loader reads by."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mpx.presets.gate_entries import EXPRESSION, GATE_KEYS, WARM_UP
from mpx.presets.policy import SCHEMA, FieldSpec, field_specs, group_names
from mpx.presets.settings import EXTENDS
from mpx.presets.shipped import configs_dir
from mpx.presets.values import spellings

__all__ = ["SCHEMA_FILE", "preset_schema", "preset_schema_text"]

SCHEMA_FILE = "mpx.schema.json"  # beside the presets

# `2**16`, `64Ki`, `1e4`, `65_536`: what YAML takes for text and we for a number.
_NUMBER_AS_TEXT = {
    "type": "string",
    "pattern": r"^[+-]?[0-9.][0-9_.eE+-]*( ?\*\* ?\(?[+-]?[0-9]+\)?|[KMG]i)?$",
}
_NAME = {"type": "string", "minLength": 1}
_GATE = {
    "type": "object",
    "properties": {EXPRESSION: _NAME, WARM_UP: {"type": "integer", "minimum": 0}},
    "required": [EXPRESSION],
    "additionalProperties": False,
}
_DOCUMENTED = "O0.yaml"  # it has every key, with its meaning beside it
_KEY = re.compile(r"( *)([a-z]\w*):")


def preset_schema_text() -> str:
    """Return the schema as the text of a file."""
    return json.dumps(preset_schema(), indent=2, ensure_ascii=False) + "\n"


def preset_schema() -> dict[str, Any]:
    """Return the schema of a preset or project file.

    It knows keys, types, choices and limits. That a scale is a power of two, that an operation exists and that values
    agree with each other, the loader checks (`mpx presets validate`).
    """
    meanings = _meanings((configs_dir() / _DOCUMENTED).read_text(encoding="utf-8"))
    groups = {name: _object() for name in sorted(group_names())}
    root = _object()
    root["properties"][EXTENDS] = {
        "description": "the preset to start from: the name of a level, or the path of a file",
        "type": "string",
    }
    for key, spec in field_specs().items():
        group, _, name = key.rpartition(".")
        owner = groups[group] if group else root
        described = {"description": meanings[key]} if key in meanings else {}
        owner["properties"][name] = {**described, **_of(spec)}
        if spec.kind == "list":
            owner["properties"][f"{name}+"] = {
                "description": f"added to `{name}` of `{EXTENDS}`",
                **_of(spec),
            }
        if group:
            root["properties"].setdefault(group, _group(group, groups[group], meanings))
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A preset of mpx",
        **root,
        "patternProperties": {rf"^({'|'.join(groups)})\.\w+\+?$": {}},
    }


def _object() -> dict[str, Any]:
    return {"type": "object", "properties": {}, "additionalProperties": False}


def _group(name: str, members: dict[str, Any], meanings: Mapping[str, str]) -> dict[str, Any]:
    described = {"description": meanings[name]} if name in meanings else {}
    if name != "loss_scale":
        return {**described, **members}
    specs = field_specs()
    return {
        **described,
        "anyOf": [members, _of(specs["loss_scale.mode"]), *_of(specs["loss_scale.init"])["anyOf"]],
    }


def _of(spec: FieldSpec) -> dict[str, Any]:
    if spec.key == "schema":
        return {"const": SCHEMA}
    if spec.kind == "choice":
        return {"enum": [*spellings(spec), *([None] if spec.optional else [])]}
    if spec.key in GATE_KEYS:
        return {"anyOf": [{"type": "array", "items": {"anyOf": [_NAME, _GATE]}}, _GATE]}
    if spec.kind == "list":
        return {"type": "array", "items": _NAME}
    if spec.kind in ("int", "float"):
        return {"anyOf": [_number(spec), _NUMBER_AS_TEXT]}
    name = {"bool": "boolean", "str": "string"}[spec.kind]
    return {"type": [name, "null"] if spec.optional else name}


def _number(spec: FieldSpec) -> dict[str, Any]:
    above = 0 if spec.power_of_two and spec.above is None else spec.above
    limits = {"minimum": spec.at_least, "exclusiveMinimum": above, "exclusiveMaximum": spec.below}
    kind = "integer" if spec.kind == "int" else "number"
    return {"type": kind, **{name: limit for name, limit in limits.items() if limit is not None}}


def _meanings(text: str) -> dict[str, str]:
    """Return what the comments of a preset say about each key: those above it, and the one at its line's end."""
    meanings: dict[str, str] = {}
    above: list[str] = []
    group = ""
    for line in text.splitlines():
        comment = line.strip().removeprefix("#").strip() if line.strip().startswith("#") else None
        key = _KEY.match(line)
        if comment is not None:
            above.append(comment)
        elif key is None:
            above = []
        else:
            group = key[2] if not key[1] else group
            name = f"{group}.{key[2]}" if key[1] else key[2]
            _, _, beside = line.partition(" # ")
            told = "\n".join([*above, *([beside.strip()] if beside else [])])
            if told:
                meanings[name] = told
            above = []
    return meanings
