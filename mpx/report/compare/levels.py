"""The values of a comparison. Names are fixed: tools parse its JSON."""

from __future__ import annotations

from dataclasses import field

from mpx.record.model import RunRecord
from mpx.values import frozen

__all__ = ["Comparison", "Issue", "LevelResult", "Noise", "Settings", "Trial"]


@frozen
class Settings:
    """What counts as a difference. All are shares, 0 to 1.

    `tolerance` and `metric_tolerance` are how much worse a level may be; what differs by no more than twice what the
    baseline differs from itself is never held against a level.
    """

    tolerance: float = 0.05
    metric_tolerance: float = 0.01
    higher_is_better: bool = True
    worth_speed: float = 0.05
    worth_memory: float = 0.10


@frozen
class Trial:
    """One run at one level, and the value of the metric that the script printed."""

    level: str
    record: RunRecord
    metric: float | None = None


@frozen
class Noise:
    """How far runs of the baseline are from each other, as shares: nothing nearer than that can be told apart."""

    final_gap: float | None = None
    largest_gap: float | None = None
    metric_gap: float | None = None
    step_time: float | None = None


@frozen
class Issue:
    """Something found at a level. `at` is the backward pass in which it begins; an error rules the level out."""

    level: str
    id: str
    severity: str
    text: str
    at: int | None = None


@frozen
class LevelResult:
    """What the runs at one level came to. Gaps and ratios are against the baseline; a speed-up of 2 is twice as fast.

    `curve` is the mean loss of the runs, smoothed, at the backward passes `passes`.
    """

    level: str
    runs: int = 0
    failed: int = 0
    steps: int = 0
    final_loss: float | None = None
    final_gap: float | None = None
    largest_gap: float | None = None
    largest_gap_at: int | None = None
    step_ms: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    peak_bytes: int | None = None
    memory_ratio: float | None = None
    overflow_rate: float | None = None
    metric: float | None = None
    metric_gap: float | None = None
    passes: list[float] = field(default_factory=list)
    curve: list[float] = field(default_factory=list)


@frozen
class Comparison:
    """Levels against the first of them. `verdict` is the level to take, None when that cannot be said."""

    baseline: str
    settings: Settings
    noise: Noise | None
    levels: list[LevelResult]
    issues: list[Issue]
    verdict: str | None
    reason: str
    schema: int = 1
