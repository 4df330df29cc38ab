"""A script's own `autograd.Function` runs in FP32, unless `custom_fwd` shows that its author knows of autocast.

Inside a region a plain one would save half and FP32 tensors side by side and fail, or lose its range, in a backward
that autocast never sees.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from mpx.engine.structure import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpx.engine.region import Region

__all__ = ["ScriptFunctions"]

# the code of functions that the decorator makes is a constant of its own code
MADE_BY_CUSTOM_FWD = torch.amp.custom_fwd.__code__.co_consts


class ScriptFunctions:
    """Wraps `autograd.Function.apply`."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def wrap_apply(self, original: Callable[..., Any]) -> classmethod[Any, Any, Any]:
        """Return the `apply` of the session."""
        bare = original.__func__  # type: ignore[attr-defined]

        @wraps(bare)
        def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._region.is_open() or _knows_autocast(cls):
                return bare(cls, *args, **kwargs)
            args, kwargs = (
                map_tensors(args, self._region.to_float32),
                map_tensors(kwargs, self._region.to_float32),
            )
            with self._region.disabled():
                return bare(cls, *args, **kwargs)

        return classmethod(apply)


def _knows_autocast(cls: type[torch.autograd.Function]) -> bool:
    if cls.__module__.startswith(("torch.", "mpx.")):
        return True
    code = getattr(cls.forward, "__code__", None)
    return code is not None and code in MADE_BY_CUSTOM_FWD
