"""What follows from a backward pass: is it clean, and if not, why, what is put right and what the user is told."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING

import torch.distributed as dist

from mpx.errors import MpxError
from mpx.monitors import Pass, Seen

if TYPE_CHECKING:
    from torch import nn

    from mpx.engine.kernels import Report
    from mpx.engine.names import Names
    from mpx.engine.scales import Scales
    from mpx.engine.statistics import StatisticsGuard
    from mpx.engine.watch import ForwardWatch
    from mpx.engine.working import ModuleRules
    from mpx.presets.policy import Policy

__all__ = ["CollapseError", "Judge", "say"]


class CollapseError(MpxError):
    """Training went on overflowing and the preset says to stop: raised into the script."""

    exit_code = 1


class Judge:
    """Moves the scale, restores statistics, and names the module where a forward pass leaves the half type's range."""

    def __init__(
        self,
        policy: Policy,
        *,
        scales: Scales,
        statistics: StatisticsGuard,
        watch: ForwardWatch,
        rules: ModuleRules,
        names: Names,
        report: Report,
    ) -> None:
        self._policy = policy
        self._scales, self._statistics, self._watch = scales, statistics, watch
        self._rules, self._names, self._report = rules, names, report
        self._adjusts = policy.cast_model_type != "float32"
        self._bad_in_a_row: Counter[str] = Counter()  # by call site: in a GAN one player may collapse alone
        self._told_of_collapse: set[str] = set()

    def stand_back(self) -> None:
        """From now on only name what is seen: the script has mixed precision of its own."""
        self._adjusts = False

    def judge(self, seen: Seen, *, number: int, step: int) -> Pass:
        """Return the verdict on backward pass `number`, after `step` steps, and adjust what the next pass runs with.

        A non-finite loss is no overflow of the scale: the scale stays. In an accumulation window that has overflowed
        already nothing is known of a later pass alone: it is neither counted nor called clean.
        """
        module: nn.Module | None = None
        kind: str | None
        if not seen.loss_finite:
            module = self._watch.take()
            kind = "loss_nan" if module is None else "forward_inf"
        else:
            kind = "backward_inf" if seen.overflowed else None
        one = Pass(number, step, seen, kind, None if module is None else self._names.of_module(module))
        for poisoned in seen.mended or ():
            self._tell_of_statistics(poisoned)
        if kind is None:
            self._accept(seen)
        elif self._adjusts:
            self._mend(one, module)
        if self._adjusts and self._scales.in_force:
            self._move_scale(one)
        return one

    def _move_scale(self, one: Pass) -> None:
        """Move the scale by what this pass says of it: to the ranks together, where they share gradients."""
        seen = one.seen
        if seen.sticky:
            return
        finite: bool | None
        if seen.shared is not None:
            finite = seen.shared.finite
        else:  # a loss that was not finite says nothing of the scale
            finite = True if one.kind is None else False if one.kind == "backward_inf" else None
        if finite is not None:
            self._scales.judge(seen.site, finite=finite, backward=one.number)

    def _accept(self, seen: Seen) -> None:
        if self._watch.armed:
            self._watch.disarm(seen.site)
        if seen.sticky:
            return
        if self._bad_in_a_row:
            self._bad_in_a_row.pop(seen.site, None)
        if self._adjusts and seen.mended is None:
            self._statistics.accept()

    def _tell_of_statistics(self, poisoned: nn.Module) -> None:
        name = self._names.of_module(poisoned)
        text = f"running statistics of `{name}` put back after an overflowed forward pass"
        self._report(f"statistics:{name}", text)

    def _mend(self, one: Pass, module: nn.Module | None) -> None:
        self._bad_in_a_row[one.seen.site] += 1
        if one.seen.mended is None:
            for poisoned in self._statistics.restore():
                self._tell_of_statistics(poisoned)
        if one.kind == "backward_inf":
            return
        self._watch.arm(one.seen.site)
        after = self._policy.forward_overflow.float32_after
        if (
            module is not None
            and 0 < after <= self._watch.in_a_row
            and not self._rules.computes_float32(module)
        ):
            self._rules.name(module)
            text = (
                f"`{one.module}` computes in FP32: its {self._policy.dtype} forward pass overflowed "
                f"{self._watch.in_a_row} times in a row"
            )
            self._report(f"forward:{one.module}", text)
            say(
                f"{text}. `--fp32-module '{one.module}'` does so from the start, `--dtype bfloat16` has FP32's range"
            )

    def look_at_collapse(self, one: Pass) -> None:
        """Say so once when nothing but passes such as this came for as long as the preset allows, or stop the script.

        Raises:
            CollapseError: The preset's `collapse.action` is "stop".
        """
        in_a_row = self._bad_in_a_row[one.seen.site]
        if in_a_row != self._policy.collapse.after:
            return
        half = self._policy.dtype
        wider = "" if half == "bfloat16" else "`--dtype bfloat16` or "
        causes = {
            "loss_nan": "the loss itself is not finite, which no loss scale can help: look at data and learning rate",
            "forward_inf": f"the forward pass of `{one.module}` leaves the range of {half}: "
            f"try {wider}`--fp32-module '{one.module}'`",
            "backward_inf": f"gradients are not finite at a loss scale of {one.seen.scale:g}: "
            f"try {wider}`--opt-level O0`, to see whether FP32 trains",
        }
        text = f"{in_a_row} backward passes in a row were not finite (at {one.seen.site}): {causes[str(one.kind)]}"
        if self._policy.collapse.action == "stop":
            raise CollapseError(text, hint="`--on-collapse warn` lets the run go on")
        if one.seen.site not in self._told_of_collapse:
            self._told_of_collapse.add(one.seen.site)
            say(text, every_rank=one.seen.shared is not None)


def say(text: str, *, every_rank: bool = False) -> None:
    """Write one line of ours to stderr; of what every rank would say, the first one's is enough."""
    if every_rank and dist.is_available() and dist.is_initialized() and dist.get_rank():
        return
    sys.stderr.write(f"mpx: {text}\n")
