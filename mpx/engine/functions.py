"""A script's own `autograd.Function` runs in FP32, unless `custom_fwd` shows that its author knows of autocast.

Inside a region a plain one would save half and FP32 tensors side by side and fail, or lose its range, in a backward
that autocast never sees. One that is given something to call runs a part of a model, mostly to run it again in its
backward (the checkpointing of guided-diffusion and its many copies): it finds FP32 weights, and the parameters that it
is given are those whose gradients it will ask for.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpx.engine.structure import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpx.engine.kernels import Report
    from mpx.engine.region import Region
    from mpx.engine.reruns import Reruns

__all__ = ["ScriptFunctions"]

# the code of functions that the decorator makes is a constant of its own code
MADE_BY_CUSTOM_FWD = torch.amp.custom_fwd.__code__.co_consts


class ScriptFunctions:
    """Wraps `autograd.Function.apply`."""

    def __init__(
        self,
        region: Region,
        reruns: Reruns,
        *,
        parameter_of: Callable[[Tensor], Tensor | None],
        report: Report,
    ) -> None:
        """Make the service.

        Args:
            region: Where they are applied.
            reruns: Told of each.
            parameter_of: Returns the parameter of which a tensor is a copy in place, or None.
            report: Told of those that compute in FP32.
        """
        self._region, self._reruns = region, reruns
        self._parameter_of, self._report = parameter_of, report

    def wrap_apply(self, original: Callable[..., Any]) -> classmethod[Any, Any, Any]:
        """Return the `apply` of the session."""
        bare = original.__func__  # type: ignore[attr-defined]

        @wraps(bare)
        def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or cls.__module__.startswith("mpx."):
                return bare(cls, *args, **kwargs)
            self._reruns.begin()
            try:
                return self._apply(bare, cls, args, kwargs)
            finally:
                self._reruns.end()

        return classmethod(apply)

    def _apply(
        self, bare: Callable[..., Any], cls: type[torch.autograd.Function], args: Any, kwargs: Any
    ) -> Any:
        region = self._region
        if not region.is_open() or _knows_autocast(cls):
            return bare(cls, *args, **kwargs)
        self._report(
            f"function:{cls.__name__}",
            f"`{cls.__name__}`, a function of the script, computes in FP32: its forward has no `custom_fwd`",
        )
        if any(callable(arg) and not isinstance(arg, (Tensor, type)) for arg in args):
            args = map_tensors(args, self._given)
            with region.disabled(), region.refused():
                return bare(cls, *args, **kwargs)
        args, kwargs = map_tensors(args, region.to_float32), map_tensors(kwargs, region.to_float32)
        with region.disabled():
            return bare(cls, *args, **kwargs)

    def _given(self, tensor: Tensor) -> Tensor:
        own = self._parameter_of(tensor)
        if own is not None:
            return own
        return tensor if isinstance(tensor, nn.Parameter) else self._region.to_float32(tensor)


def _knows_autocast(cls: type[torch.autograd.Function]) -> bool:
    if cls.__module__.startswith("torch."):
        return True
    code = getattr(cls.forward, "__code__", None)
    return code is not None and code in MADE_BY_CUSTOM_FWD
