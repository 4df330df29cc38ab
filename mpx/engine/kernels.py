"""The kernels behind op rules: one factory a list of the preset, each from a rule to what the dispatcher calls.

A kernel runs its op with the autocast key excluded, as torch's own do: what a composite op is made of is not cast
again. Only FP32 and half tensors are touched, never FP64: a script that uses doubles asked for them. Kernels are
on the way of every call of their op in a region, so each looks at its arguments once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpx.engine.reroutes import half_outside, reroute_of

if TYPE_CHECKING:
    from mpx.engine.devices import Device
    from mpx.engine.oprules import Rule

__all__ = ["KERNELS", "Report", "overload"]

Kernel = Callable[..., Any]
Change = Callable[[Any], Any]
Report = Callable[[str, str], None]  # (id of a substitution, its text): counted on each call

LOW = (torch.float16, torch.bfloat16)
CASTABLE = (*LOW, torch.float32)
SEQUENCE = (list, tuple)
NUMBER = (float, int)


def overload(name: str) -> torch._ops.OpOverload:
    """Return the op that "aten::softmax.int" names."""
    packet, _, variant = name.removeprefix("aten::").partition(".")
    found: torch._ops.OpOverload = getattr(getattr(torch.ops.aten, packet), variant or "default")
    return found


def float32(rule: Rule, device: Device, report: Report) -> Kernel:
    """Half inputs become FP32; an op with a `dtype` argument is given FP32 there instead, which saves the copy."""
    op, excluded = overload(rule.op), _excluded(device)
    if "number" in rule.facts:
        return _with_numbers_that_fit(rule, device, report)
    if "layout" in rule.facts:
        return _float32_for_layout(rule, device, report)
    names = [argument.name for argument in op._schema.arguments]
    if "dtype" in names and rule.facts.get("by") != "cast":
        return _float32_by_dtype(op, excluded, names.index("dtype"))
    tell = _teller(rule, device, report)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with excluded():
            return op(*map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()})

    def telling(*args: Any, **kwargs: Any) -> Any:
        if not _dtypes((args, kwargs)).isdisjoint(LOW):
            tell()
        return kernel(*args, **kwargs)

    return telling if rule.told else kernel


def _float32_by_dtype(op: torch._ops.OpOverload, excluded: Callable[[], Any], dtype_at: int) -> Kernel:
    def kernel(tensor: Tensor, *rest: Any, **kwargs: Any) -> Any:
        with excluded():
            given = rest[dtype_at - 1] if len(rest) >= dtype_at else kwargs.get("dtype")
            if given is not None or tensor.dtype not in LOW:
                return op(tensor, *rest, **kwargs)
            kwargs["dtype"] = torch.float32
            return op(tensor, *rest[: dtype_at - 1], **kwargs)

    return kernel


def _float32_for_layout(rule: Rule, device: Device, report: Report) -> Kernel:
    """FP32 for tensors of one layout, which has no half kernel; half for all others."""
    op, excluded, tell = overload(rule.op), _excluded(device), _teller(rule, device, report)
    layout, as_half = getattr(torch, rule.facts["layout"]), half_type(rule, device, report)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(value, Tensor) and value.layout is layout for value in args):
            return as_half(*args, **kwargs)
        tell()
        with excluded():
            return op(*map(_widened, args), **kwargs)

    return kernel


def _with_numbers_that_fit(rule: Rule, device: Device, report: Report) -> Kernel:
    """A number beyond the half type's range, such as a mask of -1e9, which torch refuses for a half tensor.

    `number: widen` computes in FP32. `number: saturate` takes the type's largest number instead, which is what an op
    that writes into its argument can do; a softmax treats the two alike.
    """
    op, excluded, tell = overload(rule.op), _excluded(device), _teller(rule, device, report)
    as_tensor = rule.op.endswith(".Tensor")  # `masked_fill` also takes its number as a tensor of one element
    widens = rule.facts["number"] == "widen"

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with excluded():
            half = next((a.dtype for a in args if isinstance(a, Tensor) and a.dtype in LOW), None)
            if half is None or kwargs.get("dtype") is not None:
                return op(*args, **kwargs)
            largest = torch.finfo(half).max
            numbers = [args[-1].item()] if as_tensor else [a for a in args if isinstance(a, NUMBER)]
            if not any(largest < abs(number) < math.inf for number in numbers):
                return op(*args, **kwargs)
            tell()
            return op(*(_widened(a) if widens else _saturated(a, largest) for a in args), **kwargs)

    return kernel


def half_type(rule: Rule, device: Device, report: Report) -> Kernel:
    """FP32 inputs (and the other half type) become the half type of the region."""
    if "steps_a_cast" in rule.facts:
        return _half_weights_of_steps(rule, device)
    op, excluded = overload(rule.op), _excluded(device)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        half = torch.get_autocast_dtype(device.type)
        with excluded():
            if kwargs:
                kwargs = {name: _as(half, value) for name, value in kwargs.items()}
            return op(*[_as(half, value) for value in args], **kwargs)

    return kernel


def _half_weights_of_steps(rule: Rule, device: Device) -> Kernel:
    """A recurrent network that is run step by step casts its weights once for so many steps, and the rest as it comes.

    Cast at each step, a weight is kept for the backward pass as often; cast once, the gradients of all steps are added
    in half. Of longer networks pieces take turns, but not of packed sequences, of both directions at once, or where
    dropout would draw other numbers: there each step casts anew.
    """
    op, most = overload(rule.op), rule.facts["steps_a_cast"]
    names = [argument.name for argument in op._schema.arguments]
    weights_at, packed = names.index("params"), "batch_sizes" in names
    both_ways_at, dropout_at, training_at = map(names.index, ("bidirectional", "dropout", "train"))
    batch_first_at = None if packed else names.index("batch_first")
    below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, device.autocast_key))

    def kernel(*args: Any) -> Any:
        keys = torch._C._dispatch_keys(args[0]) & below
        time = 1 if batch_first_at is not None and args[batch_first_at] else 0
        steps = args[1].numel() if packed else args[0].shape[time]
        if steps > most and (packed or args[both_ways_at] or (args[dropout_at] and args[training_at])):
            return op.redispatch(keys, *args)
        half, given = torch.get_autocast_dtype(device.type), list(args)
        if steps <= most:
            given[weights_at] = _as(half, args[weights_at])
            return op.redispatch(keys, *given)
        results = []
        for piece in args[0].split(most, time):
            given[0], given[weights_at] = piece, _as(half, args[weights_at])
            result, given[1] = op.redispatch(keys, *given)  # the next piece begins with its state
            results.append(result.movedim(time, 0))
        # laid out as of one call: steps first in memory, also where the script has the batch first
        return torch.cat(results).movedim(0, time), given[1]

    return kernel


def promote(rule: Rule, device: Device, report: Report) -> Kernel:
    """Mixed inputs become the widest type among them, or the type of the argument that the op writes into."""
    op, excluded = overload(rule.op), _excluded(device)
    if "writes" in rule.facts:
        return _promote_by_statistics(op, excluded, rule.facts["writes"])
    given = next((argument.name for argument in op._schema.arguments if argument.is_out), None)
    if given is not None:
        return _promote_to_given(op, excluded, given)
    writes = op._schema.is_mutable

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with excluded():
            if not _is_mixed(args) and not (kwargs and len(_dtypes((args, kwargs))) > 1):
                return op(*args, **kwargs)
            target = args[0].dtype if writes else torch.float32
            if target not in CASTABLE:
                return op(*args, **kwargs)
            cast = _caster(target)
            return op(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

    return kernel


def _promote_by_statistics(op: torch._ops.OpOverload, excluded: Callable[[], Any], name: str) -> Kernel:
    """Parameters take the type of the statistics that the op writes; so does the input, where only that fits."""
    statistics_at = [argument.name for argument in op._schema.arguments].index(name)

    def kernel(x: Tensor, *rest: Any) -> Any:
        with excluded():
            statistics = rest[statistics_at - 1]
            target = torch.float32 if statistics is None else statistics.dtype
            cast = _caster(target)
            return op(cast(x) if target in LOW else x, *map(cast, rest))

    return kernel


def _promote_to_given(op: torch._ops.OpOverload, excluded: Callable[[], Any], name: str) -> Kernel:
    """Inputs take the type of the tensor that the script gave for the result, the first where there are several."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with excluded():
            target = kwargs[name].dtype
            return op(*[_as(target, value) for value in args] if target in CASTABLE else args, **kwargs)

    return kernel


