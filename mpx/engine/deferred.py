"""Backward passes that nobody waits for: what they showed stays on the accelerator until it has come to the host.

The next pass needs the scale that follows, and the next step whether to skip: both are there, as tensors. The scale
moves in kernels, and an optimizer whose kernel takes `found_inf` (torch's fused ones) is handed it. Everything else
that follows from a pass (counts, events, statistics to put back) follows when its numbers arrive.

Where the host must know more, the pass is not deferred: ranks that agree, optimizers that cannot skip by themselves,
gradients with a graph, hooks that find gradients in `.grad`, anomaly detection, and gradients that are known to have
overflowed.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpx.engine.doubts import skips_by_itself
from mpx.engine.earlier import Earlier
from mpx.engine.gradients import ZEROED, is_one_number, largest, non_finite, where_not_finite
from mpx.engine.leaves import graded
from mpx.monitors import Seen, Shared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpx.engine.arrivals import Arrivals
    from mpx.engine.doubts import Before, Doubt, Doubts
    from mpx.engine.gradients import Flags
    from mpx.engine.kernels import Report
    from mpx.engine.leaves import Leaves
    from mpx.engine.running import Running
    from mpx.engine.scales import Scales

__all__ = ["Deferred"]

GONE = torch.empty(0)  # in the place of a leaf that the script has forgotten since


@dataclass(slots=True)
class _Asked:
    """A pass whose verdict is on its way.

    Attributes:
        site: Its call site.
        doubt: What it left.
        earlier: What the pass before it had left, where some of that was still there.
        modules: Whose running statistics it may have poisoned.
        is_number: Whether its loss is one number.
        zeroes: Whether there were gradients to set to 0 if it overflowed.
        shared: Whether other ranks share its gradients.
    """

    site: str
    doubt: Doubt
    earlier: Doubt | None
    modules: list[weakref.ref[nn.Module]]
    is_number: bool
    zeroes: bool
    shared: bool


class Deferred:
    """Runs passes without a wait."""

    def __init__(
        self,
        arrivals: Arrivals,
        scales: Scales,
        leaves: Leaves,
        flags: Flags,
        running: Running,
        *,
        doubts: Doubts,
        mend: Callable[[Tensor], tuple[Sequence[nn.Module], Tensor | None]],
        ran: Callable[[], None],
        judged: Callable[[Seen], None],
        report: Report,
        skips: bool,
    ) -> None:
        """Make the service.

        Args:
            arrivals: Brings the verdicts.
            scales: Scale by call site.
            leaves: Knows what optimizers step.
            flags: Receives the leaves that overflowed, once that is known.
            running: Holds the pass that the engine is at, for the hooks.
            doubts: Keeps those leaves until then, on the device.
            mend: Puts poisoned statistics back after a pass that was not clean; returns modules, and a flag for each.
            ran: Told of each pass when it has run.
            judged: Told of it when the verdict is here.
            report: Tells substitutions.
            skips: Whether overflowed gradients are kept from the weights at this level.
        """
        self._scales, self._leaves = scales, leaves
        self.arrivals: Arrivals = arrivals
        self._flags, self._doubts, self._running = flags, doubts, running
        self._mend, self._ran, self._judged, self._report = mend, ran, judged, report
        self._skips = skips

    def serves(self, site: str, roots: Sequence[Tensor], leaves: Sequence[Tensor]) -> bool:
        """Whether a pass at a call site may be deferred: from `roots`, on an accelerator, to these leaves."""
        if not self._scales.serves_ahead(site, roots[0]):
            return False
        if self._doubts.outlast(leaves):
            self.arrivals.wait()
        if self._flags.raised:
            return False
        device = roots[0].device
        for root in roots:
            if root.device != device:
                return False
        for leaf in leaves:
            if leaf.dtype is not torch.float32 or leaf.device != device or leaf.layout is not torch.strided:
                return False
            if type(leaf) is not Tensor and type(leaf) is not nn.Parameter:  # a shard, perhaps
                return False
        if not self._skips:
            return True
        known = self._leaves.optimizers()
        parameters = [id(p) for one in known for group in one.param_groups for p in group["params"]]
        return all(map(skips_by_itself, known)) and len(set(parameters)) == len(parameters)

    def run(
        self,
        run: Callable[[float | Tensor], bool],
        site: str,
        roots: Sequence[Tensor],
        leaves: list[Tensor],
    ) -> None:
        """Run a pass that `serves` is true of, make its gradients true, and ask for its verdict.

        Args:
            run: Runs the engine at a scale, and returns whether other ranks share its gradients.
            site: Call site of the pass.
            roots: Its losses.
            leaves: Whose gradients it may fill.
        """
        scale = self._scales.enter_ahead(site, roots[0])
        before = self._doubts.begin_pass()
        losses = [root.detach() for root in roots]
        earlier = Earlier(leaves, scale, set_aside=False)
        if before is not None:
            before.begun()
        now = self._running.begin(scale)
        try:
            shared = run(scale)
        except BaseException:  # what it left must be true, and known
            earlier.make_true(graded(leaves))
            self._scales.leave_ahead(site)
            self.arrivals.wait()
            if before is not None:
                self._flags.raise_later(*before.overflowed())
            self._flags.raise_for(non_finite(leaves), by_scale=True)
            raise
        finally:
            self._running.end(now)
        self._settle(site, losses, leaves, earlier, before, shared=shared)

    def observe(self, site: str, losses: Sequence[Tensor], *, at_once: bool) -> None:
        """Ask what the losses of a pass were that ran as the script wrote it; wait for it if somebody wants to know."""
        self._ran()
        one = is_one_number(losses)

        def arrived(numbers: list[float]) -> None:
            value, loss_bad = numbers
            self._judged(Seen(site, 1.0, not loss_bad, number=value if one else None))

        self.arrivals.add(torch.stack(_of_losses(losses)), arrived)
        if at_once:
            self.arrivals.wait()

    @torch.no_grad()
    def _settle(
        self,
        site: str,
        losses: Sequence[Tensor],
        leaves: list[Tensor],
        earlier: Earlier,
        before: Before | None,
        *,
        shared: bool,
    ) -> None:
        filled = graded(leaves)
        filled, parts = self._doubts.by_optimizer(filled) if self._skips else (filled, {})
        false = torch.zeros((), dtype=torch.bool, device=losses[0].device)
        known, sticky = (None, false) if before is None else before.among(filled, false)
        earlier.make_true(filled)
        bad = where_not_finite(largest([grad for _, grad in filled])) if filled else false.reshape(1)
        new = bad if known is None else bad > known
        overflowed = new.any()
        value, loss_bad = _of_losses(losses)
        self._scales.move_ahead(site, overflowed, loss_bad if known is None else loss_bad | sticky)
        wrong = loss_bad | (overflowed if known is None else overflowed > sticky)
        unstepped = filled[sum(end - begin for begin, end in parts.values()) :] if self._skips else []
        for _, grad in unstepped:
            grad.detach().masked_fill_(overflowed, 0)
        if known is not None:
            bad = bad | known  # clipped since, maybe: its step is skipped all the same
        modules, poisoned = self._mend(wrong)
        self._ran()
        asked = _Asked(
            site,
            self._doubts.end_pass(filled, parts, bad),
            earlier=None if before is None else before.doubt,
            modules=list(map(weakref.ref, modules)),
            is_number=is_one_number(losses),
            zeroes=bool(unstepped),
            shared=shared,
        )
        told = [torch.stack([loss_bad, sticky]), new, bad, *(() if poisoned is None else (poisoned,))]
        self.arrivals.add(torch.cat([value.reshape(1), *told]), partial(self._arrived, asked))

    def _arrived(self, asked: _Asked, numbers: list[float]) -> None:
        """The verdict is here: what the host does after a pass that it waited for, it does now."""
        value, loss_bad, sticky, *flags = numbers
        scale = self._scales.leave_ahead(asked.site)
        doubt = asked.doubt
        there = max(len(doubt.leaves), 1)  # flags of no gradient are one that is not raised
        leaves = [GONE if (leaf := one()) is None else leaf for one in doubt.leaves]
        new = [leaf for leaf, flag in zip(leaves, flags, strict=False) if flag]
        bad = [
            pair
            for pair, flag in zip(zip(leaves, doubt.grads, strict=True), flags[there:], strict=False)
            if flag
        ]
        mended = [
            module
            for one, flag in zip(asked.modules, flags[2 * there :], strict=True)
            if flag and (module := one()) is not None
        ]
        known = {} if asked.earlier is None else asked.earlier.by_scale
        doubt.by_scale = {id(leaf): known.get(id(leaf), not loss_bad) for leaf, _ in bad}
        if self._doubts.resolve(doubt):
            self._flags.raise_later(bad, doubt.by_scale)
        if new and asked.zeroes:
            self._report(*ZEROED)
        seen = Seen(asked.site, scale, not loss_bad, sticky=bool(sticky), mended=tuple(mended))
        if asked.is_number:
            seen.number = value
        if asked.shared:
            seen.shared = Shared(finite=None, loss_finite=seen.loss_finite)
        if not sticky:
            seen.overflowed = tuple(new)
        self._judged(seen)


def _of_losses(losses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss, where there is one number, and whether any is not finite: a number and a bool, no dimension."""
    if is_one_number(losses):
        value = losses[0].reshape(())
        return value, where_not_finite(value)
    device = losses[0].device
    bad = torch.stack([where_not_finite(loss).any().to(device) for loss in losses]).any()
    return bad, bad
