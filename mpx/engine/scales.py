"""One loss scale for each call site of the backward pass: a GAN's three losses get three scalers without being asked."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import mpx
from mpx.loss_scale import LossScale, initial
from mpx.record.series import Thinned

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import FrameType

    from torch import Tensor

    from mpx.presets.policy import LossScale as Settings

__all__ = ["Scales", "caller_site"]

SIGNATURE_LENGTH = 6
INTERNAL = (str(Path(torch.__file__).parent), str(Path(mpx.__file__).parent))


def caller_site() -> str:
    """Return "file.py:line" of the innermost frame that belongs neither to torch nor to mpx."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(INTERNAL):
        frame = frame.f_back
    return "unknown" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@dataclass
class _Site:
    state: LossScale
    kind: tuple[str, ...]
    history: Thinned
    init: float = field(init=False)
    lowest: float = field(init=False)
    highest: float = field(init=False)
    growths: int = 0
    backoffs: int = 0
    overflows: int = 0

    def __post_init__(self) -> None:
        self.init = self.lowest = self.highest = self.state.scale


class Scales:
    """The scalers of a process by call site, and what a checkpoint and the record say of them."""

    def __init__(self, settings: Settings, history_points: int) -> None:
        self._settings = settings
        self._begin = initial(settings)
        self._points = history_points
        self._sites: dict[str, _Site] = {}
        self._restored: dict[str, Mapping[str, float | int]] = {}
        self._latest: str | None = None

    @property
    def in_force(self) -> bool:
        """Whether losses are scaled at all."""
        return self._settings.mode != "none"

    @property
    def latest(self) -> float:
        """The scale of the call site that ran last; what a script's own GradScaler answers when asked."""
        return self._sites[self._latest].state.scale if self._latest else self._begin.scale

    @property
    def latest_clean(self) -> int:
        """Clean backward passes of that call site since its scale last changed."""
        return self._sites[self._latest].state.clean if self._latest else 0

    def adopt(self, scale: float, *, clean: int) -> None:
        """Set every site, present and future, to a state that the script's own GradScaler was given."""
        state = {"scale": scale, "clean": clean}
        self._begin = self._begin.restore_state(state)
        for entry in self._sites.values():
            entry.state = entry.state.restore_state(state)

    def at(self, site: str) -> LossScale:
        """Return the state for a call site that `enter` knows."""
        return self._sites[site].state

    def enter(self, site: str, loss: Tensor) -> LossScale:
        """Return the state for a call site that is about to run its backward pass.

        A new site takes the state of a checkpoint; or that of a site whose loss is computed alike, so that a loss which a script differentiates in
        several places does not look for its range in each; or begins as the preset says.
        """
        self._latest = site
        found = self._sites.get(site)
        if found is None:
            kind = _signature(loss)
            state = next((entry.state for entry in self._sites.values() if entry.kind == kind), self._begin)
            if site in self._restored:
                state = state.restore_state(self._restored.pop(site))
            found = self._sites[site] = _Site(state, kind, Thinned(self._points))
            found.history.append(0, state.scale)
        return found.state

    def judge(self, site: str, *, finite: bool, backward: int) -> None:
        """Move a site's scale after the backward pass number `backward`."""
        entry = self._sites[site]
        before, after = entry.state.scale, entry.state.after(finite=finite)
        entry.state = after
        entry.overflows += not finite
        if after.scale != before:
            entry.growths += after.scale > before
            entry.backoffs += after.scale < before
            entry.lowest, entry.highest = min(entry.lowest, after.scale), max(entry.highest, after.scale)
            entry.history.append(backward, after.scale)

    def export_state(self) -> dict[str, dict[str, float | int]]:
        """Return the state of every site as plain numbers, for a checkpoint."""
        return {site: entry.state.export_state() for site, entry in self._sites.items()}

    def restore_state(self, states: Mapping[str, Mapping[str, float | int]]) -> None:
        """Take over the states of a checkpoint: now for sites that ran, at their first backward pass for the others."""
        self._restored = dict(states)
        for site, entry in self._sites.items():
            if site in self._restored:
                entry.state = entry.state.restore_state(self._restored.pop(site))
                entry.history.append(0, entry.state.scale)

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the record's `scalers`."""
        return [
            {
                "site": site,
                "final": entry.state.scale,
                "min": entry.lowest,
                "max": entry.highest,
                "init": entry.init,
                "growths": entry.growths,
                "backoffs": entry.backoffs,
                "overflows": entry.overflows,
                "history": _pairs(entry.history.to_lists()),
            }
            for site, entry in self._sites.items()
        ]


def _signature(loss: Tensor) -> tuple[str, ...]:
    """Return the names of the last operations of a loss, which tell losses of one script apart."""
    names: list[str] = []
    node = loss.grad_fn
    while node is not None and len(names) < SIGNATURE_LENGTH:
        names.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    return tuple(names)


def _pairs(lists: tuple[Iterable[float], Iterable[float]]) -> list[list[float]]:
    return [[x, y] for x, y in zip(*lists, strict=True)]
