"""From trials to a verdict: what each level came to, what is wrong with it, and whether it is worth taking."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from mpx.record.model import RunRecord
from mpx.report.checks import findings
from mpx.report.compare.gaps import Curve, Gap, curve_of, distance, gap, mean_curve
from mpx.report.compare.levels import Comparison, Issue, LevelResult, Noise, Settings, Trial
from mpx.report.compare.verdict import verdict
from mpx.report.curves import relative_gap
from mpx.report.facts import loss_curve, loss_scale
from mpx.report.wording import loss, percent

__all__ = ["compare", "loss_limit"]

SURE = 2.0  # times the noise: closer than that, a difference may be chance
_COLLAPSES = ("scale-collapse", "long-skip-run")


def compare(trials: Sequence[Trial], settings: Settings) -> Comparison:
    """Return the comparison of levels with the first trial's, which is the baseline."""
    levels = list(dict.fromkeys(trial.level for trial in trials))
    by_level = {level: [trial for trial in trials if trial.level == level] for level in levels}
    base = by_level[levels[0]]
    good = [trial for trial in base if not _failed(trial)]
    site = next((found.site for trial in good if (found := loss_curve(trial.record))), None)
    reference = mean_curve(_curves(good, site))
    noise = _noise(good, site) if len(good) > 1 else None
    results: list[LevelResult] = []
    issues: list[Issue] = []
    for level in levels:
        mine = by_level[level]
        curve = mean_curve(_curves([trial for trial in mine if not _failed(trial)], site))
        apart = gap(curve, reference) if curve and reference and level != levels[0] else None
        result = _result(level, mine, base, curve, apart)
        results.append(result)
        first = level == levels[0]
        has_metric = results[0].metric is not None
        issues += _issues(mine, result, apart, noise, settings, is_baseline=first, has_metric=has_metric)
    chosen, reason = verdict(results, issues, noise, settings)
    return Comparison(levels[0], settings, noise, results, issues, chosen, reason)


def loss_limit(settings: Settings, noise: Noise | None) -> float:
    """Return how far above the baseline's a loss may end, as a share of it."""
    return max(settings.tolerance, SURE * _floor(noise, "final_gap"))


def _failed(trial: Trial) -> bool:
    return trial.record.status not in ("completed", "unknown") or bool(trial.record.exit_code)


def _curves(trials: Sequence[Trial], site: str | None) -> list[Curve]:
    return [curve for trial in trials if (curve := curve_of(trial.record, site)) is not None]


def _noise(base: Sequence[Trial], site: str | None) -> Noise:
    gaps = [gap(one, other) for one, other in combinations(_curves(base, site), 2)]
    metrics = [trial.metric for trial in base if trial.metric is not None]
    times = [time for trial in base if (time := _step_ms(trial.record)) is not None]
    return Noise(
        final_gap=max((abs(one.final) for one in gaps), default=None),
        largest_gap=max((one.largest for one in gaps), default=None),
        metric_gap=max((relative_gap(a, b) for a, b in combinations(metrics, 2)), default=None),
        step_time=max(times) / min(times) - 1 if len(times) > 1 and min(times) > 0 else None,
    )


def _result(
    level: str, mine: Sequence[Trial], base: Sequence[Trial], curve: Curve | None, apart: Gap | None
) -> LevelResult:
    good = [trial for trial in mine if not _failed(trial)]
    result = LevelResult(
        level,
        runs=len(mine),
        failed=len(mine) - len(good),
        steps=max((trial.record.steps.attempted for trial in good), default=0),
        step_ms=_middle([time for trial in good if (time := _step_ms(trial.record)) is not None]),
        peak_bytes=_peak(good),
        overflow_rate=_overflow_rate(good),
        metric=_mean([trial.metric for trial in good if trial.metric is not None]),
    )
    if curve is not None:
        result = replace(result, final_loss=curve.values[-1], passes=curve.passes, curve=curve.values)
    if apart is not None:
        result = replace(
            result, final_gap=apart.final, largest_gap=apart.largest, largest_gap_at=apart.largest_at
        )
    if base and mine and mine[0].level != base[0].level:
        result = _against(result, good, [trial for trial in base if not _failed(trial)])
    return result


def _against(result: LevelResult, good: Sequence[Trial], base: Sequence[Trial]) -> LevelResult:
    """Return the result with its ratios: of medians, and of what ran in the same turn for their spread."""
    pairs = [(_step_ms(one.record), _step_ms(other.record)) for one, other in zip(base, good, strict=False)]
    ratios = [before / after for before, after in pairs if before and after]
    before, after = (
        _middle([t for trial in base if (t := _step_ms(trial.record)) is not None]),
        result.step_ms,
    )
    if before and after:
        result = replace(result, speedup=before / after)
    if len(ratios) > 1:
        result = replace(result, speedup_low=min(ratios), speedup_high=max(ratios))
    peak, metric = _peak(base), _mean([trial.metric for trial in base if trial.metric is not None])
    if peak and result.peak_bytes:
        result = replace(result, memory_ratio=result.peak_bytes / peak)
    if metric is not None and result.metric is not None:
        distance = relative_gap(result.metric, metric)
        result = replace(result, metric_gap=-distance if result.metric < metric else distance)
    return result


