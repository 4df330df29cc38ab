"""`apex.multi_tensor_apply`: scripts import it to ask whether the fused kernels are there. They are not."""

from __future__ import annotations

from typing import Any

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """What calls a fused kernel on chunks of lists of tensors."""

    available = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Any, noop_flag: Any, tensor_lists: Any, *args: Any) -> Any:
        """Refuse: there is no kernel to call."""
        raise RuntimeError(
            "mpx has no fused kernels of apex. Expected a script that asks `multi_tensor_applier.available` first"
        )


multi_tensor_applier = MultiTensorApply(2048 * 32)
