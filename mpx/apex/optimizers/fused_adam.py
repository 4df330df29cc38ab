"""Adam and AdamW by torch under apex's signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

__all__ = ["FusedAdam"]

NO_CORRECTION = float("inf")  # after so many steps the corrections of the bias are 1


class FusedAdam(torch.optim.Optimizer):
    """AdamW, or Adam with `adam_w_mode=False`; its state has apex's names, and apex's checkpoints load.

    Raises:
        RuntimeError: `amsgrad` is asked for, as in apex.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        max_grad_norm: float = 0.0,
    ) -> None:
        """Make the optimizer.

        Args:
            bias_correction: Whether the averages are corrected for beginning at zero.
            adam_w_mode: Whether weight decay is apart from the gradient (AdamW) or added to it.
            set_grad_none: Whether `zero_grad` drops gradients or zeroes them.
            capturable: Without effect, as `master_weights`: the weights are FP32.
            max_grad_norm: Bound on the norm of all gradients together, of apex before 2019; 0 is none.
        """
        if amsgrad:
            raise RuntimeError("FusedAdam does not support AMSGrad")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode, self.set_grad_none = int(adam_w_mode), set_grad_none
        self.max_grad_norm = max_grad_norm

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or zero them."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.max_grad_norm > 0:
            everything = [parameter for group in self.param_groups for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(everything, self.max_grad_norm)
        update = adamw if self.adam_w_mode else adam
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            done = group.get("step", 0)
            group["step"] = done + 1
            states = [self._state_of(parameter) for parameter in parameters]
            counted = float(done) if group["bias_correction"] else NO_CORRECTION
            update(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [torch.tensor(counted) for _ in parameters],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
        return loss

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state
