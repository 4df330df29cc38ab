"""Runs beside each other: how far losses are apart, what a level gains, which to take. Pure functions on records."""

from mpx.report.compare.levels import Comparison, Issue, LevelResult, Noise, Settings, Trial
from mpx.report.compare.show import COMPARISONS, show
from mpx.report.compare.weigh import compare

__all__ = [
    "COMPARISONS",
    "Comparison",
    "Issue",
    "LevelResult",
    "Noise",
    "Settings",
    "Trial",
    "compare",
    "show",
]
