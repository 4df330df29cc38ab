"""The kernels behind op rules: one factory a list of the preset, each from a rule to a function that the dispatcher calls.

A kernel runs its op with the autocast key excluded, as torch's own do: what a composite op is made of is not cast again.
Only floating tensors of the rule's device are touched, and never FP64: a script that uses doubles asked for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpx.engine.reroute import REROUTES

if TYPE_CHECKING:
    from mpx.engine.devices import Device
    from mpx.engine.oprules import Rule

__all__ = ["KERNELS", "Report"]

Kernel = Callable[..., Any]
Report = Callable[[str, str], None]  # (id of a substitution, its text): counted on each call

LOW = (torch.float16, torch.bfloat16)
CASTABLE = (*LOW, torch.float32)


def _overload(name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")  # type: ignore[no-any-return]


def _excluded(device: Device) -> Callable[[], Any]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.autocast_key))
    return lambda: torch._C._ExcludeDispatchKeyGuard(keys)


def _cast(value: Any, dtype: torch.dtype, device_type: str, only: tuple[torch.dtype, ...]) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in only and value.device.type == device_type else value
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype, device_type, only) for item in value]
    return value


def _dtypes(values: Any, device_type: str) -> set[torch.dtype]:
    """Return the castable dtypes among the tensors of an argument list, one level of lists deep."""
    found = set()
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype in CASTABLE and value.device.type == device_type:
                found.add(value.dtype)
        elif isinstance(value, (list, tuple)):
            found |= _dtypes(value, device_type)
    return found


def _teller(rule: Rule, device: Device, half: str, report: Report) -> Callable[[], None]:
    """Return what counts a use of the rule as a substitution, when its list says that it is one."""
    if not rule.told:
        return lambda: None
    name = rule.op.removeprefix("aten::")
    text = f"{name}: " + rule.told.format(half=half, device=device.type, direction=str(rule.facts.get("direction", "")).replace("_", " "))
    return lambda: report(f"op:{name}", text)


def float32(rule: Rule, device: Device, half: str, report: Report) -> Kernel:
    """Half inputs become FP32; an op with a `dtype` argument is given FP32 there instead, which saves the copy."""
    op, excluded, tell = _overload(rule.op), _excluded(device), _teller(rule, device, half, report)
    names = [argument.name for argument in op._schema.arguments]
    dtype_at = names.index("dtype") if "dtype" in names else None
    if rule.facts.get("scalar"):
        return _float32_for_scalar(op, excluded, names, device)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with excluded():
            if not _dtypes((*args, *kwargs.values()), device.type).intersection(LOW):
                return op(*args, **kwargs)
            tell()
            if dtype_at is None:
                return op(
                    *_cast(args, torch.float32, device.type, LOW),
                    **{name: _cast(value, torch.float32, device.type, LOW) for name, value in kwargs.items()},
                )
            given = args[dtype_at] if len(args) > dtype_at else kwargs.get("dtype")
            if given is not None:
                return op(*args, **kwargs)
            return op(*args[:dtype_at], **{**kwargs, "dtype": torch.float32})

    return kernel


def _float32_for_scalar(op: torch._ops.OpOverload, excluded: Callable[[], Any], names: list[str], device: Device) -> Kernel:
    """FP32 only when the number does not fit the half type (torch refuses `masked_fill(-1e9)` on FP16); in place the type cannot
    change, so the number becomes the type's largest, which a softmax treats alike."""
    number_at = names.index("value" if "value" in names else "fill_value")
    in_place = op._schema.is_mutable

    def kernel(tensor: Tensor, *rest: Any, **kwargs: Any) -> Any:
        with excluded():
            number = rest[number_at - 1]
            if tensor.dtype not in LOW or tensor.device.type != device.type or isinstance(number, (bool, Tensor)):
                return op(tensor, *rest, **kwargs)
            largest = torch.finfo(tensor.dtype).max
            if math.isinf(number) or math.isnan(number) or abs(number) <= largest:
                return op(tensor, *rest, **kwargs)
            if in_place:
                fitting = math.copysign(largest, number)
                return op(tensor, *rest[: number_at - 1], fitting, *rest[number_at:], **kwargs)
            return op(tensor.float(), *rest, **kwargs)

    return kernel


def half_type(rule: Rule, device: Device, half: str, report: Report) -> Kernel:
    """FP32 inputs (and the other half type) become the half type of the region."""
    op, excluded = _overload(rule.op), _excluded(device)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device.type)
        with excluded():
            return op(
                *_cast(args, dtype, device.type, CASTABLE),
                **{name: _cast(value, dtype, device.type, CASTABLE) for name, value in kwargs.items()},
            )

    return kernel


def promote(rule: Rule, device: Device, half: str, report: Report) -> Kernel:
    """Mixed inputs become the widest type among them, or the type of the argument that the op writes into."""
    op, excluded, tell = _overload(rule.op), _excluded(device), _teller(rule, device, half, report)
    writes = op._schema.is_mutable

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with excluded():
            found = _dtypes((*args, *kwargs.values()), device.type)
            if len(found) < 2:
                return op(*args, **kwargs)
            tell()
            target = args[0].dtype if writes else torch.float32
            if writes and target not in CASTABLE:
                return op(*args, **kwargs)
            return op(
                *_cast(args, target, device.type, CASTABLE),
                **{name: _cast(value, target, device.type, CASTABLE) for name, value in kwargs.items()},
            )

    return kernel


def native(rule: Rule, device: Device, half: str, report: Report) -> Kernel:
    """The op follows the type of its inputs: it is taken off torch's list."""
    return torch.library.fallthrough_kernel  # type: ignore[no-any-return]


def compute_float32(rule: Rule, device: Device, half: str, report: Report) -> Kernel:
    """Half outside, FP32 inside, in the direction that the rule names."""
    op, excluded, tell = _overload(rule.op), _excluded(device), _teller(rule, device, half, report)
    reroute = REROUTES[rule.facts["direction"]]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device.type)
        with excluded():
            tell()
            return reroute(
                op,
                _cast(args, dtype, device.type, CASTABLE),
                {name: _cast(value, dtype, device.type, CASTABLE) for name, value in kwargs.items()},
            )

    return kernel


KERNELS: dict[str, Callable[[Rule, Device, str, Report], Kernel]] = {
    "half": half_type,
    "float32": float32,
    "promote": promote,
    "native": native,
    "compute_float32": compute_float32,
}
