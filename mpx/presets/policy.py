"""The policy: what a preset becomes once nothing in it is open any more.

This tree is the schema. Files, overrides, `show` and the codec are derived from its fields, so a new setting is one
line here and its value in the base presets. Numbers live in `configs/`, never here.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mpx.errors import PresetError
from mpx.values import frozen, frozen_by_keywords

__all__ = [
    "FIRST_SCHEMA",
    "SCHEMA",
    "Collapse",
    "Ddp",
    "FieldSpec",
    "ForwardOverflow",
    "LossScale",
    "Monitors",
    "Ops",
    "OptimizerSettings",
    "Policy",
    "field_specs",
    "group_names",
]

# The version of the file format that this code writes and reads, and that of a file which does not say.
SCHEMA = 1
FIRST_SCHEMA = 1


def _number(
    *,
    power_of_two: bool = False,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    limits = {"power_of_two": power_of_two, "at_least": at_least, "above": above, "below": below}
    return field(metadata=limits)


def _choice(*, unresolved: tuple[str, ...]) -> Any:
    """Return a field that files may also set to `unresolved`, which a policy never holds."""
    return field(metadata={"unresolved": unresolved})


@frozen_by_keywords
class LossScale:
    """How the loss is scaled. Scales and factors are powers of two: multiplying by one is exact."""

    mode: Literal["dynamic", "static", "none"] = _choice(unresolved=("auto",))
    init: float = _number(power_of_two=True)
    growth_factor: float = _number(power_of_two=True, above=1.0)
    backoff_factor: float = _number(power_of_two=True, below=1.0)
    growth_interval: int = _number(at_least=1)
    min: float = _number(power_of_two=True)
    max: float = _number(power_of_two=True)


@frozen_by_keywords
class Collapse:
    """What happens after `after` skipped steps in a row."""

    after: int = _number(at_least=1)
    action: Literal["warn", "stop"]


@frozen_by_keywords
class ForwardOverflow:
    """When a module whose forward pass leaves the half type's range is computed in FP32; 0 is never."""

    float32_after: int = _number(at_least=0)


@frozen_by_keywords
class Ops:
    """The dtype of operations: `@group` (a file of `configs/ops/`) or the name of one operation.

    `user_float32` and `user_half` are what the user asked for by name; they win over the other lists.
    """

    half: tuple[str, ...]
    float32: tuple[str, ...]
    promote: tuple[str, ...]
    native: tuple[str, ...]
    compute_float32: tuple[str, ...]
    user_float32: tuple[str, ...]
    user_half: tuple[str, ...]

    def cast_layers(self) -> bool:
        """Whether matrix products and convolutions cast the weights of their layers, whatever ops are named besides."""
        named = (*self.float32, *self.native, *self.promote, *self.user_float32)
        return "@matmul" in self.half and all(entry.startswith("@") for entry in named)


@frozen_by_keywords
class OptimizerSettings:
    """The kernels of optimizers, and what keeps them alive on half state; `min_eps` of 0 leaves every eps alone."""

    fuse: bool
    min_eps: float = _number(at_least=0.0)
    unfuse: bool


@frozen_by_keywords
class Ddp:
    """In what type `DistributedDataParallel` reduces gradients; None is theirs, as torch does."""

    comm_dtype: Literal["float16", "bfloat16"] | None


@frozen_by_keywords
class Monitors:
    """What is watched while the script runs; `history_points` bounds every series in memory and on disk."""

    losses: bool
    overflow: bool
    coverage: bool
    throughput: bool
    memory: bool
    gradients: bool
    history_points: int = _number(at_least=4)


