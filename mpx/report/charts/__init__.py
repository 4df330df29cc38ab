"""The charts of a report, in one table: each is a function of a record that yields what there is to show."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpx.record.model import RunRecord
from mpx.report.charts.cost import peak_memory, step_time
from mpx.report.charts.draw import draw, legend
from mpx.report.charts.gradients import gradient_exponents
from mpx.report.charts.loss import losses
from mpx.report.charts.overflow import overflow_timeline
from mpx.report.charts.plot import Chart
from mpx.report.charts.scale import loss_scales

__all__ = ["CHARTS", "Chart", "charts", "draw", "legend"]

CHARTS: tuple[Callable[[RunRecord], Iterator[Chart]], ...] = (
    losses,
    loss_scales,
    overflow_timeline,
    gradient_exponents,
    step_time,
    peak_memory,
)


def charts(record: RunRecord) -> list[Chart]:
    """Return every chart that the record has something for, in the order of a page."""
    return [chart for make in CHARTS for chart in make(record)]
