"""Counts calls, backward passes and steps."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from mpx.monitors.base import Monitor, Pass, Step

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["Progress"]

MOST_ROWS = 8  # of one class; a script may make an optimizer every epoch


class Progress(Monitor):
    """`forwards`, `backwards`, `steps`, `optimizers` and `longest_skip_run` of the record."""

    def __init__(self) -> None:
        self.forwards = 0
        self.backwards = 0
        self.attempted = 0  # steps of all optimizers
        self.longest_skip_run = 0
        self._skip_run = 0
        self._rows: list[dict[str, Any]] = []
        self._asked: deque[dict[str, Any]] = deque()  # whose steps nobody knows yet to be applied
        self._row_of: weakref.WeakKeyDictionary[Optimizer, dict[str, Any]] = weakref.WeakKeyDictionary()

    def called(self, root: nn.Module) -> None:
        self.forwards += 1

    def passed(self, one: Pass) -> None:
        self.backwards += 1

    def asked_to_step(self, optimizer: Optimizer) -> None:
        row = self._row_of.get(optimizer)
        if row is None:
            row = self._row_of[optimizer] = self._new_row(type(optimizer).__name__)
        self._asked.append(row)

    def stepped(self, step: Step) -> None:
        row = self._asked.popleft()
        self.attempted += 1
        row["attempted"] += 1
        if not step.skipped:
            row["applied"] += 1
            self._skip_run = 0
            return
        row["skipped"] += 1
        self._skip_run += 1
        self.longest_skip_run = max(self.longest_skip_run, self._skip_run)

    def _new_row(self, kind: str) -> dict[str, Any]:
        """Return a row for one more optimizer; a script that makes one every epoch shares the last row of its class."""
        same = [row for row in self._rows if row["name"].split(" ")[0] == kind]
        if len(same) >= MOST_ROWS:
            return same[-1]
        row = {
            "name": f"{kind} {len(same) + 1}" if same else kind,
            "attempted": 0,
            "applied": 0,
            "skipped": 0,
        }
        self._rows.append(row)
        return row

    def snapshot(self) -> dict[str, Any]:
        totals = {key: sum(row[key] for row in self._rows) for key in ("attempted", "applied", "skipped")}
        return {
            "forwards": self.forwards,
            "backwards": self.backwards,
            "steps": totals,
            "optimizers": [dict(row) for row in self._rows],
            "longest_skip_run": self.longest_skip_run,
        }
