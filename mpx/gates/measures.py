"""What a gate can ask about: one row a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from mpx.values import frozen

__all__ = ["MEASURES", "UNITS", "Kind", "Measure"]

Kind = Literal["fraction", "bytes", "time", "count", "number", "flag"]

# What a number of each kind may be followed by, and what that makes of it. Inside, a fraction is 0 to 1, sizes are
# bytes and times are milliseconds. Sizes and times are never without a unit: nobody can tell 8 from 8.
UNITS: Mapping[Kind, Mapping[str, float]] = {
    "fraction": {"%": 0.01, "": 1.0},
    "bytes": {
        "B": 1,
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
        "TiB": 2**40,
        "kB": 10**3,
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
    },
    "time": {"us": 0.001, "ms": 1.0, "s": 1000.0, "min": 60_000.0},
    "count": {"": 1.0},
    "number": {"": 1.0},
    "flag": {},
}


@frozen
class Measure:
    """Something that a record tells.

    Attributes:
        name: What a gate calls it.
        kind: Which numbers and units it is compared with; a flag is not compared, it is so or not.
        holds: What it is, for help and messages.
        bare: Whether the name alone is a gate: it fails when there was any of it.
        warm_up: Whether the first steps can be left out of it (`after N`).
        live: Whether a process knows it while it trains, so that `--abort-on` can ask.
        of_run: Whether it compares with another run, which is named in parentheses.
    """

    name: str
    kind: Kind
    holds: str
    bare: bool = False
    warm_up: bool = False
    live: bool = False
    of_run: bool = False


MEASURES: Mapping[str, Measure] = {
    measure.name: measure
    for measure in (
        Measure(
            "overflow_rate",
            "fraction",
            "share of the backward passes with gradients that were not finite",
            bare=True,
            warm_up=True,
            live=True,
        ),
        Measure(
            "skipped_steps",
            "count",
            "optimizer steps that were skipped",
            bare=True,
            warm_up=True,
            live=True,
        ),
        Measure(
            "consecutive_skips",
            "count",
            "the most steps skipped in a row",
            bare=True,
            warm_up=True,
            live=True,
        ),
        Measure(
            "nonfinite_loss",
            "count",
            "backward passes whose loss was NaN or infinite",
            bare=True,
            warm_up=True,
            live=True,
        ),
        Measure(
            "scale_floor",
            "flag",
            "the loss scale fell to its floor",
            bare=True,
            warm_up=True,
            live=True,
        ),
        Measure("final_loss", "number", "the last value of the loss", live=True),
        Measure(
            "loss_delta_vs",
            "fraction",
            "distance of the loss at the end from that of another run, as a share of the other's",
            of_run=True,
        ),
        Measure("peak_memory", "bytes", "the most memory in use at once", live=True),
        Measure("step_time", "time", "median time of a step", warm_up=True),
        Measure("half_flops_share", "fraction", "share of the matmul and convolution work done in half"),
        Measure("steps", "count", "optimizer steps, applied or skipped", live=True),
        Measure("scale_desync", "flag", "ranks that share gradients had different loss scales", bare=True),
        Measure("not_instrumented", "flag", "no process did anything that a level can change", bare=True),
    )
}
