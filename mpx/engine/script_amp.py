"""Scripts with mixed precision of their own: taken over, so that a level means what it says, or kept and observed."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpx.engine.devices import DEVICES, HALF
from mpx.engine.structure import tensors
from mpx.engine.widened import notes_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.amp.grad_scaler import GradScaler

    from mpx.engine.kernels import Report
    from mpx.engine.scales import Scales
    from mpx.presets.policy import Policy

__all__ = ["ScriptAmp"]

Call = Callable[..., Any]
TORCH = str(Path(torch.__file__).parent) + os.sep
CHECKPOINT = str(Path(TORCH, "utils", "checkpoint.py"))  # enters the state of the forward pass again
CUSTOM_FUNCTION = str(Path(TORCH, "amp", "autocast_mode.py"))  # `custom_fwd` and `custom_bwd`
SCALED_BY = "mpx_script_scale"  # in the metadata of the node that multiplied a loss
LONGEST_WAY = (
    6  # operations from a scaled loss to what is differentiated: `scaler.scale(loss) / accumulation`
)


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
        stepped: Callable[[torch.optim.Optimizer, list[Tensor]], None],
        silent_steps: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Make the service.

        Args:
            policy: Whether the script's AMP is taken over, and by which type.
            scales: What a taken-over GradScaler speaks of.
            report: Tells substitutions.
            refused: Context of an `autocast(enabled=False)` region.
            stand_back: Called when the script's AMP is kept and shows itself.
            stepped: Told of the steps that a kept GradScaler decides, with its flags: one a device.
            silent_steps: Context in which optimizers step and nobody else is told.
        """
        self._takes_over = policy.script_amp == "takeover"
        self._half = None if policy.cast_model_type == "float32" else HALF[policy.dtype]
        self._scales, self._report = scales, report
        self._refused, self._give_way = refused, stand_back
        self._stepped, self._silent_steps = stepped, silent_steps
        self._saw_amp = False  # an enabled region or scaler of the script
        self._stood_back = False
        self._shown: weakref.WeakKeyDictionary[GradScaler, float] = weakref.WeakKeyDictionary()

    def wrap_autocast_init(self, original: Call) -> Call:
        """Return `torch.autocast.__init__`: an enabled region has our half type, or at O0 is off."""

        @wraps(original)
        def __init__(
            region: Any,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: Any = True,  # noqa: FBT002
            cache_enabled: Any = None,
        ) -> None:
            creator = _creator()
            row = DEVICES.get(device_type)
            if row is None or not row.available() or creator == CHECKPOINT:
                original(region, device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
                # see `wrap_autocast_enter`: what runs again was inside a region that refused
                region._mpx_refuses = region._mpx_restored = (
                    creator == CHECKPOINT and not enabled and dtype is torch.float32
                )
                return
            scripts_own = not creator.startswith(TORCH)
            if self._takes_over and enabled and self._half is not None:
                if scripts_own:
                    self._tell_region(dtype or torch.get_autocast_dtype(device_type), self._half)
                dtype = self._half
            elif self._takes_over and enabled and scripts_own:
                self._report(
                    "script-autocast", "the script's autocast regions are off: the level computes in FP32"
                )
                enabled = False
            original(region, device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
            if not self._takes_over and region._enabled and scripts_own:
                self._stand_back()
            wanted = scripts_own or creator == CUSTOM_FUNCTION
            region._mpx_refuses = wanted and not enabled and self._half is not None

        return __init__

    def _stand_back(self) -> None:
        self._stood_back = True
        self._give_way()

    def _tell_region(self, asked: torch.dtype, ours: torch.dtype) -> None:
        self._saw_amp = True
        text = "the script's autocast regions taken over"
        if asked is not ours:
            text += f" ({_name(asked)} became {_name(ours)})"
        self._report("script-autocast", text)

    def wrap_autocast_enter(self, original: Call) -> Call:
        """Return `torch.autocast.__enter__`: with `enabled=False` the script wants FP32, also where ours would begin.

        That is so where it switches something off. In a script that never switches AMP on, such a region is a flag that
        is off: as without us it has no effect, and the level is computed.

        The type of a region that refuses, which nobody uses, says so to a checkpoint that runs a part of it again.
        """

        @wraps(original)
        def __enter__(region: Any) -> Any:
            if not getattr(region, "_mpx_refuses", False):
                return original(region)
            means_it = not self._stood_back and (
                self._saw_amp or torch.is_autocast_enabled(region.device) or vars(region).get("_mpx_restored")
            )
            context = self._refused() if means_it else nullcontext()
            context.__enter__()
            vars(region).setdefault("_mpx_regions", []).append(context)
            result = original(region)
            if means_it and self._takes_over:  # a region of its own inside would take this type
                torch.set_autocast_dtype(region.device, torch.float32)
            elif not (means_it or self._stood_back):
                self._report(
                    "script-autocast-off",
                    "the script's AMP is off by a flag of its own: the level is computed",
                )
            return result

        return __enter__

    def wrap_autocast_exit(self, original: Call) -> Call:
        """Return `torch.autocast.__exit__`."""

        @wraps(original)
        def __exit__(region: Any, *error: Any) -> Any:
            result = original(region, *error)
            if getattr(region, "_mpx_refuses", False):
                region._mpx_regions.pop().__exit__(None, None, None)
            return result

        return __exit__

    def wrap_scaler_init(self, original: Call) -> Call:
        """Return `GradScaler.__init__`: notes an enabled scaler."""

        @wraps(original)
        def __init__(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            if not scaler.is_enabled():
                return
            if self._takes_over:
                self._saw_amp = True
                self._shown[scaler] = self._scales.latest.scale
                text = "the script's GradScaler taken over: gradients are unscaled when backward returns"
                self._report("script-gradscaler", text)
            else:
                self._stand_back()

        return __init__

    @property
    def scaler_methods(self) -> dict[str, Callable[[Call], Call]]:
        """The methods of `GradScaler` that become a face of our scaler, or are observed."""
        return {
            "scale": self._instead(lambda scaler, outputs: outputs, kept=self._watch_scale),
            "unscale_": self._instead(lambda scaler, optimizer: None),
            "step": self._instead(
                lambda scaler, optimizer, *args, **kwargs: optimizer.step(*args, **kwargs),
                kept=self._watch_step,
            ),
            "update": self._instead(self._update),
            "get_scale": self._instead(self._scale),
            "state_dict": self._instead(self._state_dict),
            "load_state_dict": self._instead(self._load_state_dict),
        }

    def _instead(self, ours: Call, kept: Call | None = None) -> Callable[[Call], Call]:
        """Return a wrapper: `ours` for an enabled scaler that is taken over, `kept` with torch's method for another."""

        def wrapper(original: Call) -> Call:
            @wraps(original)
            def method(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
                if not scaler.is_enabled():
                    return original(scaler, *args, **kwargs)
                if self._takes_over:
                    return ours(scaler, *args, **kwargs)
                if kept is not None:
                    return kept(original, scaler, *args, **kwargs)
                return original(scaler, *args, **kwargs)

            return method

        return wrapper

    def _scale(self, scaler: GradScaler) -> float:
        """The scale as of the last `update()`: scripts compare it before and after to learn of a skipped step."""
        latest = self._scales.latest  # first: it waits for what `_shown` may still learn
        return self._shown.get(scaler, latest.scale)

    def _show(self, scaler: GradScaler) -> None:
        self._scales.lowest_since_last_asked(lambda scale: self._shown.__setitem__(scaler, scale))

    def _update(self, scaler: GradScaler, new_scale: float | Tensor | None = None) -> None:
        if new_scale is not None:
            self._scales.adopt(float(new_scale), clean=0)
        self._show(scaler)

    def _state_dict(self, scaler: GradScaler) -> dict[str, Any]:
        return {
            "scale": self._scale(scaler),
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
            "_growth_tracker": self._scales.latest.clean,
        }

    def _load_state_dict(self, scaler: GradScaler, state: dict[str, Any]) -> None:
        if state:  # of a disabled scaler it is empty
            self._scales.adopt(float(state["scale"]), clean=int(state.get("_growth_tracker", 0)))
        self._show(scaler)

    def _watch_scale(self, original: Call, scaler: GradScaler, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        for tensor in tensors(scaled):
            if tensor.grad_fn is not None and scaler._scale is not None:
                notes_of(tensor.grad_fn)[SCALED_BY] = scaler._scale.detach().clone()
        return scaled

    def _watch_step(
        self, original: Call, scaler: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        with self._silent_steps():
            result = original(scaler, optimizer, *args, **kwargs)
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        self._stepped(optimizer, list(found))
        return result

    def true_losses(self, roots: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the losses behind roots that a kept GradScaler has scaled."""
        return tuple(_unscaled(root) for root in roots)


def _unscaled(root: Tensor) -> Tensor:
    node = root.grad_fn
    for _ in range(LONGEST_WAY):
        if node is None:
            break
        scale: Tensor | None = notes_of(node).get(SCALED_BY)
        if scale is not None:
            return root.detach() / scale.to(root.device)
        node = node.next_functions[0][0] if node.next_functions else None
    return root.detach()


def _creator() -> str:
    """Return the file that makes an autocast region; `torch.cuda.amp.autocast` is a subclass that passes it on."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__init__" and frame.f_code.co_filename.startswith(TORCH):
        if frame.f_back is None:
            break
        frame = frame.f_back
    return frame.f_code.co_filename


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
