"""Op rules: which dtype an op computes in, made real as kernels on the autocast key of the dispatcher.

The lists are data (`configs/ops/*.yaml`, the preset and the command line); this file turns their lines into
`torch.library` kernels. A kernel on the autocast key is reached by functions, methods, C++ composites and compiled code
alike, only while a region is active, and goes away when its `Library` is destroyed. Where torch's own list already does
what a line says, nothing is registered: its C++ kernel is faster than ours (about 7 us a call).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from mpx.engine.kernels import KERNELS, overload
from mpx.errors import PresetError
from mpx.presets.groups import op_group

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from mpx.engine.devices import Device
    from mpx.engine.kernels import Report
    from mpx.presets.policy import Policy

__all__ = ["OpRules", "Rule", "resolve_op", "rules_of"]

# In rising order of strength: where two lists of a preset have an op, the one that keeps more precision is used.
LISTS = ("half", "native", "promote", "float32", "compute_float32")
USER_LISTS = {"user_half": "half", "user_float32": "float32"}
BY_GROUP, BY_NAME, BY_USER = range(
    3
)  # who asked for a rule; a later one is asked for more specifically, and wins


@dataclass(frozen=True)
class Rule:
    """One op overload and what happens to it.

    Attributes:
        op: Overload name as the dispatcher knows it, "aten::softmax.int".
        kind: The list it stands in, a key of `KERNELS`.
        facts: The attributes of its line and its group. When it is used: `torch`, `device`, `dtype`, `weights`, `has`,
            `without`, `ratio`. How: `direction`, `number`, `layout`, `by`, `writes`, `steps_a_cast`.
        told: How its use is told as a substitution; empty where the list is what the level stands for.
        asked: `BY_GROUP`, `BY_NAME` or `BY_USER`.
    """

    op: str
    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    told: str = ""
    asked: int = BY_USER

    def applies(self, device: Device, policy: Policy, capabilities: frozenset[str]) -> bool:
        """Whether the line is meant for this device, which has these capabilities, and preset."""
        facts = self.facts
        return (
            facts.get("device", device.type) == device.type
            and facts.get("dtype", policy.dtype) == policy.dtype
            and facts.get("weights", policy.cast_model_type) == policy.cast_model_type
            and capabilities.issuperset(facts.get("has", ()))
            and capabilities.isdisjoint(_without(facts, policy.dtype))
            and facts.get("ratio", float("inf")) > policy.slow_kernel_ratio
        )

    def is_torchs_own(self, device: Device) -> bool:
        """Whether torch's own autocast list does the same on this device, in the torch that is installed."""
        return device.type in self.facts.get("torch", ()) and _has_kernel(self.op, device.autocast_key)

    @property
    def strength(self) -> tuple[int, int]:
        """What decides between the rules of one op."""
        return self.asked, LISTS.index(self.kind)


def _without(facts: Mapping[str, Any], half: str) -> Iterable[str]:
    """Return the capabilities of which each alone makes a line needless, where they depend on the half type or not."""
    named = facts.get("without", ())
    found: Iterable[str] = named[half] if isinstance(named, dict) else named
    return found


def resolve_op(name: str) -> list[str]:
    """Return the overloads on tensors that `name` means.

    "aten::softmax.int" is one; "softmax", "torch.softmax" and "torch.nn.functional.softmax" mean all of them, without
    those that write into an argument given as `out`.

    Raises:
        PresetError: The installed torch has no such op.
    """
    namespace, _, bare = name.rpartition("::")
    found = next((packet for packet in _packets(bare) if hasattr(torch.ops.aten, packet[0])), None)
    if namespace not in ("", "aten") or found is None:
        from mpx.presets.values import nearest

        guess = nearest(bare.rpartition(".")[2], _op_names())
        raise _unknown(name, f"did you mean `{guess}`?" if guess else None)
    packet, variant = found
    on_tensors = list(_on_tensors(packet))
    chosen = [op for op in on_tensors if not variant or op == _joined(packet, variant)]
    if not chosen:
        raise _unknown(name, f"there is: {', '.join(on_tensors)}" if on_tensors else None)
    return chosen


def _on_tensors(packet: str) -> Iterator[str]:
    """Yield the overloads that compute tensors, and not into one given as `out`."""
    for variant in getattr(torch.ops.aten, packet).overloads():
        op = _joined(packet, variant)
        if torch._C._dispatch_has_kernel(op) and not any(a.is_out for a in overload(op)._schema.arguments):
            yield op


def _joined(packet: str, variant: str) -> str:
    return f"aten::{packet}" if variant == "default" else f"aten::{packet}.{variant}"


def _packets(bare: str) -> Iterator[tuple[str, str]]:
    """Yield what a name may mean as (op, overload): the path of a Python function, or an op with its overload."""
    *path, last = bare.split(".")
    if path and path[0] in PYTHON_ROOTS:
        if path[-1] in ("linalg", "fft", "special"):
            yield f"{path[-1]}_{last}", ""
        yield last, ""
    else:
        yield path[0] if path else last, last if path else ""


