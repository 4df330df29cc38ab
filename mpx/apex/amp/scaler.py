"""One of amp's loss scalers: a view of the scales of the passes that the script runs under its number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mpx.apex.running import session
from mpx.loss_scale import LossScale

__all__ = ["LossScaler"]


class LossScaler:
    """The scaler of one `loss_id`. mpx has a scale for each place that calls backward: this may stand for several."""

    def __init__(self) -> None:
        self._sites: set[str] = set()
        self._begin: dict[str, float | int] | None = None

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Count the passes that run inside as those of this scaler."""
        with session().scales.noting(self._begin) as sites:
            try:
                yield
            finally:
                self._sites |= sites
                if sites:
                    self._begin = None

    @property
    def _state(self) -> LossScale:
        scales = session().scales
        state = scales.lowest_of(self._sites)
        return state if self._begin is None else state.restore_state(self._begin)

    @property
    def dynamic(self) -> bool:
        return session().policy.loss_scale.mode == "dynamic"

    def loss_scale(self) -> float:
        """Return the scale; 1 where the level scales nothing."""
        return self._state.scale

    @property
    def _loss_scale(self) -> float:
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, scale: float) -> None:
        self.restore({"scale": float(scale), "clean": self._unskipped})

    @property
    def _unskipped(self) -> int:
        return self._state.clean

    @_unskipped.setter
    def _unskipped(self, clean: int) -> None:
        self.restore({"scale": self.loss_scale(), "clean": int(clean)})

    def restore(self, state: Mapping[str, float | int]) -> None:
        """Take a state, also for passes to come: `scale`, and `clean` passes without overflow since it changed."""
        if not self._sites:
            self._begin = dict(state)
        session().scales.adopt_at(self._sites, state)

    def clear_overflow_state(self) -> None:
        """Do nothing: an overflow is judged when backward returns."""

    def update_scale(self) -> bool:
        """Return that no step has to be skipped by hand: mpx has moved the scale, and skips by itself."""
        return False
