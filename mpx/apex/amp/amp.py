"""Functions that the script wants computed in another type, and `amp.init`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from mpx.apex.running import session
from mpx.engine.structure import map_tensors, tensors
from mpx.errors import PresetError

from ._amp_state import _amp_state
from .handle import AmpHandle

__all__ = [
    "NO_LISTS",
    "float_function",
    "half_function",
    "init",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]

NO_LISTS = (
    "mpx has no `apex.amp.lists`: its lists of operations are those of the preset. "
    "`mpx run --half-op NAME` or `--fp32-op NAME` moves an operation"
)
Call = Callable[..., Any]


def float_function(fn: Call) -> Call:
    """Return the function, computed in FP32 at every level that casts."""

    @wraps(fn)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        region = session().region
        if not region.casts:
            return fn(*args, **kwargs)
        with region.refused(), region.disabled():
            return fn(*map_tensors(args, region.to_float32), **map_tensors(kwargs, region.to_float32))

    return in_float32


def half_function(fn: Call) -> Call:
    """Return the function, on half arguments where the level computes in half: inside calls of modules."""

    @wraps(fn)
    def in_half(*args: Any, **kwargs: Any) -> Any:
        region = session().region
        if not region.is_open():
            return fn(*args, **kwargs)
        return fn(*map_tensors(args, region.to_half), **map_tensors(kwargs, region.to_half))

    return in_half


def promote_function(fn: Call) -> Call:
    """Return the function, whose arguments are FP32 as soon as one of them is."""

    @wraps(fn)
    def promoted(*args: Any, **kwargs: Any) -> Any:
        region = session().region
        if region.casts and any(tensor.dtype is torch.float32 for tensor in tensors((args, kwargs))):
            args, kwargs = map_tensors((args, kwargs), region.to_float32)
        return fn(*args, **kwargs)

    return promoted


def register_half_function(module: Any, name: str) -> None:
    """Compute `module.name` in half; of torch's own functions, as `--half-op` does."""
    _register(module, name, "half", half_function)


def register_float_function(module: Any, name: str) -> None:
    """Compute `module.name` in FP32; of torch's own functions, as `--fp32-op` does."""
    _register(module, name, "float32", float_function)


def register_promote_function(module: Any, name: str) -> None:
    """Compute `module.name` in the widest type of its arguments; torch's own functions do so already."""
    _register(module, name, None, promote_function)


def _register(module: Any, name: str, kind: str | None, decorate: Callable[[Call], Call]) -> None:
    if not hasattr(module, name):
        raise ValueError(f"there is no function `{name}` in {module}")
    owner = module.__name__ if not isinstance(module, type) else f"{module.__module__}.{module.__name__}"
    if owner.partition(".")[0] != "torch":
        setattr(module, name, decorate(getattr(module, name)))
        return
    if kind is None:
        return
    said = f"the script wants {owner}.{name} in {kind}"
    try:
        session().ask_op(f"{owner}.{name}", kind)
    except PresetError as error:
        session().tell(f"apex-register-{name}", f"{said}, which it does not get: {error.message}")
    else:
        session().tell(f"apex-register-{name}", f"{said}: done, as by an option of mpx run")


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle:
    """Return the handle of amp's first API; the level is that of the run."""
    handle = _amp_state.handle = AmpHandle(enabled=enabled)
    return handle