def native(rule: Rule, device: Device, report: Report) -> Kernel:
    """The op follows the type of its inputs: it is taken off torch's list."""
    return torch.library.fallthrough_kernel


def compute_float32(rule: Rule, device: Device, report: Report) -> Kernel:
    """Half outside, FP32 inside, in the direction that the rule names; in the half kernel where that is as fast."""
    op, excluded, tell = overload(rule.op), _excluded(device), _teller(rule, device, report)
    reroute = reroute_of(op._schema.name.removeprefix("aten::"), rule.facts["direction"])
    compute, spares = reroute.compute, reroute.spares
    as_half = half_type(rule, device, report)
    torchs_own = _torchs_own(rule, device) or as_half

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if half_outside() is not None:  # `torch.func.grad` brings an op's own FP32 arithmetic here again
            with excluded():
                return op(*args, **kwargs)
        if spares is not None and spares(*args):
            # with its cache torch's kernel waits for a lock, and holds Python's meanwhile: who has it may wait for that
            return (as_half if torch.is_autocast_cache_enabled() else torchs_own)(*args, **kwargs)
        half = torch.get_autocast_dtype(device.type)
        with excluded():
            args = tuple([_as(half, value) for value in args])
            if kwargs:
                kwargs = {name: _as(half, value) for name, value in kwargs.items()}
            rerouted = compute(op, args, kwargs)
            if rerouted is None:
                return op(*args, **kwargs)
            tell()
            return rerouted

    return kernel


