"""Ending a script early: after so many steps, or as soon as it does what it must not.

The way out is that of `sys.exit`: `except Exception` does not catch it, and Python ends a process or a thread with
it silently. So `finally` blocks, context managers and exit handlers of the script run, in a target of `-m` too, and a
child of multiprocessing ends with the same code. In a thread that is not the main one only the thread ends, as with
`sys.exit`. A script that catches it and goes on meets it again at its next step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpx.engine.judge import say
from mpx.gates import Gate, parse_gate

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpx.engine.scales import Scales
    from mpx.monitors import Pass, Step
    from mpx.presets.policy import Policy

__all__ = ["Budget"]

ABORTED = 96


@dataclass
class _Counts:
    """What happened since the process began to train."""

    steps: int = 0
    passes: int = 0
    skipped: int = 0
    overflows: int = 0
    nonfinite: int = 0
    skips_in_a_row: int = 0
    most_in_a_row: int = 0


class Budget:
    """Counts passes and steps of one process, and ends the script when the preset says so."""

    def __init__(
        self,
        policy: Policy,
        scales: Scales,
        *,
        emit: Callable[..., None],
        peak_bytes: Callable[[], int],
    ) -> None:
        """Make the service.

        Args:
            policy: The resolved preset.
            scales: The loss scales, for `scale_floor`.
            emit: Writes one event of the record.
            peak_bytes: The most memory in use so far, in bytes.
        """
        self._most = policy.max_steps
        self._gates = [parse_gate(text, live=True) for text in policy.abort_on]
        self._scales, self._floor = scales, policy.loss_scale.min
        self._emit, self._peak_bytes = emit, peak_bytes
        self._asks_loss = any(gate.measure.name == "final_loss" for gate in self._gates)
        self.watches: bool = bool(self._most or self._gates)  # else it need not be told anything
        self.asks: bool = bool(self._gates)  # for verdicts: they must be known at once
        self._counts = _Counts()
        self._warm: dict[Gate, _Counts] = {}
        self._loss: float | None = None
        self._told = False

    def passed(self, one: Pass) -> None:
        """A backward pass was judged.

        Raises:
            SystemExit: An expression of `abort_on` is true.
        """
        counts = self._counts
        counts.passes += 1
        counts.overflows += one.kind == "backward_inf"
        counts.nonfinite += one.kind in ("loss_nan", "forward_inf")
        if self._asks_loss:
            self._read_loss(one)
        self._ask()

    def stepped(self, step: Step) -> None:
        """An optimizer stepped, or was made to skip.

        Raises:
            SystemExit: That was the last step, or an expression of `abort_on` is true.
        """
        counts = self._counts
        counts.skipped += step.skipped
        counts.skips_in_a_row = counts.skips_in_a_row + 1 if step.skipped else 0
        counts.most_in_a_row = max(counts.most_in_a_row, counts.skips_in_a_row)
        counts.steps += 1
        self._ask()
        self._end_with_the_last()

    def attempted(self) -> None:
        """An optimizer was asked to step, and nothing asks whether it did.

        Raises:
            SystemExit: That was the last step.
        """
        self._counts.steps += 1
        self._end_with_the_last()

    def _end_with_the_last(self) -> None:
        if 0 < self._most <= self._counts.steps:
            asked = "`--max-steps` or the preset's `max_steps` asks"
            self._leave("max-steps", asked, 0, f"step budget reached: {self._counts.steps} optimizer steps")

    def _ask(self) -> None:
        for gate in self._gates:
            value = self._value(gate)
            if value is not None and gate.is_true_of(value):
                text = f"`{gate.text}` is true: {value:g}"
                self._leave("abort-on", text, ABORTED, f"ends the script: {text}")

    def _value(self, gate: Gate) -> float | None:
        now, since = self._counts, _Counts()
        if gate.after:
            if now.steps < gate.after:
                return None
            since = self._warm.setdefault(gate, _Counts(**vars(now)))
        passes = now.passes - since.passes
        values: dict[str, Callable[[], float | None]] = {
            "overflow_rate": lambda: (now.overflows - since.overflows) / passes if passes else None,
            "skipped_steps": lambda: now.skipped - since.skipped,
            "consecutive_skips": lambda: now.skips_in_a_row if gate.after else now.most_in_a_row,
            "nonfinite_loss": lambda: now.nonfinite - since.nonfinite,
            "scale_floor": lambda: float(self._scales.in_force and self._scales.latest.scale <= self._floor),
            "final_loss": lambda: self._loss,
            "peak_memory": self._peak_bytes,
            "steps": lambda: now.steps,
        }
        return values[gate.measure.name]()

    def _read_loss(self, one: Pass) -> None:
        self._loss = one.seen.number if one.seen.loss_finite else math.nan

    def _leave(self, reason: str, text: str, code: int, told: str) -> None:
        if not self._told:
            self._told = True
            counts = self._counts
            self._emit("stopped", reason=reason, text=text, step=counts.steps, backward=counts.passes)
            say(told, every_rank=reason == "max-steps")
        # not a subclass: `threading` is silent about exactly this one
        raise SystemExit(code)
