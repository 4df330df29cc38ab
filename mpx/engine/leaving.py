"""What a script does with tensors outside the model: clip gradients, hand arrays to NumPy."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpx.engine.kernels import Report

__all__ = ["wrap_numpy", "wrap_total_norm"]


def wrap_total_norm(
    original: Callable[..., Tensor], will_skip: Callable[[Sequence[Tensor]], bool], report: Report
) -> Callable[..., Tensor]:
    """Return the norm of gradients that `clip_grad_norm_` takes.

    With `error_if_nonfinite` it does not raise for gradients whose step is skipped: in FP32 they were finite.
    """

    @wraps(original)
    def get_total_norm(
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 - torch's signature
        foreach: bool | None = None,  # noqa: FBT001
    ) -> Tensor:
        if not error_if_nonfinite:
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if will_skip(grads):
            report(
                "clip-error",
                "clipping did not raise at gradients that overflowed by the loss scale: their step is skipped",
            )
            error_if_nonfinite = False
        return original(grads, norm_type, error_if_nonfinite, foreach)

    return get_total_norm


def wrap_numpy(
    original: Callable[..., Any], is_ours: Callable[[torch.dtype], bool], report: Report
) -> Callable[..., Any]:
    """Return `Tensor.numpy`, which gives FP32 for what is BF16 by our doing: NumPy has no such type."""

    @wraps(original)
    def numpy(tensor: Tensor, *, force: bool = False) -> Any:
        if tensor.dtype is torch.bfloat16 and is_ours(tensor.dtype):
            report("numpy", "BF16 tensors that the script gives to NumPy become FP32 arrays")
            tensor = tensor.float()
        return original(tensor, force=force)

    return numpy
