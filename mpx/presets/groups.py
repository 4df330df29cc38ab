"""The groups of operations as data: what `configs/ops/*.yaml` say of each operation.

The command reads those that a run needs, and hands them over in the run directory: a process that trains loads no
YAML reader for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpx.presets.policy import Policy

__all__ = ["groups_of", "hand_over", "op_group"]

_known: dict[str, Mapping[str, Any]] = {}


def op_group(name: str) -> Mapping[str, Any]:
    """Return what the file of a group holds, from the file unless it was handed over."""
    if name not in _known:
        _known[name] = _read(name)
    return _known[name]


def groups_of(policy: Policy) -> dict[str, Mapping[str, Any]]:
    """Return the groups that a policy refers to, by their names without the `@`."""
    entries = (entry for key, value in policy.flat().items() if key.startswith("ops.") for entry in value)
    return {entry[1:]: op_group(entry[1:]) for entry in entries if entry.startswith("@")}


def hand_over(groups: Mapping[str, Mapping[str, Any]]) -> None:
    """Take groups as somebody else has read them."""
    _known.update(groups)


def _read(name: str) -> Mapping[str, Any]:
    import yaml

    from mpx.presets.shipped import configs_dir
    from mpx.presets.yaml_file import SHIPPED_LOADER

    text = (configs_dir() / "ops" / f"{name}.yaml").read_bytes()
    read: Mapping[str, Any] = yaml.load(text, SHIPPED_LOADER)  # noqa: S506 - it is a safe one
    return read
