"""Monitors: each sees what the engine does, keeps a bounded account of it, and never raises into the script."""

from mpx.monitors.base import Monitor, Pass, Seen, Shared, Step
from mpx.monitors.coverage import Coverage
from mpx.monitors.exponents import Exponents
from mpx.monitors.losses import Losses
from mpx.monitors.memory import PeakMemory
from mpx.monitors.overflow import Overflows
from mpx.monitors.progress import Progress
from mpx.monitors.throughput import Throughput

__all__ = [
    "Coverage",
    "Exponents",
    "Losses",
    "Monitor",
    "Overflows",
    "Pass",
    "PeakMemory",
    "Progress",
    "Seen",
    "Shared",
    "Step",
    "Throughput",
]
