"""The backward pass: the engine runs on scaled gradients, the script sees true ones.

Existing gradients of the leaves are multiplied by the scale, the engine runs with a scaled seed, and every leaf is
unscaled and checked when it returns, before the script can look. Multiplying by a power of two is exact, so
accumulation is too; stashing the old gradients and adding them later, as Apex did, gives wrong sums under DDP's
`no_sync`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpx.engine.devices import DEVICES
from mpx.engine.earlier import Earlier, look
from mpx.engine.gradients import (
    ZEROED,
    clear_,
    is_one,
    is_one_number,
    non_finite,
    non_finite_flags,
    read,
    scale_,
)
from mpx.engine.leaves import graded
from mpx.engine.scales import caller_site
from mpx.engine.seeds import (
    at_hand,
    is_loss,
    is_part_of_another,
    is_torchs_own,
    listed,
    looked_at,
    nobody_looks,
    run_engine,
    scaled_seeds,
    seeds_of,
)
from mpx.engine.widened import of_insides
from mpx.monitors import Seen

if TYPE_CHECKING:
    from mpx.engine.deferred import Deferred
    from mpx.engine.gradients import Flags
    from mpx.engine.kernels import Report
    from mpx.engine.leaves import Leaves
    from mpx.engine.ranks import Ranks
    from mpx.engine.running import Running, RunningPass
    from mpx.engine.scales import Scales

    Filled = list[tuple[Tensor, Tensor]]  # leaves and their gradients

__all__ = ["Backward"]

LOW = (torch.float16, torch.bfloat16)


class Backward:
    """Wraps `torch.autograd.backward` (which serves `Tensor.backward`) and `torch.autograd.grad`."""

    def __init__(
        self,
        scales: Scales,
        leaves: Leaves,
        flags: Flags,
        running: Running,
        ranks: Ranks,
        *,
        deferred: Deferred,
        defers: Callable[[], bool],
        held: Callable[[], AbstractContextManager[None]],
        around: Callable[[], AbstractContextManager[None]],
        judged: Callable[[Seen], None],
        report: Report,
        checks: bool,
        skips: bool,
    ) -> None:
        """Make the service.

        Args:
            scales: Scale by call site.
            leaves: Finds whose gradients a pass may fill.
            flags: Receives the leaves that overflowed.
            running: Holds the pass that the engine is at, for the hooks.
            ranks: Says what the ranks that share gradients make of a pass together.
            deferred: Runs the passes that need not wait for an accelerator.
            defers: Whether nothing in the session wants to know of each pass at once.
            held: Context for the engine's run: working copies in place.
            around: Another, inside that: no autocast.
            judged: Told of each pass after its gradients are true again.
            report: Tells substitutions.
            checks: Whether gradients are looked at; off at O0, where nothing is touched.
            skips: Whether overflowed gradients are kept from the weights at this level.
        """
        self._scales, self._leaves, self._flags, self._running = scales, leaves, flags, running
        self._ranks, self._deferred, self._defers = ranks, deferred, defers
        self._run_ahead = {kind for kind, row in DEVICES.items() if row.fetch is not None}
        self._held, self._around, self._judged, self._report = held, around, judged, report
        self._checks, self._skips = checks, skips
        # nothing depends on what a pass leaves but the record, and that is known when it returns
        self._only_looks = not (skips or scales.in_force or "cpu" in self._run_ahead)
        self._true_losses: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] | None = None

    def stand_back(self, true_losses: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]) -> None:
        """From now on only look: the script scales its losses itself, and `true_losses` undoes that for the record."""
        self._checks, self._true_losses = False, true_losses

    def wrap_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return the `torch.autograd.backward` of the session."""
        is_torchs = is_torchs_own(original)

        @wraps(original)
        def backward(  # noqa: PLR0917 - torch's signature
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: Any = None,
            create_graph: Any = False,  # noqa: FBT002
            grad_variables: Any = None,
            inputs: Any = None,
        ) -> None:
            roots: list[Any]
            seeds: list[Tensor | None] | None
            alone = grad_tensors is None and inputs is None and is_loss(tensors)
            if alone:
                roots, seeds = [tensors], [None]
            else:  # whatever is given may be an iterator, which can be asked once
                roots, grad_tensors, inputs = listed(tensors), at_hand(grad_tensors), at_hand(inputs)
                seeds = seeds_of(roots, grad_tensors)
            if seeds is None or is_part_of_another(roots) or grad_variables is not None:
                now = self._include(roots) if self._checks else None
                of_a_hook = now is not None and now.hooks and not is_one(now.scale)
                if now is None or not of_a_hook or seeds is None or grad_variables is not None:
                    return original(roots, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
                with now.of_a_hook():
                    scaled = scaled_seeds(roots, seeds, now.scale)
                    return original(tuple(roots), scaled, retain_graph, create_graph, inputs=inputs)

            straight = is_torchs and grad_tensors is None and inputs is None and nobody_looks(roots)

            def run(scale: float | Tensor) -> None:
                scaled = scaled_seeds(roots, seeds, scale)
                if straight:
                    run_engine(roots, scaled, retain_graph=retain_graph, create_graph=create_graph)
                else:
                    original(tuple(roots), scaled, retain_graph, create_graph, inputs=inputs)

            if not self._checks:
                self._observe(run, roots)
            elif alone and self._is_only_looked_at(tensors):
                self._look(run, tensors)
            else:
                self._pass(run, roots, self._targets(roots, inputs), create_graph=create_graph)
            return None

        return backward

    def _include(self, roots: list[Any]) -> RunningPass | None:
        """Let the pass that runs, which is returned, make true what one inside it fills.

        Re-entrant checkpointing hides leaves there, and so does a hook that differentiates what it was attached to.
        """
        now = self._running.latest
        if now is None or torch._C._current_graph_task_id() == -1:
            return None
        known = {id(leaf) for leaf in now.leaves}
        found = self._leaves.new_of([root for root in roots if isinstance(root, Tensor)])
        new = [leaf for leaf in found if id(leaf) not in known]
        if new:
            now.leaves += new
            if not is_one(now.scale):  # as `Earlier` does with those that are known when a pass begins
                scale_({id(grad): grad for _, grad in graded(new)}.values(), now.scale)
        return now

    def _observe(self, run: Callable[[float], None], roots: list[Tensor]) -> None:
        site = caller_site()
        seen = roots if self._true_losses is None else self._true_losses(roots)
        if seen[0].device.type in self._run_ahead:
            self._deferred.arrivals.begin_pass()
            run(1.0)
            self._deferred.observe(site, [loss.detach() for loss in seen], at_once=not self._defers())
            return
        number, losses = looked_at(seen)
        run(1.0)
        finite = not any(read(non_finite_flags(losses))) if number is None else math.isfinite(number)
        self._judged(Seen(site, 1.0, finite, number=number))

    def _is_only_looked_at(self, loss: Tensor) -> bool:
        return self._only_looks and loss.is_cpu and not self._flags.raised and not self._ranks.exist()

    def _look(self, run: Callable[[float], None], loss: Tensor) -> None:
        """Run a pass that nobody scales, skips or shares, and look at what it leaves: most of `_pass` is for those."""
        site, number = caller_site(), loss.item()
        finite = math.isfinite(number)
        leaves = self._leaves.of([loss])
        now = self._running.begin(1.0, leaves)
        try:
            try:
                with self._held(), self._around():
                    run(1.0)
            finally:
                filled = graded(leaves)
                if any(read(look(filled))):
                    self._find_overflowed(filled, [], now, loss_finite=finite)
        finally:
            self._running.end(now)
        self._judged(Seen(site, 1.0, finite, tuple(now.overflowed), number=number))

    def _pass(
        self, run: Callable[[Any], None], roots: list[Tensor], leaves: list[Tensor], *, create_graph: bool
    ) -> None:
        site = caller_site()
        if roots[0].device.type in self._run_ahead and not create_graph and self._may_defer():
            self._deferred.arrivals.begin_pass()
            if self._deferred.serves(site, roots, leaves):
                self._pass_ahead(run, site, roots, leaves)
                return
        scale = self._presentable(self._scales.enter(site, roots[0]).scale)
        number, losses = looked_at(roots)
        flagged = self._flags.begin_pass(leaves) if self._flags.raised else []
        earlier = Earlier(leaves, scale, set_aside=create_graph, flagged=flagged)
        ranks = self._ranks if self._ranks.exist() else None
        now = self._running.begin(scale, leaves)
        try:
            begun = ranks.begin_pass(leaves) if ranks else None
            try:
                with self._held(), self._around():
                    run(scale)
            finally:  # also of a pass that fails: what it left must be true
                if ranks and begun:
                    ranks.end_pass(begun)
                    if ranks.vetoed:
                        flagged = []  # what they said of earlier passes is in this one, on every rank
                added_to = earlier.added_to() if flagged else []
                finite, number = self._settle(leaves, losses, number, earlier, flagged, now)
                if added_to:  # accumulation may have replaced the tensor that was flagged
                    self._flags.raise_for(added_to)
        finally:
            self._running.end(now)
        if now.zeroed and not self._ranks.judges_later:  # there it is the gradient for the stage before
            self._report(*ZEROED)
        shared = ranks.agree(site, now.bad, loss_finite=finite) if ranks else None
        if shared is not None:
            finite = shared.loss_finite
            self._flags.lower(shared.alone)  # the others step, so this rank does: with zeros there
            clear_(leaf.grad for leaf in shared.alone)
        overflowed = () if added_to else tuple(now.overflowed)
        self._judged(Seen(site, scale, finite, overflowed, bool(added_to), shared, number))

    def _may_defer(self) -> bool:
        """Whether nobody wants to know at once what a pass shows: no check, no service, and no other rank."""
        if not self._defers() or (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()):
            return False
        return not self._ranks.exist() or not (self._skips or self._scales.in_force or self._ranks.decide)

    def _pass_ahead(
        self, run: Callable[[Any], None], site: str, roots: list[Tensor], leaves: list[Tensor]
    ) -> None:
        ranks = self._ranks if self._ranks.exist() else None

        def engine(scale: float | Tensor) -> bool:
            begun = ranks.begin_pass(leaves) if ranks else None
            try:
                with self._held(), self._around():
                    run(scale)
            finally:
                if ranks and begun:
                    ranks.end_pass(begun)
            # where nothing is skipped or scaled they have nothing to decide, and only count it
            return ranks is not None and ranks.agree(site, [], loss_finite=True) is not None

        self._deferred.run(engine, site, roots, leaves)

    def _presentable(self, scale: float) -> float:
        """Return the scale of a pass: 1 where torch is to raise at a NaN, which a search for the range makes."""
        if scale == 1.0 or not self._ranks.scaled:
            return 1.0
        if not (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()):
            return scale
        self._report(
            "anomaly",
            "losses were not scaled while `detect_anomaly` was on: an overflow would have ended the run",
        )
        return 1.0

    def _settle(  # noqa: PLR0917
        self,
        leaves: list[Tensor],
        losses: tuple[Tensor, ...],
        number: float | None,
        earlier: Earlier,
        flagged: list[Tensor],
        now: RunningPass,
    ) -> tuple[bool, float | None]:
        """Make gradients true, flag those that overflowed, and return whether the losses were finite, and the loss.

        Waits for an accelerator, once.
        """
        filled = graded(leaves)
        flags = earlier.make_true(filled, now.replaced)
        if number is None or self._ranks.touched_shards:
            bad_loss = number is not None and not math.isfinite(number)
            of_losses = non_finite_flags(losses) if number is None else [torch.tensor(float(bad_loss))]
            flags, of_losses = self._ranks.together(flags, of_losses)
            one = [loss.reshape(()) for loss in losses] if is_one_number(losses) else []
            answers = read([*flags, *of_losses, *one])
            number = answers.pop() if one else number
            overflowed, loss_finite = any(answers[: len(flags)]), not any(answers[len(flags) :])
        else:
            overflowed, loss_finite = any(read(flags)), math.isfinite(number)
        if overflowed:
            self._find_overflowed(filled, flagged, now, loss_finite=loss_finite)
        return loss_finite, number

    def _find_overflowed(
        self, filled: Filled, flagged: list[Tensor], now: RunningPass, *, loss_finite: bool
    ) -> None:
        """Note which gradients a pass made infinite or NaN, besides those flagged before it, and raise their flags."""
        bad = now.bad = self._ranks.bad(non_finite([leaf for leaf, _ in filled]))
        before = {id(leaf) for leaf in flagged}
        new = [leaf for leaf in bad if id(leaf) not in before]
        now.overflowed += new
        if new:  # and not what an open window keeps
            stepped = self._leaves.stepped() if self._skips else None
            now.zeroed |= self._flags.expose([leaf for leaf, _ in filled], new, stepped, by_scale=loss_finite)

    def wrap_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the `torch.autograd.grad` of the session.

        Its result has no step that could be skipped, so an overflow is mended on the spot: the pass is run again at a
        lower scale, for which the graph is kept while the scale can fall.
        """

        @wraps(original)
        def grad(
            outputs: Any,
            inputs: Any,
            grad_outputs: Any = None,
            retain_graph: Any = None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            roots, grad_outputs = listed(outputs), at_hand(grad_outputs)
            seeds = seeds_of(roots, grad_outputs)
            if seeds is None or is_part_of_another(roots) or not self._checks:
                return original(roots, inputs, grad_outputs, retain_graph, *args, **kwargs)
            # a stage that splits its pass keeps what this finds, and makes the gradients of weights of it
            if not self._scales.in_force or self._ranks.judges_later:
                with self._held(), self._around():
                    return original(roots, inputs, grad_outputs, retain_graph, *args, **kwargs)
            site = caller_site()
            state = self._scales.enter(site, roots[0], counts=False)
            roots_finite = not any(read(non_finite_flags(roots)))
            while True:
                scale = self._presentable(state.scale)
                retry = roots_finite and state.can_fall
                now = self._running.begin(scale)
                try:
                    with self._held(), self._around():
                        scaled = scaled_seeds(roots, seeds, scale)
                        found = original(
                            roots, inputs, scaled, retain_graph or retry or None, *args, **kwargs
                        )
                finally:
                    self._running.end(now)
                true = tuple(
                    None if g is None else (g.float() if g.dtype in LOW else g) * (1.0 / scale) for g in found
                )
                finite = not any(read(non_finite_flags(g for g in true if g is not None)))
                if roots_finite:
                    state = self._scales.judge(site, finite=finite)
                if finite or not retry:
                    return true

        return of_insides(grad)

    def _targets(self, roots: list[Tensor], inputs: Any) -> list[Tensor]:
        if inputs is None:
            return self._leaves.of(roots)
        given = inputs.values() if isinstance(inputs, dict) else listed(inputs)
        targets = [
            one if isinstance(one, Tensor) else getattr(getattr(one, "node", None), "variable", None)
            for one in given
        ]
        found = [target for target in targets if target is not None]
        for target in found:
            self._leaves.saw_tensor(target)
        return found
