"""`FP16_Optimizer`: an optimizer that scaled the loss and kept FP32 copies. It hands on to the one that it wraps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from mpx.apex.running import session

__all__ = ["FP16_Optimizer"]

HALF = (torch.float16, torch.bfloat16)


class FP16_Optimizer:
    """The wrapped optimizer with a `backward`.

    Attributes:
        optimizer: The wrapped one.
        overflow: Whether the gradients of the last step overflowed: it was skipped then.

    Raises:
        RuntimeError: The script has made the weights half itself, so there is nothing to keep in FP32.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        """Wrap an optimizer; how the loss is scaled is the preset's business."""
        self.optimizer = init_optimizer
        self.overflow = False
        half_by_level = session().policy.master_weights is False
        if not half_by_level and any(parameter.dtype in HALF for parameter in self._parameters()):
            raise RuntimeError(
                "the script has made its weights half before FP16_Optimizer. Expected FP32 weights, of which mpx makes "
                "half copies: leave out `model.half()`, or the script's own option for FP16"
            )

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # asked for by copy and pickle before it is there
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Differentiate the loss."""
        loss.backward(retain_graph=retain_graph)

    def update_master_grads(self) -> None:
        """Do nothing: gradients are true when `backward` returns."""

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> float:
        """Clip the gradients and return their norm; -1 if they overflowed."""
        if session().stepping.overflowed(self.optimizer):
            return -1.0
        return float(clip_grad_norm_(self._parameters(), max_norm, norm_type))

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the gradients by group; None if they overflowed."""
        if session().stepping.overflowed(self.optimizer):
            return None
        return [[parameter.grad for parameter in group["params"]] for group in self.optimizer.param_groups]

    def step(self, closure: Any = None) -> Any:
        """Step the optimizer."""
        self.overflow = bool(session().stepping.overflowed(self.optimizer))
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Zero the gradients, or drop them."""
        self.optimizer.zero_grad(set_to_none=set_grads_to_None)

    @property
    def loss_scale(self) -> float:
        return session().scales.latest.scale

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, under the name that apex gives it."""
        return {"optimizer_state_dict": self.optimizer.state_dict(), "overflow": self.overflow}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the optimizer's state from what `state_dict` returned."""
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
