"""The rows of a report: what each line says, in the order in which they stand."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

from mpx.record.model import RunRecord
from mpx.report import wording
from mpx.report.facts import (
    ZEROED,
    half_type,
    keeps_script_amp,
    level,
    loss_curve,
    loss_scale,
    optimizers_in_turn,
    overflow_unit,
    own_overflows,
    underflow,
    updates_by_hand,
    working,
    worst_scaler,
)
from mpx.report.sparkline import means, sparkline, steps
from mpx.report.wording import amount, code, count, printable, share, times
from mpx.values import frozen

__all__ = ["ROWS", "Row", "Style"]

SUBSTITUTIONS_SHOWN = 3
NOTICES_SHOWN = 2
GATES_NAMED = 3
CHANGES_NAMED = 3
OPTIMIZERS_SHOWN = 3
BARS = 20

_SHIPPED = re.compile(r"configs/O\d(-\w+)?\.yaml")
_NOT_A_CHOICE = frozenset({"schema", "name", "description"})


@frozen
class Row:
    """A line with its label; `importance` says which rows stay when there is not room for all (the highest)."""

    label: str
    parts: tuple[str, ...]
    importance: int


@frozen
class Style:
    """What can be shown. `histories`: as bars; not where a chart shows them."""

    unicode: bool
    histories: bool = True

    @property
    def arrow(self) -> str:
        """What stands between a first and a last value."""
        return "→" if self.unicode else "->"

    def bars(self, values: list[float | None]) -> str:
        """Return the history of a value, or nothing where bars cannot be shown."""
        return sparkline(values) if self.unicode and self.histories and len(values) > 1 else ""


RowMaker = Callable[[RunRecord, Style], Iterator[Row]]


def preset(record: RunRecord, _: Style) -> Iterator[Row]:
    """Where the level came from, and what was changed in it."""
    chosen = record.origin.get("name")
    if not chosen:
        return
    how = (
        "the default, as no --opt-level was given"
        if chosen == "default"
        else f"chosen by {printable(chosen)}"
    )
    parts = [f"{printable(level(record))}, {how}"]
    changes: dict[str, list[str]] = {}
    for key, origin in record.origin.items():
        if key in _NOT_A_CHOICE:
            continue
        for source in origin.split(" + "):
            if not source.startswith("derived") and not _SHIPPED.match(source):
                changes.setdefault(re.sub(r":\d+$", "", source), []).append(key)
    for source, keys in changes.items():
        named = ", ".join(keys) if len(keys) <= CHANGES_NAMED else f"{len(keys)} values"
        parts.append(f"{printable(named)} from {printable(source)}")
    yield Row("preset", tuple(parts), 50)


def processes(record: RunRecord, _: Style) -> Iterator[Row]:
    """Whose numbers these are, when several processes worked."""
    active = working(record)
    if len(active) < 2:
        return
    ranks = sorted({item.rank for item in active if item.rank is not None})
    if ranks:
        text = f"{count(len(ranks), 'rank')} worked; counts, losses and scales are those of rank {ranks[0]}"
    else:
        text = f"{count(len(active), 'process')} worked; counts are their sum"
    yield Row("processes", (text,), 45)


def optimizer_steps(record: RunRecord, _: Style) -> Iterator[Row]:
    """Steps applied and skipped."""
    counts = record.steps
    if not counts.attempted:
        return
    parts = [f"{amount(counts.applied)} of {count(counts.attempted, 'optimizer step')} applied"]
    by = " by the script's own GradScaler" if keeps_script_amp(record) else ""
    parts.append(f"{amount(counts.skipped)} skipped{by}" if counts.skipped else "none skipped")
    if 1 < len(record.optimizers) <= OPTIMIZERS_SHOWN:
        parts += [
            f"{printable(o.name)}: {amount(o.applied)} of {amount(o.attempted)}" for o in record.optimizers
        ]
    yield Row("steps", tuple(parts), 80)


def scale(record: RunRecord, style: Style) -> Iterator[Row]:
    """The loss scale and its history."""
    if not record.backwards:
        return
    if keeps_script_amp(record):
        yield Row("loss scale", ("the script's own, which mpx does not look at",), 40)
        return
    mode = loss_scale(record).get("mode")
    half = half_type(record)
    if mode == "none":
        why = "float32 needs none" if half is None else "the preset turns it off"
        if half == "bfloat16":
            why = "bfloat16 has the range of float32 and needs none"
        yield Row("loss scale", (f"off: {why}",), 40)
        return
    worst = worst_scaler(record)
    if worst is None:
        return
    if mode == "static":
        yield Row("loss scale", (f"{wording.scale(worst.final)}, fixed by the preset",), 70)
        return
    # In powers of two: on a straight axis every scale below the highest few would look like 0.
    history = [[at, math.log2(value)] for at, value in worst.history if value > 0 and math.isfinite(value)]
    bars = style.bars(steps(history, float(record.backwards), BARS)) if len(history) > 1 else ""
    head = f"{wording.scale(worst.init)} {style.arrow} {wording.scale(worst.final)}"
    if not worst.growths and not worst.backoffs:
        head = f"{wording.scale(worst.final)}, unchanged"
    parts = [f"{head}  {bars}" if bars else head]
    if worst.min < min(worst.init, worst.final):
        parts.append(f"lowest {wording.scale(worst.min)}")
    changes = {"raised": worst.growths, "lowered": worst.backoffs}
    parts += [", ".join(f"{verb} {times(number)}" for verb, number in changes.items() if number)]
    parts = [part for part in parts if part]
    if len(record.scalers) > 1:
        parts.append(f"one of {len(record.scalers)} scales, of {code(worst.site)}")
    yield Row("loss scale", tuple(parts), 75)


def overflows(record: RunRecord, _: Style) -> Iterator[Row]:
    """How often gradients were not finite, and where first."""
    if not record.backwards or keeps_script_amp(record):
        return
    number = record.overflow_counts.backward_inf
    unit = overflow_unit(record)
    parts = [share(number, record.backwards, unit) if number else f"none in {count(record.backwards, unit)}"]
    first = next((item for item in own_overflows(record) if item.kind == "backward_inf"), None)
    if first:
        place = f", in the gradient of {code(first.parameter)}" if first.parameter else ""
        parts.append(f"first in {unit.removeprefix('backward ')} {first.backward:,}{place}")
    yield Row("overflows", tuple(parts), 72 if number else 60)


def losses(record: RunRecord, style: Style) -> Iterator[Row]:
    """The loss, first and last."""
    curve = loss_curve(record)
    if curve is None:
        return
    in_turn = optimizers_in_turn(record) if len(record.losses) == 1 else 0  # then no one curve falls
    bars = "" if in_turn else style.bars(means([float(x) for x in curve.backward], curve.value, BARS))
    first, last = wording.loss(curve.value[0]), wording.loss(curve.value[-1])
    text = f"{first} {style.arrow} {last}" if len(curve.value) > 1 else last
    parts = [f"{text}  {bars}" if bars else text]
    if len(record.losses) > 1:
        parts.append(f"one of {len(record.losses)} losses, of {code(curve.site)}")
    if in_turn:
        parts.append(f"of {count(in_turn, 'optimizer')} in turn")
    if record.nonfinite_losses:
        parts.append(f"NaN or infinite {times(record.nonfinite_losses)}")
    yield Row("loss", tuple(parts), 78)


def coverage(record: RunRecord, _: Style) -> Iterator[Row]:
    """How much of the work was done in the half type."""
    value = record.coverage.half_flops_share if record.coverage else None
    half = half_type(record)
    if half is not None and record.coverage and record.coverage.missing:
        yield Row("half work", (f"not counted: {printable(record.coverage.missing)}",), 55)
    elif value is not None and half is not None:
        # by the type of the results: inside, a device without half instructions computes otherwise
        work = f"{wording.percent(value)} of the matmul and convolution work has {half} results"
        yield Row("half work", (work, "on one forward call"), 55)


def speed(record: RunRecord, _: Style) -> Iterator[Row]:
    """How fast the steps were."""
    if record.throughput is None:
        return
    per_second = record.throughput.steps_per_s
    rate = f"{per_second:.3g}" if per_second < 1000 else f"{per_second:,.0f}"
    parts = [f"{rate} steps/s on average"]
    if record.throughput.step_ms:
        took = record.throughput.step_ms
        parts.append(f"{wording.milliseconds(took.median)} a step (median)")
        parts.append(f"95 % took at most {wording.milliseconds(took.p95)}")
    yield Row("speed", tuple(parts), 35)


def communication(record: RunRecord, _: Style) -> Iterator[Row]:
    """How many bytes of gradients the ranks exchanged, and how many that saved."""
    known = record.communication
    if known is not None:
        parts = [f"{wording.bytes_(known.bytes)} of gradients reduced in {printable(known.dtype)}"]
        if known.bytes < known.full_bytes:
            parts[0] += f" instead of {wording.bytes_(known.full_bytes)}"
        yield Row("exchanged", (*parts, "by each rank"), 36)


def memory(record: RunRecord, _: Style) -> Iterator[Row]:
    """The peak."""
    if record.memory:
        device = record.memory.device
        whose = "of the process" if device == "cpu" else f"on {printable(device)}"
        yield Row("peak memory", (f"{wording.bytes_(record.memory.peak_bytes)} {whose}",), 34)


def gradients(record: RunRecord, _: Style) -> Iterator[Row]:
    """How large gradients were, and how many the half type would lose."""
    known = record.gradients
    lost = underflow(record)
    if known is not None and known.exponents is not None and lost:
        sizes = f"from 2^{known.exponents.min} to 2^{known.exponents.max + 1}"
        yield Row("gradients", (sizes, lost), 33)


def substitutions(record: RunRecord, _: Style) -> Iterator[Row]:
    """What mpx did otherwise than the script asked."""
    told = {"script-amp-kept"} | ({ZEROED} if updates_by_hand(record) else set())  # by a finding
    known = [item for item in record.substitutions if item.id not in told]
    told_alike: dict[str, list[tuple[str, int]]] = {}  # operations of which the same is said share a row
    for item in sorted(known, key=lambda item: -item.count):
        what, said = item.text.split(": ", 1) if item.id.startswith("op:") else ("", item.text)
        told_alike.setdefault(said, []).append((what, item.count))
    for said, of in list(told_alike.items())[:SUBSTITUTIONS_SHOWN]:
        listed = ", ".join(f"{printable(what)} ({times(number)})" for what, number in of)
        text = f"{printable(said)} ({times(of[0][1])})" if not of[0][0] else f"{listed}: {printable(said)}"
        yield Row("replaced", (text,), 30)
    rest = sum(len(of) for of in list(told_alike.values())[SUBSTITUTIONS_SHOWN:])
    if rest:
        yield Row("replaced", (f"and {count(rest, 'other thing')}, listed by `mpx report -v`",), 30)


def gates(record: RunRecord, _: Style) -> Iterator[Row]:
    """How many gates held; a finding names those that did not."""
    if record.gates:
        passed = [verdict for verdict in record.gates if verdict.passed]
        parts = [f"{amount(len(passed))} of {count(len(record.gates), 'gate')} passed"]
        parts += [code(verdict.gate) for verdict in passed[:GATES_NAMED]]
        yield Row("gates", tuple(parts), 77)


def notices(record: RunRecord, _: Style) -> Iterator[Row]:
    """What the launcher had to say before the start."""
    for text in record.notices[:NOTICES_SHOWN]:
        yield Row("notice", (printable(text),), 25)


ROWS: tuple[RowMaker, ...] = (
    preset,
    processes,
    optimizer_steps,
    scale,
    overflows,
    losses,
    coverage,
    speed,
    communication,
    memory,
    gradients,
    substitutions,
    gates,
    notices,
)
