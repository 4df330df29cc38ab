"""Pipeline stages of `torch.distributed.pipelining`: one verdict for all stages, once a schedule has run.

What stages send each other is true (activations and gradients in FP32), so each stage scales its own passes. A step is
one for all of them: where one stage has overflowed the others have gradients of nothing, which must not be stepped with
either. They are made NaN there, as they would be had the infinity travelled on, and flagged as any that overflowed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from mpx.engine.gradients import non_finite_flags

if TYPE_CHECKING:
    from mpx.engine.gradients import Flags
    from mpx.engine.kernels import Report
    from mpx.engine.leaves import Leaves
    from mpx.engine.ranks import Ranks, Waiting

__all__ = ["Pipelines"]


class Pipelines:
    """Wraps the `step` of schedules."""

    def __init__(
        self,
        ranks: Ranks,
        flags: Flags,
        leaves: Leaves,
        *,
        judge: Callable[[str, bool], None],
        applies: Callable[[], bool],
        skips: bool,
        report: Report,
    ) -> None:
        """Make the service.

        Args:
            ranks: Lets passes wait, and asks the other stages about them.
            flags: Receives the gradients of stages that had no overflow of their own.
            leaves: Knows what optimizers step.
            judge: Moves the scale of a call site: whether the passes of a schedule were finite, on all stages.
            applies: Tells whether the level has a verdict at all, a scale that moves or steps that are skipped.
            skips: Whether overflowed gradients are kept from the weights at this level.
            report: Tells substitutions.
        """
        self._ranks, self._flags, self._leaves, self._judge = ranks, flags, leaves, judge
        self._applies, self._skips, self._report = applies, skips, report
        self._scaled: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def wrap_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the `step` of a schedule class of the session."""

        @wraps(original)
        def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            if not (schedule._has_backward and self._applies()):
                return original(schedule, *args, **kwargs)
            stages = [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)
            parameters = [p for stage in stages for p in stage.submod.parameters() if p.requires_grad]
            overflowed_before = bool(self._flags.begin_pass(parameters))  # on all stages, or on none
            with self._ranks.waiting(scaled=self._is_scaled(schedule, stages)) as passes:
                result = original(schedule, *args, **kwargs)
            self._agree(passes, stages[0], parameters, judged=overflowed_before)
            return result

        return step

    def _is_scaled(self, schedule: Any, stages: list[Any]) -> bool:
        """Whether passes may be scaled: not where gradients reach `.grad` after the pass that made them. Tells once."""
        known = self._scaled.get(schedule)
        if known is not None:
            return known
        sharded = any(hasattr(part, "_get_fsdp_state") for stage in stages for part in stage.submod.modules())
        self._scaled[schedule] = not sharded
        if sharded:
            self._report(
                "pipeline-sharded",
                "stages of `fully_shard` ran without a loss scale: their gradients are reduced after the passes",
            )
        actions = [action for of in (schedule.pipeline_order or {}).values() for action in of if action]
        if any(action.computation_type.name == "BACKWARD_WEIGHT" for action in actions):
            self._report(
                "pipeline-split",
                f"`{type(schedule).__name__}` ran without a loss scale where it splits a pass: it computes gradients "
                "of weights from what it keeps of the first half",
            )
        return not sharded

    def _agree(self, passes: Waiting, stage: Any, parameters: list[torch.Tensor], *, judged: bool) -> None:
        """Ask all stages, and let what one of them found be everybody's. Waits for an accelerator, once."""
        graded = [p for p in parameters if p.grad is not None]
        # looked at again: schedules that split a pass in two fill gradients of weights past `torch.autograd.backward`
        flags = non_finite_flags(p.grad for p in graded if p.grad is not None)
        bad, loss_bad = self._ranks.of_all_stages(passes, flags, stage, parameters)
        if not (loss_bad or judged):
            for site in passes.sites:
                self._judge(site, not bad)
        if not (bad and self._skips):
            return
        with torch.no_grad():
            for parameter in graded:
                parameter.grad.mul_(float("nan"))  # type: ignore[union-attr]
        self._flags.expose(graded, graded, self._leaves.stepped(), by_scale=not loss_bad)
