"""The tables of the long report (`-v`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from mpx.record.model import RunRecord
from mpx.record.parts import Rank
from mpx.report import wording
from mpx.report.formats.options import Options
from mpx.report.wording import amount, printable

__all__ = ["ROWS_SHOWN", "TABLES", "Table", "numeric_columns", "tables"]

ROWS_SHOWN = 20

Table = tuple[str, list[tuple[str, ...]]]  # a title; the first row names the columns


def tables(record: RunRecord, options: Options) -> list[str]:
    """Return the lines of every table that has something to show."""
    lines: list[str] = []
    for make in TABLES:
        for title, (head, *rows) in make(record):
            lines += ["", f"{title}:"]
            lines += _laid_out([head, *rows[:ROWS_SHOWN]], options)
            if len(rows) > ROWS_SHOWN:
                lines.append(f"  ... and {len(rows) - ROWS_SHOWN:,} more, in `run.json`")
    return lines


def gates(record: RunRecord) -> Iterator[Table]:
    """Yield the verdict on each gate."""
    if record.gates:
        rows = [
            ("passed" if item.passed else "FAILED", item.gate, item.text, item.origin)
            for item in record.gates
        ]
        yield "gates", [("verdict", "fails when", "measured", "asked by"), *rows]


def optimizers(record: RunRecord) -> Iterator[Table]:
    """Yield the steps of each optimizer."""
    if record.optimizers:
        rows = [
            (o.name, amount(o.attempted), amount(o.applied), amount(o.skipped)) for o in record.optimizers
        ]
        yield "optimizers", [("optimizer", "attempted", "applied", "skipped"), *rows]


def scalers(record: RunRecord) -> Iterator[Table]:
    """Yield the loss scale of each call site of backward."""
    if not record.scalers:
        return
    head = ("backward at", "first", "last", "lowest", "highest", "raised", "lowered", "overflows")
    rows = [
        (
            item.site or "?",
            *(wording.scale(value) for value in (item.init, item.final, item.min, item.max)),
            *(amount(value) for value in (item.growths, item.backoffs, item.overflows)),
        )
        for item in record.scalers
    ]
    yield "loss scales", [head, *rows]


def overflows(record: RunRecord) -> Iterator[Table]:
    """Yield where the recorded overflows came from, and each of them."""
    if not record.overflows:
        return
    places = Counter((item.kind, item.module or "", item.parameter or "") for item in record.overflows)
    rows = [(kind, module, name, amount(number)) for (kind, module, name), number in places.most_common()]
    yield (
        f"where the {len(record.overflows):,} recorded overflows came from",
        [("kind", "module", "parameter", "events"), *rows],
    )
    ranked = any(item.rank is not None for item in record.overflows)
    each = [
        (
            *([str(item.rank)] if ranked else []),
            amount(item.backward),
            "" if item.step is None else amount(item.step),
            "" if item.scale is None else wording.scale(item.scale),
            item.kind,
            item.module or item.parameter or "",
        )
        for item in record.overflows
    ]
    head = (*(["rank"] if ranked else []), "pass", "steps before", "scale", "kind", "place")
    yield "overflows in order", [head, *each]


def losses(record: RunRecord) -> Iterator[Table]:
    """Yield each loss."""
    rows = [
        (
            curve.site or "?",
            wording.loss(curve.value[0]),
            wording.loss(curve.value[-1]),
            amount(len(curve.value)),
        )
        for curve in record.losses
        if curve.value
    ]
    if rows:
        yield "losses", [("backward at", "first", "last", "points kept"), *rows]


def operations(record: RunRecord) -> Iterator[Table]:
    """Yield the operations, by work."""
    if not record.coverage or not record.coverage.by_op:
        return
    total = sum(item.flops for item in record.coverage.by_op)
    ordered = sorted(record.coverage.by_op, key=lambda item: (-item.flops, -item.calls, item.op, item.dtype))
    rows = [
        (
            item.op,
            item.dtype,
            amount(item.calls),
            f"{item.flops:.3g}",
            wording.percent(item.flops / total) if total else "",
        )
        for item in ordered
    ]
    yield (
        "matmul and convolution work of one forward call",
        [("operation", "type", "calls", "FLOPs", "share"), *rows],
    )


def casts(record: RunRecord) -> Iterator[Table]:
    """Yield how many operations had a result of which type."""
    rows = [
        (
            what if name == what else f"{what}: {name}",
            amount(number) if isinstance(number, int) else str(number),
        )
        for what, numbers in record.casts.items()
        for name, number in (numbers.items() if isinstance(numbers, dict) else [(what, numbers)])
    ]
    if rows:
        yield "casts", [("results", "number"), *rows]


def substitutions(record: RunRecord) -> Iterator[Table]:
    """Yield what mpx did otherwise than the script asked."""
    if record.substitutions:
        rows = [(item.id, amount(item.count), item.text) for item in record.substitutions]
        yield "replaced", [("id", "times", "what"), *rows]


def processes(record: RunRecord) -> Iterator[Table]:
    """Yield every process that imported torch."""
    if not record.processes:
        return
    head = ("pid", "rank", "host", "device", "torch", "forwards", "backwards", "steps", "ended")
    rows = [
        (
            str(item.pid),
            "" if item.rank is None else str(item.rank),
            item.host,
            (item.device.name or item.device.type) if item.device else "",
            item.torch or "",
            amount(item.forwards),
            amount(item.backwards),
            amount(item.steps.attempted),
            "cleanly" if item.ended else "without its exit handlers",
        )
        for item in record.processes
    ]
    yield "processes that imported torch", [head, *rows]


def ranks(record: RunRecord) -> Iterator[Table]:
    """Yield what each rank did, and which of them overflowed where."""
    if len(record.ranks) < 2:
        return
    attempts = len({item.attempt for item in record.ranks}) > 1
    head = ("rank", "host", "steps", "skipped", "ms a step", "95 %", "peak memory", "loss scale", "ended")
    rows = [
        (
            str(item.rank),
            item.host,
            amount(item.steps.attempted),
            amount(item.steps.skipped),
            f"{item.step_ms.median:.3g}" if item.step_ms else "",
            f"{item.step_ms.p95:.3g}" if item.step_ms else "",
            wording.bytes_(item.peak_bytes) if item.peak_bytes else "",
            wording.scale(min(item.scales.values())) if item.scales else "",
            _ending(item),
            *([str(item.attempt)] if attempts else []),
        )
        for item in record.ranks
    ]
    yield "ranks", [(*head, *(["attempt"] if attempts else [])), *rows]
    if record.overflowing:
        places = [(place, ", ".join(map(str, of))) for place, of in record.overflowing.items()]
        yield "ranks that overflowed", [("place", "ranks"), *places]


def _ending(rank: Rank) -> str:
    if rank.signal or rank.exit_code is not None:
        return rank.signal or f"exit code {rank.exit_code}"
    return "cleanly" if rank.ended else "without its exit handlers"


def faults(record: RunRecord) -> Iterator[Table]:
    """Yield what failed in mpx itself."""
    if record.faults:
        rows = [
            (item.where, amount(item.count), item.text.strip().splitlines()[-1:]) for item in record.faults
        ]
        yield "faults of mpx", [("part", "times", "text"), *((a, b, "".join(c)) for a, b, c in rows)]


TABLES: tuple[Callable[[RunRecord], Iterator[Table]], ...] = (
    gates,
    optimizers,
    scalers,
    losses,
    overflows,
    operations,
    casts,
    substitutions,
    processes,
    ranks,
    faults,
)


def _laid_out(rows: Sequence[tuple[str, ...]], options: Options) -> list[str]:
    rows = [tuple(printable(cell) for cell in row) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    numeric = numeric_columns(rows)
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    if options.color:
        lines[0] = f"\x1b[2m{lines[0]}\x1b[0m"
    return lines


def numeric_columns(rows: Sequence[tuple[str, ...]]) -> list[bool]:
    """Return which columns hold numbers below their name: they are set flush right."""
    return [all(_is_number(row[column]) for row in rows[1:]) for column in range(len(rows[0]))]


def _is_number(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell[0] in "-<"
