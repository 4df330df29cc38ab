"""The monitors of a session, told only what they listen to; one that fails is off, and the run goes on."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

from mpx.engine.devices import HALF, peak_memory
from mpx.engine.reroutes import half_outside
from mpx.monitors import Coverage, Exponents, Losses, Monitor, Overflows, PeakMemory, Throughput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor, nn

    from mpx.presets.policy import Policy

__all__ = ["Audience", "chosen_monitors"]

MOMENTS = ("called", "around", "ran", "passed", "went_wrong", "asked_to_step", "stepped", "snapshot")
NOTHING = nullcontext()


class Audience:
    """Calls monitors at each moment, in their order."""

    def __init__(self, monitors: Iterable[Monitor], failed: Callable[[Monitor, Exception], None]) -> None:
        """Listen for what each monitor overrides; `failed` is told of a monitor that raised and is off."""
        self._failed = failed
        self._listeners: dict[str, list[tuple[Monitor, Callable[..., Any]]]] = {
            moment: [] for moment in MOMENTS
        }
        for monitor in monitors:
            for moment in MOMENTS:
                if getattr(type(monitor), moment) is not getattr(Monitor, moment):
                    self._listeners[moment].append((monitor, getattr(monitor, moment)))

    def tell(self, moment: str, *what: object) -> None:
        """Call every listener of a moment with what there is to see."""
        for monitor, listen in self._listeners[moment]:
            try:
                listen(*what)
            except Exception as error:  # noqa: BLE001, PERF203 - a fault of a monitor costs that monitor, never the run
                self._dismiss(monitor, error)

    def around(self, root: nn.Module) -> AbstractContextManager[Any]:
        """Return the contexts of all monitors for the work of an outermost call, as one."""
        listeners = self._listeners["around"]
        if not listeners:
            return NOTHING
        contexts = []
        for monitor, listen in listeners:
            try:
                contexts.append(listen(root))
            except Exception as error:  # noqa: BLE001, PERF203
                self._dismiss(monitor, error)
        if not contexts:
            return NOTHING
        if len(contexts) == 1:
            return contexts[0]  # type: ignore[no-any-return]
        stack = ExitStack()
        for context in contexts:
            stack.enter_context(context)
        return stack

    def snapshot(self) -> dict[str, Any]:
        """Return what the monitors add to the cumulative snapshot."""
        parts: dict[str, Any] = {}
        for monitor, listen in self._listeners["snapshot"]:
            try:
                parts.update(listen())
            except Exception as error:  # noqa: BLE001, PERF203
                self._dismiss(monitor, error)
        return parts

    def _dismiss(self, monitor: Monitor, error: Exception) -> None:
        for moment, listeners in self._listeners.items():
            self._listeners[moment] = [listener for listener in listeners if listener[0] is not monitor]
        self._failed(monitor, error)


def chosen_monitors(
    policy: Policy,
    *,
    casts: bool,
    where: Callable[[Sequence[Tensor]], tuple[str | None, str]],
    emit: Callable[..., None],
    fetch: Callable[[Tensor, Callable[[list[float]], None]], None],
) -> Iterator[Monitor]:
    """Return the monitors that a preset asks for.

    Args:
        policy: The resolved preset.
        casts: Whether the level computes in half at all.
        where: Names the module and parameter of overflowed leaves.
        emit: Writes one event of the record.
        fetch: Brings numbers from a device, without a wait.
    """
    chosen = policy.monitors
    if chosen.losses:
        yield Losses(chosen.history_points)
    if chosen.overflow:
        yield Overflows(where, emit)
    if chosen.coverage and casts:
        yield Coverage(half_outside)
    if chosen.throughput:
        yield Throughput(chosen.history_points)
    if chosen.memory:
        yield PeakMemory(chosen.history_points, peak_memory)
    if chosen.gradients:
        yield Exponents(HALF[policy.dtype], fetch)
