"""What a record says to its gates: each becomes a verdict with the value that was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from mpx.gates import Gate, parse_gate
from mpx.record.model import RunRecord
from mpx.record.parts import Overflow, Verdict
from mpx.report import wording
from mpx.report.curves import relative_gap, tail_loss
from mpx.report.facts import last_loss, loss_scale, own_overflows, skips_nonfinite, working
from mpx.report.wording import amount, count, share
from mpx.values import frozen

__all__ = ["judge", "preset_gates"]


@frozen
class _Measured:
    """A value in the gate's unit and in words; without a value the words say why there is none."""

    value: float | None
    text: str


@frozen
class _Case:
    """What a measure looks at."""

    record: RunRecord
    gate: Gate
    other: RunRecord | None


Baselines = Mapping[str, RunRecord]


def preset_gates(record: RunRecord) -> list[Gate]:
    """Return the gates that the run was started with."""
    texts = record.preset.get("gates")
    return [parse_gate(str(text)) for text in texts] if isinstance(texts, (list, tuple)) else []


def judge(
    gates: Iterable[Gate], record: RunRecord, *, baselines: Baselines, origin: str = ""
) -> list[Verdict]:
    """Return the verdict on each gate.

    A gate that cannot be judged has not passed: a pipeline that measured nothing must not be green.

    Args:
        gates: What must not be.
        record: The run.
        baselines: The runs that gates compare with, by the name that stands in the gate.
        origin: Where the gates were asked for.
    """
    verdicts = []
    for gate in gates:
        measured = _measure(_Case(record, gate, baselines.get(gate.run or "")))
        passed = measured.value is not None and not gate.is_true_of(measured.value)
        verdicts.append(Verdict(gate.text, passed, measured.value, measured.text, origin))
    return verdicts


def _measure(case: _Case) -> _Measured:
    after, steps = case.gate.after, case.record.steps.attempted
    if after and steps <= after:
        return _Measured(
            None, f"not judged: the run had {count(steps, 'step')}, none after the first {after:,}"
        )
    return _MEASURES[case.gate.measure.name](case)


def _overflow_rate(case: _Case) -> _Measured:
    passes = _passes(case)
    if passes <= 0:
        return _Measured(None, "not judged: there was no backward pass")
    number = _events(case, "backward_inf")
    return _Measured(number / passes, share(number, passes, "backward pass"))


def _skipped_steps(case: _Case) -> _Measured:
    steps = case.record.steps
    early = len(_skipped_at(case.record, until=case.gate.after)) if case.gate.after else 0
    number = max(0, steps.skipped - early)
    return _Measured(number, share(number, steps.attempted - case.gate.after, "step"))


def _consecutive_skips(case: _Case) -> _Measured:
    longest = case.record.longest_skip_run
    if case.gate.after and _all_events_known(case.record):
        late = _skipped_at(case.record) - _skipped_at(case.record, until=case.gate.after)
        longest = min(longest, _longest_run(late))
    return _Measured(longest, f"{count(longest, 'step')} skipped in a row")


def _nonfinite_loss(case: _Case) -> _Measured:
    number = _events(case, "loss_nan", "forward_inf")
    if not case.gate.after:
        number = max(number, case.record.nonfinite_losses)
    return _Measured(number, share(number, _passes(case), "backward pass"))


def _scale_floor(case: _Case) -> _Measured:
    settings = loss_scale(case.record)
    floor = settings.get("min")
    if settings.get("mode") != "dynamic" or not isinstance(floor, (int, float)):
        return _Measured(0.0, "there is no scale that could fall")
    first = case.gate.after * _passes_a_step(case.record)
    lows = [
        min([scaler.final, *(y for x, y in (p for p in scaler.history if len(p) == 2) if x > first)])
        if case.gate.after
        else scaler.min
        for scaler in case.record.scalers
    ]
    lowest = min(lows, default=None)
    if lowest is None:
        return _Measured(0.0, "no loss was scaled")
    text = f"the lowest scale was {wording.scale(lowest)}, the floor is {wording.scale(floor)}"
    return _Measured(float(lowest <= floor), text)


def _final_loss(case: _Case) -> _Measured:
    last = last_loss(case.record)
    if last is None:
        return _Measured(None, "not judged: no loss was recorded")
    return _Measured(last, wording.loss(last))


