"""Layer-wise adaptive rate control (You et al. 2017, arXiv:1708.03888), around any optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from mpx.apex.running import session

__all__ = ["LARC"]


class LARC:
    """An optimizer whose learning rate for a parameter follows the ratio of its norm to its gradient's.

    Everything but `step` is the optimizer's own.
    """

    def __init__(
        self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: Any of torch's kind.
            trust_coefficient: The rate of a parameter is this times the ratio of the norms.
            clip: Whether the optimizer's own rate is an upper bound.
            eps: Added to the norm of the gradient.
        """
        self.optim = optimizer
        self.trust_coefficient, self.clip, self.eps = trust_coefficient, clip, eps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optim, name)

    @torch.no_grad()
    def step(self) -> None:
        """Step, with the weight decay taken into the gradients before they are rated."""
        if session().stepping.overflowed(self.optim):
            self.optim.step()  # which is skipped
            return
        decays = [group.get("weight_decay", 0.0) for group in self.optim.param_groups]
        for group, decay in zip(self.optim.param_groups, decays, strict=True):
            group["weight_decay"] = 0.0
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._rate(parameter, parameter.grad, group["lr"], decay)
        try:
            self.optim.step()
        finally:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = decay

    def _rate(self, parameter: torch.Tensor, gradient: torch.Tensor, lr: float, decay: float) -> None:
        of_weight, of_gradient = parameter.norm(), gradient.norm()
        rate = self.trust_coefficient * of_weight / (of_gradient + decay * of_weight + self.eps)
        if self.clip:
            rate = (rate / lr).clamp(max=1.0)
        rated = (of_weight != 0) & (of_gradient != 0)
        decayed = gradient.add(parameter, alpha=decay).mul_(rate)
        gradient.copy_(torch.where(rated, decayed, gradient))
