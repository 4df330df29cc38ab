"""A script's own `autograd.Function` runs in FP32, unless `custom_fwd` shows that its author knows of autocast.

Inside a region a plain one would save half and FP32 tensors side by side and fail, or lose its range, in a backward
that autocast never sees. One that is given something to call may run a part of a model, mostly to run it again in its
backward (the checkpointing of guided-diffusion and its many copies): weights are FP32 there, both times, and gradients
by the weights that it was given are those by the parameters. FP32 are also modules that it reaches in other ways, in a
list or by its closure, as reversible networks do.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpx.engine.structure import map_tensors
from mpx.engine.widened import lead_inside

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
            reruns: Told of those that compute as the model does.
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
            if (self._region.is_open() or self._region.in_function()) and not _knows_autocast(cls):
                return self._in_float32(bare, cls, args, kwargs)
            self._reruns.begin()
            try:
                return bare(cls, *args, **kwargs)
            finally:
                self._reruns.end()

        return classmethod(apply)

    def _in_float32(
        self, bare: Callable[..., Any], cls: type[torch.autograd.Function], args: Any, kwargs: Any
    ) -> Any:
        self._report(
            f"function:{cls.__name__}",
            f"`{cls.__name__}`, a function of the script, computes in FP32: its forward has no `custom_fwd`",
        )
        given = (*args, *kwargs.values())
        runs = any(callable(one) and not isinstance(one, (Tensor, type)) for one in given)
        args, kwargs = map_tensors(args, self._face), map_tensors(kwargs, self._face)
        with self._region.function(), self._region.refused() if runs else nullcontext():
            return bare(cls, *args, **kwargs)

    def _face(self, tensor: Tensor) -> Tensor:
        face = self._region.to_float32(tensor)
        if face is not tensor:
            own = self._parameter_of(tensor)  # what runs again may do so with another copy of it
            lead_inside(face, tensor if own is None else own)
        return face


def _knows_autocast(cls: type[torch.autograd.Function]) -> bool:
    if cls.__module__.startswith("torch."):
        return True
    code = getattr(cls.forward, "__code__", None)
    return code is not None and code in MADE_BY_CUSTOM_FWD
