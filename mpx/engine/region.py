"""The region: where the script's work is done in half. It is the outermost call of a module that owns FP32 state.

Modules that own none (losses, activations called on their own) and the code between calls run in FP32, on FP32 results.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, compiler, nn
from torch._subclasses import FakeTensor
from torch.compiler import is_dynamo_compiling
from torch.jit import ScriptModule
from torch.utils.data import get_worker_info

from mpx.engine.autocasts import AutocastTo, AutocastToFloat32, NoAutocast
from mpx.engine.compiled import CompiledRegion, is_tracing, leave_uncompiled
from mpx.engine.devices import DEVICES, HALF, device_of
from mpx.engine.reused import CAST_AT_USE, ReusedWeights
from mpx.engine.side_results import SideResults
from mpx.engine.structure import map_tensors, modules_of
from mpx.engine.widened import widen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from mpx.engine.kernels import Report
    from mpx.engine.module_rules import ModuleRules
    from mpx.presets.policy import Policy

    Call = Callable[..., Any]
    Args = tuple[Any, ...]
    Kwargs = dict[str, Any]

__all__ = ["AS_THEY_ARE", "Adoption", "Region"]


class Adoption(NamedTuple):
    """How a level treats a tree of modules for the length of an outermost call.

    Attributes:
        hold: Context in which the weights are as the level wants them, of a root and the modules of its tree.
        withdrawn: Context in which they are FP32 again, inside `hold`.
        lends: Whether a half tensor of a module is a copy that a call of any thread holds there.
    """

    hold: Callable[[nn.Module, list[nn.Module]], AbstractContextManager[None]]
    withdrawn: Callable[[], AbstractContextManager[None]]
    lends: Callable[[Tensor], bool] = lambda tensor: False


NOTHING = nullcontext()
AS_THEY_ARE = Adoption(hold=lambda root, parts: NOTHING, withdrawn=lambda: NOTHING)


class _Here(threading.local):
    """What is going on in this thread."""

    inside = False  # an outermost call
    tree: frozenset[int] = frozenset()  # ids of the modules whose weights are held
    function = False  # a function of the script, in FP32, around us
    refused = 0  # `autocast(enabled=False)` regions of the script and FP32 modules around us


class Region:
    """Opens the region around outermost module calls, for one policy."""

    def __init__(
        self,
        policy: Policy,
        rules: ModuleRules,
        adoption: Adoption = AS_THEY_ARE,
        *,
        called: Callable[[nn.Module], None],
        began: Callable[[nn.Module, list[nn.Module], Args, Kwargs], None],
        ended: Callable[[nn.Module, Any], None],
        around: Callable[[nn.Module], AbstractContextManager[Any]],
        report: Report,
    ) -> None:
        """Make a closed region.

        Args:
            policy: Says whether there is a region at all and which half type it has.
            rules: Says which modules compute in FP32.
            adoption: What happens to the weights.
            called: Told of each outermost call before it runs.
            began: Told of each that a level changes, after `called`: module, the modules of its tree, args, kwargs.
            ended: Told of each of those that returned: module, output.
            around: Context around the work of an outermost call (monitors).
            report: Told of what computes in FP32 against the level.
        """
        self._half = HALF[policy.dtype]
        # at O3 the weights are half by our doing; elsewhere a script that made its model half is left alone
        self._ours = (torch.float32, self._half) if policy.master_weights is False else (torch.float32,)
        self._has_copies = bool(policy.master_weights)
        self.casts = policy.cast_model_type != "float32"
        self._rules = rules
        self._adoption = adoption
        self._holds = adoption is not AS_THEY_ARE
        # weights stay FP32, and kernels cast those of most layers
        self._recasts = self.casts and policy.master_weights is not False
        self._reused = ReusedWeights(self._half, wanted=policy.ops.cast_layers())
        self._kept: AbstractContextManager[None] = self._reused if self._recasts else NOTHING
        self._called, self._began, self._ended, self._around = called, began, ended, around
        self._report = report
        self._here = _Here()
        self._side_results = SideResults(self._half)
        self._compiled = CompiledRegion(policy, rules, adoption)
        self._checked: set[str] = set()
        self.watch: Callable[[nn.Module, tuple[Args, Kwargs], Any], None] | None = None
        self.passive: bool | None = None  # a DataLoader worker: decided at its first call

    def wrap_call(self, original: Call) -> Call:
        """Return the `nn.Module.__call__` of the session."""
        here, rules, holds = self._here, self._rules, self._holds
        casts_at_use, reused = CAST_AT_USE if self._recasts else frozenset(), self._reused
        compiled = self._compiled.call if self.casts else _plainly
        leave_uncompiled("mpx")

        @wraps(original)
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or compiler._is_compiling_flag:
                return compiled(original, module, args, kwargs)
            if here.inside:
                if (
                    (holds and id(module) not in here.tree)
                    or self.watch is not None
                    or rules.any_named
                    or isinstance(module, ScriptModule)
                ) and torch._C._get_tracing_state() is None:
                    return self._nested(original, module, args, kwargs)
                if type(module) in casts_at_use and reused.is_again(module):
                    return reused.call(original, module, args, kwargs)
                return original(module, *args, **kwargs)
            if torch._C._get_tracing_state() is not None:
                # `torch.jit.trace` records the script's model, not what we do to it
                return original(module, *args, **kwargs)
            device_type = None if self.passive else self._root_device(module)
            if device_type is None:
                return original(module, *args, **kwargs)
            here.inside = True
            try:
                if self.casts:
                    return self._outermost(original, module, args, kwargs, device_type)
                return self._observed(original, module, args, kwargs)
            finally:
                here.inside = False

        return __call__

    def _root_device(self, root: nn.Module) -> str | None:
        """Return the device type of a tree that owns FP32 state, or None: doubles and integers are the script's."""
        if self.passive is None:
            self.passive = get_worker_info() is not None  # preparing data is no work of the model
            if self.passive:
                return None
        ours, half = self._ours, self._half
        walked, seen = [root], {id(root)}  # as `modules_of`, but mostly the first module with state ends it
        for part in walked:
            for owned in (part._parameters, part._buffers):
                for tensor in owned.values():
                    if tensor is not None and (
                        tensor.dtype in ours or (tensor.dtype is half and self._lends(root, tensor))
                    ):
                        return _device_type(tensor)
            for child in part._modules.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    walked.append(child)
        return None

    def _lends(self, root: nn.Module, tensor: Tensor) -> bool:
        """Whether a half tensor is where a parameter was: a backward pass or another thread runs a part of a held tree.

        And where FSDP2 keeps what it has gathered, as in a pipeline.
        """
        return (
            (self._has_copies and _inside_backward())
            or hasattr(type(root), "_get_fsdp_state")
            or self._adoption.lends(tensor)
        )

    def _observed(self, original: Call, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """An outermost call of a level that changes nothing."""
        if _inside_backward():
            return original(module, *args, **kwargs)
        self._called(module)
        with self._around(module):
            output = original(module, *args, **kwargs)
        if self.watch is not None:
            self.watch(module, (args, kwargs), output)
        return output

    def _outermost(
        self, original: Call, module: nn.Module, args: Args, kwargs: Kwargs, device_type: str
    ) -> Any:
        here, half, parts = self._here, self._half, modules_of(module)
        # checkpointing runs parts again inside the backward pass: work of a call that has been told of
        recomputing = _inside_backward()
        # in a region of the script (or one that checkpointing has restored) results stay as it asked
        widens = not torch.is_autocast_enabled(device_type)
        if not recomputing:
            self._called(module)
            self._began(module, parts, args, kwargs)
        hold: AbstractContextManager[None] = NOTHING
        region: AbstractContextManager[None] = NOTHING
        if not here.refused:
            if device_type not in self._checked:
                self._check(device_type, module)
            if self._rules.any_named and not self._holds:
                self._rules.learn(module, parts)
            hold, region = self._adoption.hold(module, parts), AutocastTo(device_type, half)
        halves = self._side_results.before(module, parts) if widens else None
        outer, here.tree = here.tree, frozenset(map(id, parts)) if self._holds else here.tree
        try:
            with hold, region, self._kept, NOTHING if recomputing else self._around(module):
                if self._rules.computes_float32(module):
                    output = self._in_float32(original, module, args, kwargs)
                else:
                    output = original(module, *args, **kwargs)
        finally:
            here.tree = outer
        if widens:
            output = widen(output, half) if type(output) is Tensor else map_tensors(output, self.widened)
            self._side_results.after(parts, halves)
        if not recomputing:
            self._ended(module, output)
            if self.watch is not None:
                self.watch(module, (args, kwargs), output)
        return output

    def _nested(self, original: Call, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        here = self._here
        if self._rules.computes_float32(module):
            output = self._in_float32(original, module, args, kwargs)
        elif id(module) in here.tree or not self.casts or here.refused:
            output = original(module, *args, **kwargs)
        elif here.function:
            with self.refused():
                output = original(module, *args, **kwargs)
        else:  # not of the tree (a list of layers): weights held for it alone
            outer, parts = here.tree, modules_of(module)
            here.tree = outer.union(map(id, parts))
            try:
                with self._adoption.hold(module, parts):
                    output = original(module, *args, **kwargs)
            finally:
                here.tree = outer
        if self.watch is not None:
            self.watch(module, (args, kwargs), output)
        return output

    def _in_float32(self, original: Call, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        if isinstance(module, ScriptModule):
            self._report("torchscript", "modules compiled by TorchScript compute in FP32")
        here = self._here
        here.refused += 1
        try:
            with self.disabled():
                args, kwargs = map_tensors(args, self.to_float32), map_tensors(kwargs, self.to_float32)
                return original(module, *args, **kwargs)
        finally:
            here.refused -= 1

    def cast_at_each_use(self) -> None:
        """Keep no casts from now on: not all layers may compute in half."""
        self._reused.wanted = False

    def casts_to(self, dtype: torch.dtype) -> bool:
        """Whether this is the half type of a level that is applied."""
        return self.casts and dtype is self._half

    def is_open(self) -> bool:
        """Whether autocast is on here, by us or by the script."""
        return any(torch.is_autocast_enabled(device_type) for device_type in DEVICES)

    def autocast(self, device_type: str) -> AbstractContextManager[None]:
        """Return a context of autocast to the half type on a device, without the cost of `torch.autocast`'s checks."""
        return AutocastTo(device_type, self._half)

    def disabled(self) -> AbstractContextManager[None]:
        """Return a context without autocast: for backward passes, optimizer steps and modules that compute in FP32."""
        if self._recasts and self._here.inside:
            self._reused.forget()  # a pass or a step: weights may change, also in ways that leave no trace
        return NoAutocast() if torch._C._is_any_autocast_enabled() else NOTHING

    def in_float32(self) -> AbstractContextManager[None]:
        """Return a context in which products are FP32, inside a region."""
        return AutocastToFloat32()

    def in_function(self) -> bool:
        """Whether a function of the script is around us that computes in FP32."""
        return self._here.function

    @contextmanager
    def function(self) -> Iterator[None]:
        """A function of the script computes in FP32: so do modules that it may reach, in a list or by its closure."""
        here = self._here
        outer = here.function, here.tree
        here.function, here.tree = True, frozenset()
        try:
            with self.disabled():
                yield
        finally:
            here.function, here.tree = outer

    @contextmanager
    def refused(self) -> Iterator[None]:
        """The script asked for FP32 with `autocast(enabled=False)`: no region opens, held weights are FP32 again."""
        if is_tracing():
            yield  # a compiler looks ahead: what it sees must still be there when it has done
            return
        self._here.refused += 1
        try:
            held = self._here.inside or _inside_backward()
            with self._adoption.withdrawn() if held else NOTHING:
                yield
        finally:
            self._here.refused -= 1

    def wrap_refused(self, original: Call) -> Call:
        """Return a function of torch that runs as in a region which the script refused."""

        @wraps(original)
        def in_float32(*args: Any, **kwargs: Any) -> Any:
            with self.refused():
                return original(*args, **kwargs)

        return in_float32

    def _check(self, device_type: str, module: nn.Module) -> None:
        """Refuse a device that cannot do the half type, at its first use: asking earlier would initialise it."""
        owned = (*module.parameters(), *module.buffers())
        device_of(next(t for t in owned if t.device.type == device_type)).require(self._half)
        self._checked.add(device_type)

    def widened(self, tensor: Tensor) -> Tensor:
        """Return the FP32 face of a tensor of the half type, any other as it is."""
        return widen(tensor, self._half)

    def to_half(self, tensor: Tensor) -> Tensor:
        """Return a tensor of FP32 in the half type, any other as it is."""
        return tensor.to(self._half) if tensor.dtype is torch.float32 else tensor

    def to_float32(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the half type in FP32, any other as it is."""
        return tensor.float() if tensor.dtype is self._half else tensor


def _plainly(original: Call, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    return original(module, *args, **kwargs)


def _device_type(tensor: Tensor) -> str | None:
    """Return the device type of a tensor, or None where it has a shape and no numbers."""
    if type(tensor) is FakeTensor:
        return None
    if tensor.is_cpu:  # told in a tenth of the time that its name takes
        return "cpu"
    return None if tensor.is_meta else tensor.device.type


def _inside_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
