"""Presets: YAML files that become one complete, frozen `Policy` in which every value knows its origin."""

from __future__ import annotations

from mpx.presets.overrides import Override, parse_set
from mpx.presets.policy import Collapse, LossScale, Monitors, Ops, OptimizerGuards, Policy
from mpx.presets.resolve import PresetInfo, Resolved, list_presets, resolve, validate
from mpx.presets.show import show_policy

__all__ = [
    "Collapse",
    "LossScale",
    "Monitors",
    "Ops",
    "OptimizerGuards",
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


def show(resolved: Resolved, *, origin: bool = False) -> str:
    """Return the resolved preset as YAML; with `origin`, each line says where its value is from."""
    return show_policy(resolved.policy, resolved.origin if origin else None)
