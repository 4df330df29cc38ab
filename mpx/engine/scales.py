"""One loss scale for each call site of the backward pass: a GAN's three losses get three scalers by themselves."""

from __future__ import annotations

import math
import os
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import mpx
from mpx.engine.device_scale import DeviceScale
from mpx.loss_scale import LossScale, initial
from mpx.record.series import Thinned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import FrameType

    from torch import Tensor
    from torch.autograd.graph import Node

    from mpx.engine.arrivals import Arrivals
    from mpx.presets.policy import LossScale as Settings

__all__ = ["Scales", "caller_site"]

LARGEST_FP16_SEED = 2.0**15  # the seed has the type of the loss, and 2^16 is infinite in FP16
SIGNATURE_LENGTH = 6
INTERNAL = tuple(str(Path(str(package.__file__)).parent) + os.sep for package in (torch, mpx))
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
STANDARD = str(Path(os.__file__).parent) + os.sep


def caller_site() -> str:
    """Return "file.py:line" of the innermost frame that belongs neither to torch nor to mpx.

    Where that is an installed library's (a trainer that calls `backward` for everybody), the line of the script that
    led there comes first: it is what tells one loss from another.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _internal(path := frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "unknown"
    line = _line(path, frame.f_lineno)
    if not _installed(path):
        return line
    calling = frame
    while calling.f_back is not None and _installed(calling.f_code.co_filename):
        calling = calling.f_back
    if _installed(calling.f_code.co_filename):
        return line
    return f"{_line(calling.f_code.co_filename, calling.f_lineno)} ({line})"


@cache
def _internal(path: str) -> bool:
    return path.startswith(INTERNAL)


@cache
def _installed(path: str) -> bool:
    return path.startswith((*INTERNAL, STANDARD, "<frozen ")) or any(folder in path for folder in INSTALLED)


@lru_cache(maxsize=256)
def _line(path: str, number: int) -> str:
    return f"{Path(path).name}:{number}"


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
    ahead: int = 0  # passes whose verdict is on its way from an accelerator
    on_device: DeviceScale | None = None  # what that has made of them; of no meaning when there are none

    def __post_init__(self) -> None:
        self.init = self.lowest = self.highest = self.state.scale

    def move(self, state: LossScale, backward: int) -> None:
        """Take a new state, and write its scale down if it is another one."""
        if state.scale != self.state.scale:
            self.lowest, self.highest = min(self.lowest, state.scale), max(self.highest, state.scale)
            self.history.append(backward, state.scale)
        self.state = state


class _Noted(NamedTuple):
    """The passes that a script counts as those of one scaler of its own."""

    sites: set[str]
    begin: Mapping[str, float | int] | None


class _Here(threading.local):
    noted: _Noted | None = None


class Scales:
    """The scalers of a process by call site, and what a checkpoint and the record say of them.

    Where verdicts are on their way from an accelerator, whoever asks or sets a scale here waits for them.

    Attributes:
        in_force: Whether losses are scaled at all.
        falls: How often a scale fell, of all sites together.
    """

    def __init__(self, settings: Settings, history_points: int, arrivals: Arrivals) -> None:
        self._settings, self._arrivals = settings, arrivals
        self.in_force: bool = settings.mode != "none"
        self._begin = initial(settings)
        self._points = history_points
        self._sites: dict[str, _Site] = {}
        self._restored: dict[str, Mapping[str, float | int]] = {}
        self._latest: str | None = None
        self._ran: set[str] = set()
        self._backward = 0  # number of the last pass that was judged
        self.falls = 0
        self._here = _Here()

    @property
    def latest(self) -> LossScale:
        """The state of the call site that ran last; before the first one, what it will begin with."""
        self._arrivals.wait()
        return self._sites[self._latest].state if self._latest else self._begin

    def lowest_since_last_asked(self, then: Callable[[float], None]) -> None:
        """Call `then`, once it is known, with the lowest scale of the sites that ran since the last such question.

        It falls when one of them overflowed.
        """
        ran = [self._sites[site] for site in self._ran]
        self._ran.clear()
        self._arrivals.add(
            None, lambda _: then(min((one.state.scale for one in ran), default=self.latest.scale))
        )

    def adopt(self, scale: float, *, clean: int) -> None:
        """Set every site, present and future, to a state that the script's own GradScaler was given."""
        self._arrivals.wait()
        state = {"scale": scale, "clean": clean}
        self._begin = self._begin.restore_state(state)
        self.adopt_at(self._sites, state)

    def adopt_at(self, sites: Iterable[str], state: Mapping[str, float | int]) -> None:
        """Set sites that ran to a state that the script asks for."""
        self._arrivals.wait()
        for site in sites:
            entry = self._sites[site]
            entry.move(entry.state.restore_state(state), self._backward)

    def lowest_of(self, sites: Iterable[str]) -> LossScale:
        """Return the state with the lowest scale among sites that ran; of none, what the next one begins with."""
        self._arrivals.wait()
        states = (self._sites[site].state for site in sites)
        return min(states, key=lambda state: state.scale, default=self._begin)

    @contextmanager
    def noting(self, begin: Mapping[str, float | int] | None) -> Iterator[set[str]]:
        """Yield the sites that run inside, as they do; one that is new there begins with the state `begin`."""
        outer, here = self._here.noted, _Noted(set(), begin)
        self._here.noted = here
        try:
            yield here.sites
        finally:
            self._here.noted = outer

    def enter(self, site: str, loss: Tensor, *, counts: bool = True) -> LossScale:
        """Return the state for a call site that is about to run its backward pass.

        A new site takes its state from a checkpoint; or that of a site whose loss is computed alike, so that a loss
        which a script differentiates in several places does not look for its range in each; or from a site of the
        checkpoint that is no more, because the script was edited; or begins as the preset says.

        Args:
            site: Of `caller_site`.
            loss: The first root of the pass.
            counts: Whether a script that asks for the scale means this pass too (not one inside its loss).
        """
        self._arrivals.wait()
        ceiling = LARGEST_FP16_SEED if self.in_force and _seeds_half(loss) else math.inf
        found = self._sites.get(site)
        if found is None:
            found = self._sites[site] = self._new_site(site, loss, ceiling)
        if ceiling < math.inf:
            found.move(found.state.at_most(ceiling), self._backward)
        if counts:
            self._note(site)
        return found.state

    def _note(self, site: str) -> None:
        self._latest = site
        self._ran.add(site)
        if self._here.noted is not None:
            self._here.noted.sites.add(site)

    def serves_ahead(self, site: str, loss: Tensor) -> bool:
        """Whether `enter_ahead` has a scale for a call site; not before its first pass, which asks other sites."""
        entry = self._sites.get(site)
        if entry is None or (_seeds_half(loss) and entry.state.at_most(LARGEST_FP16_SEED) is not entry.state):
            return False
        on_device = entry.on_device
        return not entry.ahead or on_device is None or on_device.scale.device == loss.device

    def enter_ahead(self, site: str, loss: Tensor) -> float | Tensor:
        """Return the scale for a pass whose verdict nobody will wait for; a tensor where it moves.

        `leave_ahead` ends it.
        """
        self._note(site)
        entry = self._sites[site]
        if not entry.ahead:
            moves = entry.state.settings.mode == "dynamic"
            entry.on_device = DeviceScale(entry.state, loss.device) if moves else None
        entry.ahead += 1
        # a copy: the pass of another thread may move the scale while this one runs
        return entry.state.scale if entry.on_device is None else entry.on_device.scale.clone()

    def move_ahead(self, site: str, overflowed: Tensor, unknown: Tensor) -> None:
        """Move the scale on the device, as `judge` will on the host when the verdict is here.

        Args:
            site: One that `enter_ahead` knows.
            overflowed: Bool, no dimension: whether a gradient was not finite.
            unknown: The same: whether the pass says nothing of the scale.
        """
        on_device = self._sites[site].on_device
        if on_device is not None:
            on_device.move(overflowed, unknown)

    def leave_ahead(self, site: str) -> float:
        """Return the scale with which the oldest pass of `enter_ahead` ran: its verdict is here, or it failed."""
        entry = self._sites[site]
        entry.ahead -= 1
        return entry.state.scale

    def _new_site(self, site: str, loss: Tensor, ceiling: float) -> _Site:
        kind = _signature(loss)
        alike = next((entry.state for entry in self._sites.values() if entry.kind == kind), None)
        noted = self._here.noted
        if site in self._restored:
            state = self._begin.restore_state(self._restored.pop(site))
        elif noted is not None and noted.begin is not None:
            state = self._begin.restore_state(noted.begin)
        elif alike is not None:
            state = alike
        elif self._restored:
            state = self._begin.restore_state(self._restored[next(reversed(self._restored))])
        else:
            state = self._begin
        entry = _Site(state.at_most(ceiling), kind, Thinned(self._points))
        entry.history.append(self._backward, entry.state.scale)
        return entry

    def judge(self, site: str, *, finite: bool, backward: int | None = None) -> LossScale:
        """Move a site's scale after a pass, and return its state.

        Args:
            site: One that `enter` knows.
            finite: Whether all gradients were.
            backward: The number of the pass; None for one that is not counted.
        """
        if backward is not None:
            self._backward = backward
        entry = self._sites[site]
        before, after = entry.state.scale, entry.state.after(finite=finite)
        entry.overflows += not finite
        if after.scale == before:
            entry.state = after
            return after
        entry.growths += after.scale > before
        entry.backoffs += after.scale < before
        self.falls += after.scale < before
        entry.move(after, self._backward)
        return after

    def export_state(self) -> dict[str, dict[str, float | int]]:
        """Return the state of every site as plain numbers, for a checkpoint; the latest to begin comes last."""
        self._arrivals.wait()
        waiting = {site: dict(state) for site, state in self._restored.items()}
        return waiting | {site: entry.state.export_state() for site, entry in self._sites.items()}

    def restore_state(self, states: Mapping[str, Mapping[str, float | int]]) -> None:
        """Take over the states of a checkpoint: now for sites that ran, at their first backward pass for the others."""
        self._arrivals.wait()
        self._restored = {site: dict(state) for site, state in states.items()}
        for site, entry in self._sites.items():
            if site in self._restored:
                entry.move(entry.state.restore_state(self._restored.pop(site)), self._backward)

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


def _seeds_half(loss: Tensor) -> bool:
    """Whether the seed gradient becomes an FP16 number: of an FP16 loss, or of one that was cast from FP16 last."""
    if loss.dtype is torch.float16:
        return True
    node: Node | None = loss.grad_fn
    if node is None or not node.name().startswith("ToCopyBackward"):
        return False
    source, place = node.next_functions[0]
    metadata = getattr(source, "_input_metadata", ())
    return place < len(metadata) and metadata[place].dtype is torch.float16


def _pairs(lists: tuple[Iterable[float], Iterable[float]]) -> list[list[float]]:
    return [[x, y] for x, y in zip(*lists, strict=True)]
