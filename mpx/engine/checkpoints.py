"""The scaler's state travels in the optimizer's `state_dict`, so a resumed run equals the uninterrupted one.

Plain python ignores it: `load_state_dict` of torch looks at "state" and "param_groups" only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from mpx.engine.scales import Scales

__all__ = ["Checkpoints"]

KEY = "mpx"


class Checkpoints:
    """Wraps `Optimizer.state_dict` and `Optimizer.load_state_dict`."""

    def __init__(self, scales: Scales) -> None:
        self._scales = scales

    def wrap_state_dict(self, original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Return a `state_dict` with `{"mpx": {"loss_scales": {site: {"scale", "clean"}}}}` where losses are scaled."""

        @wraps(original)
        def state_dict(optimizer: Optimizer, *args: Any, **kwargs: Any) -> dict[str, Any]:
            state = original(optimizer, *args, **kwargs)
            if self._scales.in_force:
                state[KEY] = {"loss_scales": self._scales.export_state()}
            return state

        return state_dict

    def wrap_load_state_dict(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return a `load_state_dict` that takes the scaler's state back."""

        @wraps(original)
        def load_state_dict(
            optimizer: Optimizer, state_dict: dict[str, Any], *args: Any, **kwargs: Any
        ) -> None:
            original(optimizer, state_dict, *args, **kwargs)
            if KEY in state_dict and self._scales.in_force:
                self._scales.restore_state(state_dict[KEY]["loss_scales"])

        return load_state_dict
