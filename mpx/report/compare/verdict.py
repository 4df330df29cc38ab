"""Which level to take, and why: the fastest that trains as the baseline does, if it is worth it."""

from __future__ import annotations

from collections.abc import Sequence

from mpx.report.compare.levels import Issue, LevelResult, Noise, Settings
from mpx.report.wording import percent

__all__ = ["verdict"]


def verdict(
    results: Sequence[LevelResult], issues: Sequence[Issue], noise: Noise | None, settings: Settings
) -> tuple[str | None, str]:
    """Return the level to take and the reason; no level when the baseline itself gave nothing to compare with."""
    base, *others = results
    if base.failed == base.runs:
        return None, f"no verdict: `{base.level}` itself failed, so there is nothing to compare with"
    if base.final_loss is None:
        return None, f"no verdict: no loss of `{base.level}` was recorded"
    bad = {issue.level: issue for issue in reversed(issues) if issue.severity == "error"}
    fit = [result for result in others if result.level not in bad and result.final_gap is not None]
    faster = [result for result in fit if _is_faster(result, noise, settings)]
    if faster:
        best = max(faster, key=lambda result: result.speedup or 0.0)
        return best.level, f"take `{best.level}`: {_gain(best)}, and the loss {_nearness(best)}"
    leaner = [
        result
        for result in fit
        if _saving(result) >= settings.worth_memory and (result.speedup or 1.0) >= 1.0 - settings.worth_speed
    ]
    if leaner:
        best = max(leaner, key=_saving)
        saving = percent(_saving(best))
        return (
            best.level,
            f"take `{best.level}`: it needs {saving} less memory, and the loss {_nearness(best)}",
        )
    return base.level, f"stay on `{base.level}`: {_why_not(others, fit, bad, settings)}"


def _is_faster(result: LevelResult, noise: Noise | None, settings: Settings) -> bool:
    """Tell whether a level is faster by more than chance, as far as the repeats tell."""
    chance = (noise.step_time or 0.0) if noise is not None else 0.0
    sure = result.speedup_low is None or result.speedup_low > 1.0
    return result.speedup is not None and sure and result.speedup >= 1.0 + max(settings.worth_speed, chance)


def _saving(result: LevelResult) -> float:
    return 1.0 - result.memory_ratio if result.memory_ratio is not None else 0.0


def _gain(result: LevelResult) -> str:
    text = f"a step is {result.speedup:.2f} times as fast"
    saving = _saving(result)
    return f"{text} and needs {percent(saving)} less memory" if saving >= 0.01 else text


def _nearness(result: LevelResult) -> str:
    gap = result.final_gap or 0.0
    if gap == 0:
        return "is the same"
    return f"ends {percent(abs(gap))} {'above' if gap > 0 else 'below'} the baseline's"


def _why_not(
    others: Sequence[LevelResult], fit: Sequence[LevelResult], bad: dict[str, Issue], settings: Settings
) -> str:
    reasons = [
        f"`{level}` has a {issue.id}: {issue.text}"
        for level, issue in bad.items()
        if any(r.level == level for r in others)
    ]
    if fit:
        names = " and ".join(f"`{result.level}` ({_speed(result)})" for result in fit)
        least = (
            f"{percent(settings.worth_speed)} of a step's time and {percent(settings.worth_memory)} of memory"
        )
        verb = "gains" if len(fit) == 1 else "gain"
        reasons.append(f"{names} {verb} less than {least}, or no more than chance does")
    unknown = [result.level for result in others if result.level not in bad and result not in fit]
    reasons += [f"no loss of `{level}` was recorded" for level in unknown]
    return "; ".join(reasons) or "there is no other level"


def _speed(result: LevelResult) -> str:
    return "speed unknown" if result.speedup is None else f"{result.speedup:.2f} times as fast"