KERNELS: dict[str, Callable[[Rule, Device, Report], Kernel]] = {
    "half": half_type,
    "float32": float32,
    "promote": promote,
    "native": native,
    "compute_float32": compute_float32,
}


def _excluded(device: Device) -> Callable[[], Any]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.autocast_key))
    return lambda: torch._C._ExcludeDispatchKeyGuard(keys)


def _torchs_own(rule: Rule, device: Device) -> Kernel | None:
    """Return torch's kernel on the autocast key, if it lists the op: it casts in C++.

    Called before ours takes its place. On small tensors it takes half the time of casts that Python asks for.
    """
    if not torch._C._dispatch_has_kernel_for_dispatch_key(rule.op, device.autocast_key):
        return None
    if not hasattr(torch.library, "get_kernel"):  # torch < 2.9
        return None
    own = torch.library.get_kernel(rule.op, device.autocast_key).call_boxed
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.autocast_key))
    return partial(own, keys)


def _teller(rule: Rule, device: Device, report: Report) -> Callable[[], None]:
    """Return what counts one use of the rule as a substitution."""
    name = rule.op.removeprefix("aten::")
    return partial(report, f"op:{name}", f"{name}: {rule.told}")


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in LOW else value
    return [_widened(item) for item in value] if isinstance(value, SEQUENCE) else value


def _as(dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype is not dtype and value.dtype in CASTABLE else value
    return [_as(dtype, item) for item in value] if isinstance(value, SEQUENCE) else value


def _caster(dtype: torch.dtype) -> Change:
    return lambda value: _as(dtype, value)


def _saturated(value: Any, largest: float) -> Any:
    if isinstance(value, Tensor):
        return value.clamp(-largest, largest) if value.dtype is torch.float32 else value
    if isinstance(value, NUMBER) and largest < abs(value) < math.inf:
        return math.copysign(largest, value)
    return value


def _is_mixed(args: tuple[Any, ...]) -> bool:
    first = None
    for value in args:
        if isinstance(value, Tensor):
            dtype = value.dtype
            if dtype in CASTABLE:
                if first is None:
                    first = dtype
                elif dtype is not first:
                    return True
        elif isinstance(value, SEQUENCE) and value and isinstance(value[0], Tensor | None):
            return len(_dtypes(args)) > 1
    return False


def _dtypes(values: Any) -> set[torch.dtype]:
    """Return the castable types among the tensors of an argument list and of the lists in it."""
    found: set[torch.dtype] = set()
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, Tensor):
            if value.dtype in CASTABLE:
                found.add(value.dtype)
        elif isinstance(value, (*SEQUENCE, dict)):
            found |= _dtypes(value)
    return found