PYTHON_ROOTS = ("torch", "F", "Tensor")


@cache
def _op_names() -> list[str]:
    names = (
        op.removeprefix("aten::") for op in torch._C._dispatch_get_all_op_names() if op.startswith("aten::")
    )
    return sorted({name.partition(".")[0] for name in names if not name.startswith("_")})


def _unknown(name: str, hint: str | None) -> PresetError:
    return PresetError(
        f"torch {torch.__version__} has no op `{name}` on tensors. "
        "Expected a name such as `aten::softmax.int`, `softmax` or `torch.softmax`",
        hint=hint,
    )


def _has_kernel(op: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op, key))


def rules_of(policy: Policy) -> dict[str, list[Rule]]:
    """Return the rules of a policy by op; several for one op where lists overlap or conditions differ.

    Raises:
        PresetError: A list names an op that torch does not have, or asks one that writes in place for another type.
    """
    rules: dict[str, list[Rule]] = {}
    for kind in LISTS:
        for entry in getattr(policy.ops, kind):
            for rule in _group(entry[1:], kind) if entry.startswith("@") else _named(entry, kind, BY_NAME):
                rules.setdefault(rule.op, []).append(rule)
    for user_list, kind in USER_LISTS.items():
        for entry in getattr(policy.ops, user_list):
            for rule in _group(entry[1:], kind) if entry.startswith("@") else _named(entry, kind, BY_USER):
                rules.setdefault(rule.op, []).append(replace(rule, asked=BY_USER))
    return rules


def _group(name: str, kind: str) -> Iterator[Rule]:
    group = op_group(name)
    for op, line in group["ops"].items():
        if torch._C._dispatch_has_kernel(op):  # an older or newer torch may lack an op of the shipped lists
            facts = group.get("facts", {}) | (line or {})
            told = group.get("told", {})
            yield Rule(op, kind, facts, told.get(facts.get("number", "default"), ""), BY_GROUP)


def _named(name: str, kind: str, asked: int) -> Iterator[Rule]:
    for op in resolve_op(name):
        if kind in ("half", "float32") and overload(op)._schema.is_mutable:
            raise PresetError(
                f"`{name}` writes into its argument, whose type cannot change. "
                f"Expected an op that returns a new tensor. Received it in `{kind}`",
                hint=f"name `{bare}`" if (bare := name.rstrip("_")) != name else None,
            )
        yield Rule(op, kind, asked=asked)


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
            library = torch.library.Library("aten", "IMPL")  # undone by `remove`
            self._libraries.append(library)
            with warnings.catch_warnings():
                # torch warns that a kernel of its own list is overridden: that is what a rule is for
                warnings.simplefilter("ignore", UserWarning)
                for rule in self._chosen(rules, device):
                    self._register(library, rule, device)

    def ask(self, name: str, kind: str) -> None:
        """Add an op to the user's list of a kind, as an option of the command line would have.

        Raises:
            PresetError: There is no such op, or it writes in place.
        """
        ops = self._policy.ops
        asked = f"user_{kind}"
        list(_named(name, kind, BY_USER))  # refuses before anything has changed
        self._policy = replace(self._policy, ops=replace(ops, **{asked: (*getattr(ops, asked), name)}))
        if self._libraries:
            self.remove()
            self.install()

    def remove(self) -> None:
        """Take every kernel away; torch's own are back afterwards."""
        for library in self._libraries:
            library._destroy()
        self._libraries.clear()

    def _chosen(self, rules: Mapping[str, list[Rule]], device: Device) -> Iterator[Rule]:
        """Yield one rule for an op: the strongest of those that apply."""
        capabilities = device.capabilities()
        for candidates in rules.values():
            fitting = [rule for rule in candidates if rule.applies(device, self._policy, capabilities)]
            if not fitting:
                continue
            strongest = max(fitting, key=lambda rule: rule.strength)  # the first of equals
            if strongest.kind == "half":
                # a reroute is half outside, so it is also what somebody gets who asks for half
                strongest = next((rule for rule in fitting if rule.kind == "compute_float32"), strongest)
            yield strongest

    def _register(self, library: torch.library.Library, rule: Rule, device: Device) -> None:
        if rule.kind == "native" and not _has_kernel(rule.op, device.autocast_key):
            return  # torch does not list it either: nothing to take off
        if rule.kind != "native" and not rule.told and rule.is_torchs_own(device):
            return
        direction = str(rule.facts.get("direction", "")).replace("_", " ")
        told = rule.told.format(half=self._policy.dtype, device=device.type, direction=direction)
        kernel = KERNELS[rule.kind](replace(rule, told=told), device, self._report)
        library.impl(rule.op.removeprefix("aten::"), kernel, device.autocast_key)