def _issues(
    mine: Sequence[Trial],
    result: LevelResult,
    apart: Gap | None,
    noise: Noise | None,
    settings: Settings,
    *,
    is_baseline: bool,
    has_metric: bool,
) -> Iterator[Issue]:
    level = result.level
    for trial in mine:
        if _failed(trial):
            how = trial.record.signal or f"exit code {trial.record.exit_code}"
            text = f"a run ended with {how}, {trial.record.steps.attempted:,} steps after its start"
            yield Issue(level, "run-failed", "error", text, trial.record.backwards or None)
            break
    yield from _collapse(mine, level)
    if is_baseline:
        return
    if apart is not None:
        yield from _loss_issues(result, apart, loss_limit(settings, noise))
    if result.metric is None and has_metric:
        yield Issue(level, "metric-missing", "error", "the metric was not found in the output of any run")
    if result.metric_gap is not None:
        limit = max(settings.metric_tolerance, SURE * _floor(noise, "metric_gap"))
        worse = -result.metric_gap if settings.higher_is_better else result.metric_gap
        if worse > limit or math.isnan(result.metric_gap):
            text = (
                f"the metric is {distance(worse)} worse, at {loss(result.metric or 0.0)}, "
                f"more than the {percent(limit)} allowed"
            )
            near = apart is not None and apart.final <= settings.tolerance
            yield Issue(
                level,
                "metric-regression",
                "error",
                text + (", although the loss looks normal" if near else ""),
            )


def _loss_issues(result: LevelResult, apart: Gap, limit: float) -> Iterator[Issue]:
    level = result.level
    begins = apart.begins_above(limit)
    if begins is not None:
        if not math.isfinite(apart.final):
            yield Issue(
                level, "divergence", "error", f"the loss is not finite from pass {begins:,} on", begins
            )
            return
        text = (
            f"the loss leaves that of the baseline in pass {begins:,} and ends {distance(apart.final)} above it, "
            f"more than the {percent(limit)} allowed"
        )
        yield Issue(level, "divergence", "error", text, begins)
    elif apart.final < -limit:
        text = (
            f"the loss ends {distance(-apart.final)} below the baseline's: it is another training, look at it"
        )
        yield Issue(level, "loss-differs", "warning", text, int(apart.passes[-1]))


def _collapse(mine: Sequence[Trial], level: str) -> Iterator[Issue]:
    for trial in mine:
        found = next((item for item in findings(trial.record) if item.id in _COLLAPSES), None)
        if found is not None:
            grave = found.id == "scale-collapse"
            text = found.text.removeprefix("collapse: ")
            yield Issue(
                level, found.id, "error" if grave else "warning", text, _collapse_begins(trial.record)
            )
            return


def _collapse_begins(record: RunRecord) -> int | None:
    """Return the pass in which the scale reached its floor, else that of the first overflow of the longest row."""
    floor = loss_scale(record).get("min")
    reached = [
        int(point[0])
        for scaler in record.scalers
        for point in scaler.history
        if len(point) == 2 and isinstance(floor, (int, float)) and point[1] <= floor
    ]
    if reached:
        return min(reached)
    longest: list[int] = []
    row: list[int] = []
    for item in record.overflows:
        row = [*row, item.backward] if row and item.backward == row[-1] + 1 else [item.backward]
        longest = max(longest, row, key=len)
    return longest[0] if longest else None


def _floor(noise: Noise | None, name: str) -> float:
    value = getattr(noise, name) if noise is not None else None
    return value if value is not None and math.isfinite(value) else 0.0


def _step_ms(record: RunRecord) -> float | None:
    throughput = record.throughput
    return throughput.step_ms.median if throughput is not None and throughput.step_ms is not None else None


def _peak(trials: Sequence[Trial]) -> int | None:
    return max((trial.record.memory.peak_bytes for trial in trials if trial.record.memory), default=None)


def _overflow_rate(trials: Sequence[Trial]) -> float | None:
    passes = sum(trial.record.backwards for trial in trials)
    return sum(trial.record.overflow_counts.backward_inf for trial in trials) / passes if passes else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _middle(values: Sequence[float]) -> float | None:
    return sorted(values)[(len(values) - 1) // 2] if values else None
