"""What `torch.compile` sees of mpx: a region that it can trace, and no other frame of ours.

After a graph break of the script (at `loss.backward()`, say) dynamo tries every frame that Python enters, ours too, and
stumbles over what they do. They are left to Python; dynamo still inlines the few that it meets inside the script's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, _guards, nn
from torch._C._dynamo import eval_frame

from mpx.engine.devices import DEVICES, HALF
from mpx.engine.placing import traced
from mpx.engine.structure import map_tensors, modules_of

if TYPE_CHECKING:
    from mpx.engine.module_rules import ModuleRules
    from mpx.engine.region import Adoption
    from mpx.presets.policy import Policy

__all__ = ["CompiledRegion", "is_tracing", "leave_uncompiled"]

# What may hold a function of ours. All else in a module is passed by: to search it took 3 ms at every start.
HOLDERS = (FunctionType, staticmethod, classmethod, property, functools._lru_cache_wrapper)


class CompiledRegion:
    """Module calls inside code that is being compiled.

    Only what dynamo can trace, and only state that it guards: autocast and attributes of objects, not of the thread.
    """

    def __init__(self, policy: Policy, rules: ModuleRules, adoption: Adoption) -> None:
        self._half = HALF[policy.dtype]
        self._weights_are_half = policy.master_weights is False
        self._rules = rules
        self._adoption = adoption
        self._depth = 0  # outermost calls around us in this trace

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module: an outermost one in a region, one that is named in FP32, others as they are."""
        opened = next((kind for kind in DEVICES if torch.is_autocast_enabled(kind)), None)
        if opened is not None:
            if not self._rules.computes_float32(module):
                return original(module, *args, **kwargs)
            with torch.autocast(opened, enabled=False):
                return self._in_float32(original, module, args, kwargs)
        half = [(part, name, own) for part, name, own in _parameters(module) if own.dtype is self._half]
        if self._depth or (half and not self._weights_are_half):
            # inside a region, and autocast is off: the script refused it, and finds FP32 weights
            with traced(half, Tensor.float) if half else nullcontext():
                return original(module, *args, **kwargs)
        return self._outermost(original, module, args, kwargs)

    def _outermost(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        ours = (torch.float32, self._half) if self._weights_are_half else (torch.float32,)
        device_type = next((own.device.type for _, _, own in _parameters(module) if own.dtype in ours), None)
        # a region that the script refused has this type, which nobody uses
        if device_type is None or torch.get_autocast_dtype(device_type) is torch.float32:
            return original(module, *args, **kwargs)
        self._rules.learn(module)
        if self._rules.computes_float32(module):
            return original(module, *args, **kwargs)
        self._depth += 1
        try:
            with (
                self._adoption.hold(module, modules_of(module)),
                torch.autocast(device_type, dtype=self._half, cache_enabled=False),  # as in `region`
            ):
                output = original(module, *args, **kwargs)
        finally:
            self._depth -= 1
        return map_tensors(output, self._to_float32)

    def _in_float32(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        args, kwargs = map_tensors(args, self._to_float32), map_tensors(kwargs, self._to_float32)
        return original(module, *args, **kwargs)

    def _to_float32(self, tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype is self._half else tensor


def _parameters(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    found: list[tuple[nn.Module, str, Tensor]] = []
    for part in modules_of(module):
        for name, own in part._parameters.items():
            if own is not None:
                found.append((part, name, own))
    return found


def is_tracing() -> bool:
    """Whether a compiler or `make_fx` traces in this thread; `TracingContext.try_get` takes five times as long."""
    if vars(_guards._TLS).get("tracing_context") is not None:
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def leave_uncompiled(package: str) -> None:
    """Let dynamo run the frames of a package as they are; it may still inline them, and look at what they call."""
    if not hasattr(eval_frame, "set_code_exec_strategy"):
        return  # torch < 2.7: dynamo tries them, and falls back
    as_it_is = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for code in _codes(module):
                eval_frame.set_code_exec_strategy(code, as_it_is)


def _codes(owner: ModuleType | type) -> Iterator[CodeType]:
    home = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
    for value in list(vars(owner).values()):
        if isinstance(value, type):
            if value.__module__ == home:
                yield from _codes(value)
        elif isinstance(value, HOLDERS):
            for part in (
                value,
                *(getattr(value, name, None) for name in ("__func__", "fget", "__wrapped__")),
            ):
                if isinstance(part, FunctionType) and part.__module__ == home:
                    yield from _with_inner(part.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
