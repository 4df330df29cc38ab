"""LAMB (You et al. 2019, arXiv:1904.00962) under apex's signature, on lists of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["FusedLAMB"]


class FusedLAMB(torch.optim.Optimizer):
    """LAMB, with the gradients of all parameters clipped together first.

    Raises:
        RuntimeError: `amsgrad` is asked for, as in apex.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        """Make the optimizer.

        Args:
            adam_w_mode: Whether weight decay is apart from the gradient or added to it.
            grad_averaging: Whether a new gradient enters the average with the weight 1 - beta1, or 1.
            max_grad_norm: The norm of all gradients together is brought down to this; 0 leaves it.
            use_nvlamb: Whether parameters without weight decay are rated by their norm too.
        """
        if amsgrad:
            raise RuntimeError("FusedLAMB does not support AMSGrad")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults)
        self.adam_w_mode, self.set_grad_none, self.use_nvlamb = adam_w_mode, set_grad_none, use_nvlamb

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
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not gradients:
            return loss
        norm = torch.nn.utils.get_total_norm(gradients)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                group["step"] = group.get("step", 0) + 1
                most = group["max_grad_norm"]
                self._update(group, parameters, (norm / most).clamp(min=1.0) if most > 0 else 1.0)
        return loss

    def _update(self, group: dict[str, Any], parameters: list[Tensor], divisor: Tensor | float) -> None:
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        gradients = [parameter.grad / divisor for parameter in parameters if parameter.grad is not None]
        if decay and not self.adam_w_mode:
            torch._foreach_add_(gradients, parameters, alpha=decay)
        averages, squares = self._averages(parameters)
        torch._foreach_mul_(averages, beta1)
        torch._foreach_add_(averages, gradients, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        corrected = group["bias_correction"]
        one = 1 - beta1 ** group["step"] if corrected else 1.0
        two = 1 - beta2 ** group["step"] if corrected else 1.0
        roots = torch._foreach_sqrt(torch._foreach_div(squares, two))
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(torch._foreach_div(averages, one), roots)
        if decay and self.adam_w_mode:
            torch._foreach_add_(updates, parameters, alpha=decay)
        if decay or self.use_nvlamb:
            pairs = zip(torch._foreach_norm(parameters), torch._foreach_norm(updates), strict=True)
            rates = [torch.where((w > 0) & (u > 0), w / u, torch.ones_like(w)) for w, u in pairs]
            torch._foreach_mul_(updates, rates)
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])

    def _averages(self, parameters: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
                self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        return [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
