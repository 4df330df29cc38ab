"""Presets: YAML files that become one complete, frozen `Policy` in which every value knows its origin.

A process that trains reads a policy that the command has resolved: it loads nothing of how that is done. So each name
is loaded at its first use; no module is called as one of them, or importing it would hide the name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpx.presets.overrides import Override, parse_set
    from mpx.presets.policy import Collapse, LossScale, Monitors, Ops, OptimizerSettings, Policy
    from mpx.presets.resolution import PresetInfo, Resolved, list_presets, resolve, show, validate

__all__ = [
    "Collapse",
    "LossScale",
    "Monitors",
    "Ops",
    "OptimizerSettings",
    "Override",
    "Policy",
    "PresetInfo",
    "Resolved",
    "list_presets",
    "parse_set",
    "resolve",
    "show",
    "validate",
]

_HOMES = {
    **dict.fromkeys(("Override", "parse_set"), "overrides"),
    **dict.fromkeys(("PresetInfo", "Resolved", "list_presets", "resolve", "show", "validate"), "resolution"),
}


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'policy')}"), name)
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
