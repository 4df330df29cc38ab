"""What a record says once it is read with its preset: the facts that rows and findings share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from mpx.record.model import Process, RunRecord
from mpx.record.parts import LossCurve, Overflow, Scaler
from mpx.report.wording import percent, printable
from mpx.values import frozen

__all__ = [
    "ZEROED",
    "Settling",
    "failed_early",
    "half_type",
    "keeps_script_amp",
    "last_loss",
    "level",
    "loss_curve",
    "loss_scale",
    "optimizers_in_turn",
    "overflow_unit",
    "own_overflows",
    "program",
    "settling",
    "skips_nonfinite",
    "underflow",
    "updates_by_hand",
    "working",
    "worst_scaler",
    "zeroed",
]

ZEROED = "zeroed-gradients"  # the engine's id of that substitution

# From 2^16 down to below 1 takes 17 halvings. An overflow that comes within this many passes of the one before still
# belongs to the search; a later one is news.
SETTLING_GAP = 20


@frozen
class Settling:
    """The search of a dynamic scale for its range: `overflows` within the first `passes`, down to `scale`."""

    overflows: int = 0
    passes: int = 0
    scale: float | None = None


def level(record: RunRecord) -> str:
    """Return the preset's name."""
    return str(record.preset.get("name", "?"))


def half_type(record: RunRecord) -> str | None:
    """Return the half type that the preset computes in; None when it computes in FP32."""
    preset = record.preset
    in_half = preset.get("cast_model_type") == "half" or preset.get("patch_torch_functions") is True
    return str(preset.get("dtype")) if in_half and preset.get("dtype") else None


def loss_scale(record: RunRecord) -> dict[str, Any]:
    """Return the preset's loss-scale settings."""
    settings = record.preset.get("loss_scale")
    return settings if isinstance(settings, dict) else {}


def skips_nonfinite(record: RunRecord) -> bool:
    """Tell whether the preset skips a step whose gradients are not finite."""
    choice = record.preset.get("skip_nonfinite", "auto")
    return choice == "always" or (
        choice == "auto" and loss_scale(record).get("mode") in ("dynamic", "static")
    )


def keeps_script_amp(record: RunRecord) -> bool:
    """Tell whether the script's own mixed precision ran as written, and mpx only watched."""
    return record.saw_script_amp and record.preset.get("script_amp") == "keep"


def failed_early(record: RunRecord) -> bool:
    """Tell whether the script did not come to import torch: its own message says all there is to say."""
    ended_badly = record.status in ("failed", "interrupted", "killed")
    return not record.processes and ended_badly and not record.notices


def program(record: RunRecord) -> str:
    """Return what ran, as short as the user would call it; of a command also the one script that worked below it."""
    named = record.script or (record.command[-1] if record.command else "?")
    if record.target_kind != "command":
        return named
    scripts = {PurePath(item.argv[0]).name for item in working(record) if item.argv}
    below = scripts.pop() if len(scripts) == 1 else ""
    return f"{PurePath(named).name}: {below}" if below else PurePath(named).name


def working(record: RunRecord) -> list[Process]:
    """Return the processes that did what a level can change."""
    return [item for item in record.processes if item.trained or item.forwards]


def own_overflows(record: RunRecord) -> list[Overflow]:
    """Return the overflows of the processes whose counts are the run's: of ranks, the lowest."""
    ranks = {item.process: item.rank for item in record.processes if item.trained}
    lowest = min((rank for rank in ranks.values() if rank is not None), default=None)
    return [item for item in record.overflows if ranks.get(item.process) in (None, lowest)]


def overflow_unit(record: RunRecord) -> str:
    """Return what a backward pass may be called: `step` when every step had exactly one."""
    return "step" if record.backwards == record.steps.attempted else "backward pass"


def updates_by_hand(record: RunRecord) -> bool:
    """Tell whether gradients were computed and no torch optimizer used them."""
    return record.backwards > 0 and not record.steps.attempted


def zeroed(record: RunRecord) -> int:
    """Return in how many passes mpx set gradients to 0 that no torch optimizer steps: something had overflowed."""
    return sum(item.count for item in record.substitutions if item.id == ZEROED)


def optimizers_in_turn(record: RunRecord) -> int:
    """Return how many optimizers share the one loss, each with passes of its own; 0 when each pass is for all."""
    used = [item.attempted for item in record.optimizers if item.attempted]
    return len(used) if len(used) > 1 and sum(used) == record.backwards else 0


def worst_scaler(record: RunRecord) -> Scaler | None:
    """Return the scaler to show: the one with the most overflows, and of equals the one that went lowest."""
    return max(record.scalers, key=lambda item: (item.overflows, -item.min), default=None)


def loss_curve(record: RunRecord) -> LossCurve | None:
    """Return the loss to show: the one with the most points."""
    known = [curve for curve in record.losses if curve.value]
    return max(known, key=lambda curve: len(curve.value), default=None)


def last_loss(record: RunRecord) -> float | None:
    """Return the last value of the loss that is shown."""
    curve = loss_curve(record)
    return curve.value[-1] if curve else None


def underflow(record: RunRecord) -> str | None:
    """Return how many of the sampled gradients would be 0 in the half type.

    None when none were sampled, or where a GradScaler of the script's had scaled them.
    """
    known = record.gradients
    if known is None or known.underflow is None or keeps_script_amp(record):
        return None
    share = known.underflow.unscaled
    text = f"{percent(share) if share else 'none'} would be 0 in {printable(known.half)}"
    if known.scale == 1 or not share:
        return text
    scaled = known.underflow.scaled
    return f"{text} without a loss scale, {percent(scaled) if scaled else 'none'} with it"


def settling(record: RunRecord) -> Settling:
    """Return how the dynamic scale found its range at the start.

    To it belong the first overflows of the gradients of each call site, as long as each comes soon after the one
    before, at a lower scale: a scale that has grown in between had found its range. What overflowed in the forward
    pass says nothing about the scale.
    """
    if loss_scale(record).get("mode") != "dynamic":
        return Settling()
    sites: dict[tuple[str, str | None], list[Overflow]] = {}
    for item in own_overflows(record):
        if item.kind == "backward_inf" and item.scale is not None:
            sites.setdefault((item.process, item.site), []).append(item)
    chains = [_chain(sorted(items, key=lambda item: item.backward)) for items in sites.values()]
    found = [item for chain in chains for item in chain]
    if not found:
        return Settling()
    backoff = loss_scale(record).get("backoff_factor", 0.5)
    return Settling(
        overflows=len(found),
        passes=max(item.backward for item in found),
        scale=min(item.scale for item in found if item.scale is not None) * backoff,
    )


def _chain(overflows: Iterable[Overflow]) -> list[Overflow]:
    chain: list[Overflow] = []
    before, scale = 0, float("inf")
    for item in overflows:
        if item.scale is None or item.scale >= scale or item.backward - before > SETTLING_GAP:
            break
        chain.append(item)
        before, scale = item.backward, item.scale
    return chain
