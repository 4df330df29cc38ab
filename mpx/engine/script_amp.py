"""Scripts with mixed precision of their own: taken over, so that a level means what it says, or kept and only observed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from mpx.engine.devices import DEVICES, HALF

if TYPE_CHECKING:
    from mpx.engine.kernels import Report
    from mpx.engine.scales import Scales
    from mpx.presets.policy import Policy

__all__ = ["ScriptAmp"]

Call = Callable[..., Any]
RECOMPUTING = "torch/utils/checkpoint.py"  # re-enters the state of the forward: not a wish of the script


class ScriptAmp:
    """Answers the script's `torch.autocast` and `torch.amp.GradScaler`."""

    def __init__(
        self,
        policy: Policy,
        scales: Scales,
        report: Report,
        *,
        refused: Callable[[], AbstractContextManager[None]],
        stand_back: Callable[[], None],
    ) -> None:
        """Make the service.

        Args:
            policy: Whether the script's AMP is taken over, and by which type.
            scales: What a taken-over GradScaler speaks of.
            report: Tells substitutions.
            refused: Context of an `autocast(enabled=False)` region.
            stand_back: Called when the script's AMP is kept and shows itself.
        """
        self._takes_over = policy.script_amp == "takeover"
        self._half = None if policy.cast_model_type == "float32" else HALF[policy.dtype]
        self._scales, self._report = scales, report
        self._refused, self._stand_back = refused, stand_back
        self._shown_scale: float | None = None  # as of the script's last `update()`

    def wrap_autocast_init(self, original: Call) -> Call:
        """Return `torch.autocast.__init__`: an enabled region has our half type, or at O0 is off."""

        @wraps(original)
        def __init__(region: torch.autocast, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
            original(region, device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
            region._mpx_refuses = False
            row = DEVICES.get(device_type)
            if row is None or not row.available() or _from_checkpoint():
                return
            if not self._takes_over:
                if region._enabled:
                    self._stand_back()
            elif not enabled:
                region._mpx_refuses = self._half is not None
            elif self._half is None:
                self._report("script-autocast", "the script's autocast regions are off: the level computes in FP32")
                region._enabled = False
            else:
                asked = str(region.fast_dtype).removeprefix("torch.")
                ours = str(self._half).removeprefix("torch.")
                self._report("script-autocast", f"the script's autocast regions taken over ({asked} became {ours})" if asked != ours else "the script's autocast regions taken over")
                region.fast_dtype = self._half
                region._enabled = True  # torch disables a region of FP32, or of a half type that it finds wanting

        return __init__

    def wrap_autocast_enter(self, original: Call) -> Call:
        """Return `torch.autocast.__enter__`: in a region with `enabled=False` the script wants FP32, also where ours would begin."""

        @wraps(original)
        def __enter__(region: torch.autocast) -> Any:
            if getattr(region, "_mpx_refuses", False):
                region._mpx_region = self._refused()
                region._mpx_region.__enter__()
            return original(region)

        return __enter__

    def wrap_autocast_exit(self, original: Call) -> Call:
        """Return `torch.autocast.__exit__`."""

        @wraps(original)
        def __exit__(region: torch.autocast, *error: Any) -> Any:
            result = original(region, *error)
            if getattr(region, "_mpx_refuses", False):
                region._mpx_region.__exit__(None, None, None)
            return result

        return __exit__

    def wrap_scaler_init(self, original: Call) -> Call:
        """Return `GradScaler.__init__`: notes an enabled scaler."""

        @wraps(original)
        def __init__(scaler: Any, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            if not scaler.is_enabled():
                return
            if self._takes_over:
                self._report("script-gradscaler", "the script's GradScaler taken over: gradients are unscaled when backward returns")
            else:
                self._stand_back()

        return __init__

    def _instead(self, ours: Call) -> Callable[[Call], Call]:
        """Return a wrapper that calls `ours` for an enabled scaler that is taken over, and torch's method otherwise."""

        def wrapper(original: Call) -> Call:
            @wraps(original)
            def method(scaler: Any, *args: Any, **kwargs: Any) -> Any:
                if self._takes_over and scaler.is_enabled():
                    return ours(scaler, *args, **kwargs)
                return original(scaler, *args, **kwargs)

            return method

        return wrapper

    @property
    def scaler_methods(self) -> dict[str, Callable[[Call], Call]]:
        """The methods of `GradScaler` that become a face of our scaler."""
        return {
            "scale": self._instead(lambda scaler, outputs: outputs),
            "unscale_": self._instead(lambda scaler, optimizer: None),
            "step": self._instead(lambda scaler, optimizer, *args, **kwargs: optimizer.step(*args, **kwargs)),
            "update": self._instead(self._update),
            "get_scale": self._instead(lambda scaler: self._scale()),
            "state_dict": self._instead(self._state_dict),
            "load_state_dict": self._instead(self._load_state_dict),
        }

    def _scale(self) -> float:
        """The scale as of the last `update()`: scripts compare it before and after to learn of a skipped step."""
        return self._scales.latest if self._shown_scale is None else self._shown_scale

    def _update(self, scaler: Any, new_scale: Any = None) -> None:
        if new_scale is not None:
            self._scales.adopt(float(new_scale), clean=0)
        self._shown_scale = self._scales.latest

    def _state_dict(self, scaler: Any) -> dict[str, Any]:
        return {
            "scale": self._scale(),
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
            "_growth_tracker": self._scales.latest_clean,
        }

    def _load_state_dict(self, scaler: Any, state: dict[str, Any]) -> None:
        self._scales.adopt(float(state["scale"]), clean=int(state["_growth_tracker"]))
        self._shown_scale = self._scales.latest


def _from_checkpoint() -> bool:
    return sys._getframe(2).f_code.co_filename.endswith(RECOMPUTING)
