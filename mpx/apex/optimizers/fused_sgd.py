"""SGD by torch under apex's signature."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["FusedSGD"]


class FusedSGD(torch.optim.SGD):
    """`torch.optim.SGD`.

    Raises:
        ValueError: `wd_after_momentum` is asked for.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        """Make the optimizer.

        Args:
            wd_after_momentum: Must be false.
            materialize_master_grads: Without effect: the gradients are FP32.
            set_grad_none: Whether `zero_grad` drops gradients or zeroes them.
        """
        if wd_after_momentum:
            raise ValueError("wd_after_momentum is not carried out by mpx, whose FusedSGD is torch's SGD")
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Zero the gradients, or drop them."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
