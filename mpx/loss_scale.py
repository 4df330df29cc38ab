"""The loss scale as a value: what it is now, and what it becomes after one more backward pass.

The state machine needs no torch and holds no reference to anything, so its laws are tested without a model.

    after(finite=True)   clean += 1; at `growth_interval` clean passes the scale grows by `growth_factor`, up to `max`
    after(finite=False)  clean = 0; the scale shrinks by `backoff_factor`, down to `min`

Every number is a power of two, so that scaling and unscaling a gradient are exact. Unlike the recipe of Micikevicius et
al. (2018, arXiv:1710.03740, section 3.2) as Apex and torch.amp built it, the scale has a floor: without one a
persistent NaN drives it to zero, from where it never recovers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpx.presets.policy import LossScale as LossScaleSettings

__all__ = ["LossScale", "initial"]


@dataclass(slots=True)  # not frozen: each pass makes one, which would take three times as long
class LossScale:
    """One scaler's state, a value: nobody writes into it.

    Attributes:
        scale: Factor on the seed gradient; a power of two.
        clean: Backward passes without overflow since the scale last changed.
        settings: The preset's numbers; `mode` "static" and "none" never change the scale.
    """

    scale: float
    clean: int
    settings: LossScaleSettings

    def after(self, *, finite: bool) -> LossScale:
        """Return the state after a backward pass whose gradients were all `finite`, or not."""
        numbers = self.settings
        if numbers.mode != "dynamic":
            return self
        if not finite:
            return LossScale(max(self.scale * numbers.backoff_factor, numbers.min), 0, numbers)
        if self.clean + 1 < numbers.growth_interval:
            return LossScale(self.scale, self.clean + 1, numbers)
        return LossScale(min(self.scale * numbers.growth_factor, numbers.max), 0, numbers)

    @property
    def can_fall(self) -> bool:
        """Whether an overflow lowers the scale: it is dynamic and above its floor."""
        return self.settings.mode == "dynamic" and self.scale > self.settings.min

    def at_most(self, ceiling: float) -> LossScale:
        """Return this scaler under a ceiling of its own, because its loss has a type that holds no larger scale."""
        numbers = self.settings
        if self.scale <= ceiling and (numbers.mode != "dynamic" or numbers.max <= ceiling):
            return self
        lowered = replace(numbers, max=min(numbers.max, ceiling), min=min(numbers.min, ceiling))
        return LossScale(min(self.scale, ceiling), self.clean, lowered)

    def export_state(self) -> dict[str, float | int]:
        """Return the state as plain numbers, as it goes into a checkpoint."""
        return {"scale": self.scale, "clean": self.clean}

    def restore_state(self, state: Mapping[str, float | int]) -> LossScale:
        """Return this scaler with the state of a checkpoint, brought to a power of two inside this run's bounds.

        A checkpoint may hold the state of another scaler: torch's has any factor, and no floor.
        """
        if self.settings.mode != "dynamic":
            return self
        scale = _power_of_two(float(state["scale"]), self.settings.min, self.settings.max)
        return LossScale(scale, int(state["clean"]), self.settings)


def initial(settings: LossScaleSettings) -> LossScale:
    """Return the state before the first backward pass."""
    return LossScale(scale=1.0 if settings.mode == "none" else settings.init, clean=0, settings=settings)


def _power_of_two(number: float, least: float, most: float) -> float:
    """Return the largest power of two up to `number`, between two that are; the least for 0 and NaN."""
    if not number > least:
        return least
    return most if number >= most else math.ldexp(0.5, math.frexp(number)[1])