def _loss_delta_vs(case: _Case) -> _Measured:
    if case.other is None:
        return _Measured(None, f"not judged: there is no run `{case.gate.run}`")
    own, other = tail_loss(case.record), tail_loss(case.other)
    if own is None or other is None:
        whose = "the run" if own is None else f"`{case.gate.run}`"
        return _Measured(None, f"not judged: no loss was recorded of {whose}")
    if not (math.isfinite(own) and math.isfinite(other)):
        return _Measured(math.nan, f"not finite: {wording.loss(own)} against {wording.loss(other)}")
    gap = relative_gap(own, other)
    return _Measured(gap, f"{wording.percent(gap)}: {wording.loss(own)} against {wording.loss(other)}")


def _peak_memory(case: _Case) -> _Measured:
    memory = case.record.memory
    if memory is None:
        return _Measured(None, "not judged: no memory was recorded")
    return _Measured(memory.peak_bytes, wording.bytes_(memory.peak_bytes))


def _step_time(case: _Case) -> _Measured:
    throughput = case.record.throughput
    if throughput is None or throughput.step_ms is None:
        return _Measured(None, "not judged: too few steps to time one")
    value = throughput.step_ms.median
    if case.gate.after:
        late = [point[1] for point in throughput.history if len(point) == 2 and point[0] > case.gate.after]
        if not late:
            return _Measured(None, f"not judged: no step after the first {case.gate.after:,} was timed")
        value = sorted(late)[(len(late) - 1) // 2]
    return _Measured(value, f"{wording.milliseconds(value)} (median)")


def _half_flops_share(case: _Case) -> _Measured:
    coverage = case.record.coverage
    if coverage is None or coverage.half_flops_share is None:
        if case.record.preset.get("cast_model_type") == "float32":
            return _Measured(0.0, "nothing runs in half at this level")
        why = (coverage.missing if coverage else "") or "no training step"
        return _Measured(None, f"not judged: the share was not measured ({why})")
    return _Measured(coverage.half_flops_share, wording.percent(coverage.half_flops_share))


def _steps(case: _Case) -> _Measured:
    return _Measured(case.record.steps.attempted, count(case.record.steps.attempted, "step"))


def _scale_desync(case: _Case) -> _Measured:
    parted = case.record.desyncs
    text = f"scales parted at {parted[0].site}" if parted else "the scales of all ranks were equal"
    return _Measured(float(bool(parted)), text)


def _not_instrumented(case: _Case) -> _Measured:
    active = len(working(case.record))
    return _Measured(
        float(not active), f"{amount(active)} of {count(len(case.record.processes), 'process')} worked"
    )


_MEASURES: Mapping[str, Callable[[_Case], _Measured]] = {
    "overflow_rate": _overflow_rate,
    "skipped_steps": _skipped_steps,
    "consecutive_skips": _consecutive_skips,
    "nonfinite_loss": _nonfinite_loss,
    "scale_floor": _scale_floor,
    "final_loss": _final_loss,
    "loss_delta_vs": _loss_delta_vs,
    "peak_memory": _peak_memory,
    "step_time": _step_time,
    "half_flops_share": _half_flops_share,
    "steps": _steps,
    "scale_desync": _scale_desync,
    "not_instrumented": _not_instrumented,
}


def _passes_a_step(record: RunRecord) -> float:
    return record.backwards / record.steps.attempted if record.steps.attempted else 1.0


def _passes(case: _Case) -> int:
    """Return how many passes there were after the warm-up; with accumulation a step has several."""
    return case.record.backwards - round(case.gate.after * _passes_a_step(case.record))


def _events(case: _Case, *kinds: str) -> int:
    """Return how many passes were of these kinds after the warm-up.

    Only the first events are kept one by one; what was counted beyond them came later, so it is after the warm-up
    unless that is longer than all that is known: then this is an upper bound.
    """
    counts = case.record.overflow_counts
    total = sum(int(getattr(counts, kind)) for kind in kinds)
    if not case.gate.after:
        return total
    early = [
        item for item in own_overflows(case.record) if item.kind in kinds and _is_early(item, case.gate.after)
    ]
    return max(0, total - len(early))


def _is_early(item: Overflow, after: int) -> bool:
    return item.step is not None and item.step < after


def _skipped_at(record: RunRecord, *, until: int | None = None) -> set[int]:
    """Return the steps, counted from 0, that overflows made to be skipped."""
    if not skips_nonfinite(record):
        return set()
    steps = {item.step for item in own_overflows(record) if item.step is not None}
    return {step for step in steps if until is None or step < until}


def _all_events_known(record: RunRecord) -> bool:
    counts = record.overflow_counts
    return len(own_overflows(record)) >= counts.backward_inf + counts.loss_nan + counts.forward_inf


def _longest_run(steps: set[int]) -> int:
    longest = 0
    for step in steps:
        if step - 1 not in steps:
            end = step
            while end + 1 in steps:
                end += 1
            longest = max(longest, end - step + 1)
    return longest
