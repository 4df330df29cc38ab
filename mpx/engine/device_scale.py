"""The loss scale on an accelerator: the next pass has it before the host knows whether this one overflowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from mpx.loss_scale import LossScale

__all__ = ["DeviceScale"]


class DeviceScale:
    """The state machine of `mpx.loss_scale` in kernels: from the same verdicts it comes to the same scales.

    Attributes:
        scale: FP32, no dimension, on the device; changes in place.
    """

    def __init__(self, state: LossScale, device: torch.device) -> None:
        """Begin with the host's state; one in another mode than "dynamic" stays as it is."""
        self._settings = state.settings
        # a checkpoint of torch's scaler may have counted further: the kernel grows where the count is met exactly
        clean = min(state.clean, state.settings.growth_interval - 1)
        self.scale: Tensor = torch.full((), state.scale, dtype=torch.float32, device=device)
        self._clean = torch.full((), clean, dtype=torch.int32, device=device)

    def move(self, overflowed: Tensor, unknown: Tensor) -> None:
        """Become what follows from a backward pass.

        Args:
            overflowed: Bool, no dimension: whether a gradient was not finite.
            unknown: The same: whether the pass says nothing of the scale.
        """
        numbers = self._settings
        if numbers.mode != "dynamic":
            return
        self._clean.add_(unknown, alpha=-1)  # the kernel counts the pass as a clean one
        torch._amp_update_scale_(
            self.scale,
            self._clean,
            (overflowed > unknown).to(torch.float32),
            numbers.growth_factor,
            numbers.backoff_factor,
            numbers.growth_interval,
        )
        self.scale.clamp_(numbers.min, numbers.max)