@frozen_by_keywords
class Policy:
    """A resolved, complete preset. Two policies are equal when every value is."""

    schema: int
    name: str
    description: str
    dtype: Literal["float16", "bfloat16"]
    cast_model_type: Literal["float32", "none", "half"]
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: LossScale
    skip_nonfinite: Literal["auto", "always", "never"]
    collapse: Collapse
    forward_overflow: ForwardOverflow
    ops: Ops
    fp32_modules: tuple[str, ...]
    script_amp: Literal["takeover", "keep"]
    apex: Literal["auto", "on", "off"]
    matmul_precision: Literal["highest", "high", "medium"]
    optimizer: OptimizerSettings
    keep_freed_memory: bool
    ddp: Ddp
    slow_kernel_ratio: float = _number(at_least=1.0)
    monitors: Monitors
    gates: tuple[str, ...]
    abort_on: tuple[str, ...]
    max_steps: int = _number(at_least=0)
    flush_interval_s: float = _number(above=0.0)

    def flat(self) -> dict[str, Any]:
        """Return every value under its dotted key, in the order of the fields."""
        return dict(_flatten(self, ""))

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and scalars that `from_dict` and JSON can hold."""
        values = self.flat().items()
        return _nest({key: list(value) if isinstance(value, tuple) else value for key, value in values})

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Policy:
        """Return the policy that `to_dict` wrote; refuse a missing, unknown or mistyped value."""
        policy: Policy = _build(cls, tree, "")
        return policy

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> Policy:
        """Return the policy with these values under their dotted keys."""
        return cls.from_dict(_nest(values))


@frozen
class FieldSpec:
    """One value that a preset can set."""

    key: str
    kind: Literal["bool", "int", "float", "str", "choice", "list"]
    optional: bool
    choices: tuple[str, ...]
    unresolved: tuple[str, ...]
    power_of_two: bool
    at_least: float | None
    above: float | None
    below: float | None

    @property
    def written(self) -> tuple[str, ...]:
        """Every choice that a file may write."""
        return self.unresolved + self.choices


@cache
def field_specs() -> Mapping[str, FieldSpec]:
    """Return the spec of every value by its dotted key, in the order of the fields."""
    return {spec.key: spec for spec in _specs(Policy, "")}


@cache
def group_names() -> frozenset[str]:
    """Return the keys that hold further keys, such as `loss_scale`."""
    return frozenset(key.rpartition(".")[0] for key in field_specs() if "." in key)


_KINDS: Mapping[type, Literal["bool", "int", "float", "str"]] = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
}


def _specs(owner: Any, prefix: str) -> Iterator[FieldSpec]:
    hints = get_type_hints(owner)
    for item in fields(owner):
        hint = hints[item.name]
        key = prefix + item.name
        if is_dataclass(hint):
            yield from _specs(hint, key + ".")
        else:
            yield _spec(key, hint, item.metadata)


def _spec(key: str, hint: Any, limits: Mapping[str, Any]) -> FieldSpec:
    kind: Literal["bool", "int", "float", "str", "choice", "list"]
    choices: tuple[str, ...] = ()
    optional = get_origin(hint) in (Union, types.UnionType)
    if optional:
        hint = next(part for part in get_args(hint) if part is not types.NoneType)
    if get_origin(hint) is Literal:
        kind, choices = "choice", get_args(hint)
    elif get_origin(hint) is tuple:
        kind = "list"
    else:
        kind = _KINDS[hint]
    return FieldSpec(
        key=key,
        kind=kind,
        optional=optional,
        choices=choices,
        unresolved=limits.get("unresolved", ()),
        power_of_two=limits.get("power_of_two", False),
        at_least=limits.get("at_least"),
        above=limits.get("above"),
        below=limits.get("below"),
    )


def _flatten(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for item in fields(node):
        value = getattr(node, item.name)
        if is_dataclass(value):
            yield from _flatten(value, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, value


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = value
    return tree


def _build(owner: Any, tree: Mapping[str, Any], prefix: str) -> Any:
    names = [item.name for item in fields(owner)]
    if not isinstance(tree, Mapping) or set(tree) != set(names):
        received = ", ".join(map(str, tree)) if isinstance(tree, Mapping) else repr(tree)
        what = f"`{prefix[:-1]}` of the policy" if prefix else "the policy"
        raise PresetError(f"{what} has other keys. Expected {', '.join(names)}. Received {received}")
    hints = get_type_hints(owner)
    values: dict[str, Any] = {}
    for name in names:
        key = prefix + name
        if is_dataclass(hints[name]):
            values[name] = _build(hints[name], tree[name], key + ".")
        else:
            values[name] = _checked(field_specs()[key], tree[name])
    return owner(**values)


_TYPES: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "choice": (str,),
    "list": (list, tuple),
}


def _checked(spec: FieldSpec, value: Any) -> Any:
    """Return `value` as the policy holds it; limits were checked where the value was written."""
    if value is None and spec.optional:
        return None
    fits = isinstance(value, _TYPES[spec.kind]) and (spec.kind == "bool" or not isinstance(value, bool))
    if fits and spec.kind == "choice":
        fits = value in spec.choices
    if fits and spec.kind == "list":
        fits = all(isinstance(entry, str) for entry in value)
    if not fits:
        expected = " or ".join(f"`{choice}`" for choice in spec.choices) or f"a {spec.kind}"
        raise PresetError(f"`{spec.key}` of the policy is wrong. Expected {expected}. Received `{value!r}`")
    if spec.kind == "list":
        return tuple(value)
    return float(value) if spec.kind == "float" else value
