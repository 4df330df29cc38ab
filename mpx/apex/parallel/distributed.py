"""Data parallelism by torch under apex's signature."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import parallel

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's DistributedDataParallel, without its broadcast of buffers, which apex's has not.

    Raises:
        ValueError: An option is given that torch's cannot carry out.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        """Wrap a module.

        Args:
            module: The model.
            delay_allreduce: Reduce at the end of the backward pass: parameters may then go without a gradient.
            gradient_average: Must be true.
        """
        refused = {
            "shared_param": shared_param is not None,
            "gradient_average=False": not gradient_average,
            "retain_allreduce_buffers": retain_allreduce_buffers,
        }
        for name, given in refused.items():
            if given:
                raise ValueError(
                    f"{name} is not carried out by mpx, whose apex DDP is torch's. Expected it left out"
                )
        super().__init__(module, find_unused_parameters=delay_allreduce)
        self.broadcast_buffers = False  # as an argument it is going out of use

    def enable_allreduce(self) -> None:
        """Reduce the gradients of backward passes from now on."""
        self.require_backward_grad_sync = True

    def disable_allreduce(self) -> None:
        """Keep the gradients of backward passes from now on."""
        self.require_backward_grad_sync = False
