"""A policy as the YAML of a complete preset: reading it back gives the same policy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mpx.presets.policy import Policy
from mpx.presets.yaml_file import quote

__all__ = ["show_policy", "show_value"]

_PLAIN_TEXT = re.compile(r"[A-Za-z_][\w./-]*", re.ASCII)
# What some YAML reader or other takes for something else than text.
_NOT_TEXT = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
_COMMENT_COLUMN = 40
# Every key is written, so nothing is taken from it today: it answers for the keys that a later mpx adds.
_BASE = "O0"


def show_policy(policy: Policy, origin: Mapping[str, str] | None = None) -> str:
    """Return the YAML text of a policy; with `origin`, each line says where its value is from."""
    return "".join(f"{line}\n" for line in _lines(policy.flat(), origin or {}))


def show_value(value: Any) -> str:
    """Return a value of a policy as YAML that our reader and every other one reads alike."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        plain = _PLAIN_TEXT.fullmatch(value) and value.lower() not in _NOT_TEXT
        return value if plain else quote(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(quote(entry) for entry in value) + "]"
    return str(value)


def _lines(values: Mapping[str, Any], origin: Mapping[str, str]) -> Iterator[str]:
    group = ""
    yield f"extends: {_BASE}"
    for key, value in values.items():
        parent, _, name = key.rpartition(".")
        if parent and parent != group:
            yield f"{parent}:"
        group = parent
        line = f"{'  ' if parent else ''}{name}: {show_value(value)}"
        if key in origin:
            comment = " ".join(origin[key].split())
            line = f"{line:<{_COMMENT_COLUMN}} # {comment}"
        yield line


def _number(value: float) -> str:
    if value.is_integer():
        return str(int(value))
    mantissa, mark, exponent = repr(value).partition("e")
    # YAML 1.1 reads a number without a point as text: `1e-05`.
    return f"{mantissa}.0e{exponent}" if mark and "." not in mantissa else repr(value)
