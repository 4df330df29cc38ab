"""Op rules: which dtype an op computes in, made real as kernels on the autocast key of the dispatcher.

The lists are data (`configs/ops/*.yaml`, the preset and the command line); this file turns their lines into `torch.library` kernels. A kernel
on the autocast key is reached by functions, methods, C++ composites and compiled code alike, only while a region is active, and goes
away when its `Library` is destroyed. Where torch's own list already does what a line says, nothing is registered: its C++ kernel is
faster than ours (about 7 us a call).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import yaml

from mpx.engine.kernels import KERNELS
from mpx.errors import PresetError
from mpx.presets.files import configs_dir

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from mpx.engine.devices import Device
    from mpx.engine.kernels import Report
    from mpx.presets.policy import Policy

__all__ = ["OpRules", "Rule", "resolve_op", "rules_of"]

LISTS = ("half", "float32", "promote", "native", "compute_float32")
USER_LISTS = {"user_half": "half", "user_float32": "float32"}


@dataclass(frozen=True)
class Rule:
    """One op overload and what happens to it.

    Attributes:
        op: Overload name as the dispatcher knows it, "aten::softmax.int".
        kind: The list it stands in, a key of `KERNELS`.
        facts: The attributes of its line: `torch`, `device`, `dtype`, `without`, `ratio`, `direction`, `scalar`.
        told: How its use is told as a substitution; empty where the list is what the level stands for.
    """

    op: str
    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    told: str = ""

    def applies(self, device: Device, half: str, slow_ratio: float) -> bool:
        """Whether the line is meant for this device, half type and preset."""
        facts = self.facts
        return (
            facts.get("device", device.type) == device.type
            and facts.get("dtype", half) == half
            and facts.get("without") not in device.capabilities()
            and facts.get("ratio", float("inf")) > slow_ratio
        )

    def is_torchs_own(self, device: Device) -> bool:
        """Whether torch's own autocast list does the same on this device, in the torch that is installed."""
        return device.type in self.facts.get("torch", ()) and torch._C._dispatch_has_kernel_for_dispatch_key(
            self.op, device.autocast_key
        )


def resolve_op(name: str) -> list[str]:
    """Return the overloads that `name` means: "aten::softmax.int" one; "softmax", "torch.softmax" or "F.softmax" all that compute floats.

    Raises:
        PresetError: The installed torch has no such op.
    """
    packet, _, overload = name.removeprefix("aten::").rpartition("::")[-1].partition(".")
    if name.startswith(("torch.", "F.", "nn.")):
        packet, overload = name.rpartition(".")[-1], ""
    found = getattr(torch.ops.aten, packet, None)
    if found is None or (overload and overload not in found.overloads()):
        raise PresetError(
            f"torch {torch.__version__} has no op `{name}`. Expected a name such as `aten::softmax.int`, `softmax` or `torch.softmax`",
            hint="list the overloads with `python -c 'import torch; print(torch.ops.aten.softmax.overloads())'`",
        )
    chosen = [overload] if overload else [o for o in found.overloads() if not o.endswith(("out", "_out"))]
    return [f"aten::{packet}" + ("" if o == "default" else f".{o}") for o in chosen]


def rules_of(policy: Policy) -> dict[str, list[Rule]]:
    """Return the rules of a policy by op; several for one op where their conditions differ. What the user named replaces all else."""
    rules: dict[str, list[Rule]] = {}
    for kind in LISTS:
        for op, facts, told in _expand(getattr(policy.ops, kind)):
            rules.setdefault(op, []).append(Rule(op, kind, facts, told))
    for user_list, kind in USER_LISTS.items():
        for op, facts, _ in _expand(getattr(policy.ops, user_list)):
            rules[op] = [Rule(op, kind, facts)]
    return rules


def _expand(entries: Iterable[str]) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    for entry in entries:
        if entry.startswith("@"):
            group = yaml.safe_load((configs_dir() / "ops" / f"{entry[1:]}.yaml").read_text(encoding="utf-8"))
            for op, facts in group["ops"].items():
                if torch._C._dispatch_has_kernel(op):  # an older or newer torch may lack an op of the shipped lists
                    yield op, facts or {}, group.get("told", "")
        else:
            for op in resolve_op(entry):
                yield op, {}, ""


class OpRules:
    """The rules of one session, registered on the dispatcher and taken away again."""

    def __init__(self, policy: Policy, devices: Iterable[Device], report: Report) -> None:
        self._policy = policy
        self._devices = [device for device in devices if device.available()]
        self._report = report
        self._libraries: list[torch.library.Library] = []

    def install(self) -> None:
        """Register a kernel for each rule that torch's own list does not already carry out."""
        rules = rules_of(self._policy)
        for device in self._devices:
            library = torch.library.Library("aten", "IMPL")  # noqa: TOR901 - undone by remove()
            self._libraries.append(library)
            for rule in self._chosen(rules, device):
                self._register(library, rule, device)

    def remove(self) -> None:
        """Take every kernel away; torch's own are back afterwards."""
        for library in self._libraries:
            library._destroy()
        self._libraries.clear()

    def _chosen(self, rules: Mapping[str, list[Rule]], device: Device) -> Iterator[Rule]:
        """Yield one rule for an op: of those that apply, the last, so a slow kernel's reroute wins over the family it belongs to."""
        for candidates in rules.values():
            fitting = [r for r in candidates if r.applies(device, self._policy.dtype, self._policy.slow_kernel_ratio)]
            if fitting:
                yield fitting[-1]

    def _register(self, library: torch.library.Library, rule: Rule, device: Device) -> None:
        if rule.kind == "native" and not torch._C._dispatch_has_kernel_for_dispatch_key(rule.op, device.autocast_key):
            return  # torch does not list it either: nothing to take off
        if rule.kind != "native" and not rule.told and rule.is_torchs_own(device):
            return
        kernel = KERNELS[rule.kind](rule, device, self._policy.dtype, self._report)
        with warnings.catch_warnings():
            # torch warns that a kernel of its own list is overridden: that is what a rule is for
            warnings.simplefilter("ignore", UserWarning)
            library.impl(rule.op.removeprefix("aten::"), kernel, device.autocast_key)
