"""`scale_loss`, and the handle of amp's first API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from mpx.apex.running import session

from ._amp_state import _amp_state

__all__ = ["AmpHandle", "OptimWrapper", "disable_casts", "scale_loss"]


@contextmanager
def scale_loss(
    loss: Any,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Any]:
    """Yield the loss as it is: its backward pass is scaled inside, and leaves true gradients whenever it returns."""
    with _amp_state.loss_scalers[loss_id].passes():
        yield loss


@contextmanager
def disable_casts() -> Iterator[None]:
    """Compute in FP32 inside, as `torch.autocast(enabled=False)` does.

    Models whose weights are half themselves (O3) cannot: around calls of them it does nothing, as apex's.
    """
    region = session().region
    if session().policy.master_weights is False and not region.is_open():
        yield
        return
    with region.refused(), region.disabled():
        yield


class AmpHandle:
    """What `amp.init` returns."""

    has_cache = False

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    def is_active(self) -> bool:
        """Whether the script wants amp."""
        return self._enabled

    def scale_loss(self, loss: Any, optimizer: Any) -> AbstractContextManager[Any]:
        """Return `amp.scale_loss`."""
        return scale_loss(loss, optimizer)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Return the optimizer with a `scale_loss` of its own."""
        return OptimWrapper(optimizer, num_loss)

    def _clear_cache(self) -> None:
        """Do nothing: casts are dropped when the weights change."""

    def _deactivate(self) -> None:
        """Do nothing: the level is that of the run."""


class OptimWrapper:
    """An optimizer with `scale_loss`; everything else is the optimizer's."""

    def __init__(self, optimizer: Any, num_loss: int) -> None:
        self._optimizer, self._losses = optimizer, num_loss
        self._next = 0
        first = len(_amp_state.loss_scalers)
        _amp_state.scalers_for(first + num_loss)
        self._first = first

    def scale_loss(self, loss: Any) -> AbstractContextManager[Any]:
        """Return `amp.scale_loss` for the next of the losses, in the order of the calls."""
        number = self._first + self._next % self._losses
        self._next += 1
        return scale_loss(loss, self._optimizer, number)

    def step(self, closure: Any = None) -> Any:
        """Step the optimizer."""
        self._next = 0
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)
