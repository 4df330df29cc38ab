"""The backward pass: the engine runs on scaled gradients, the script sees true ones.

Existing gradients of the leaves are multiplied by the scale, the engine runs with a scaled seed, and every leaf is unscaled and checked when it
returns, before the script can look. Multiplying by a power of two is exact, so accumulation is too; stashing the old gradients and adding
them later, as Apex did, gives wrong sums under DDP's `no_sync`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpx.engine.gradients import non_finite, scale_, unscale_and_check_
from mpx.engine.scales import caller_site

if TYPE_CHECKING:
    from mpx.engine.gradients import Flags
    from mpx.engine.leaves import Leaves
    from mpx.engine.scales import Scales

__all__ = ["Backward", "Seen"]

LARGEST_FP16_SEED = 2.0**15  # the seed has the loss's type, and 2^16 is infinite in FP16


@dataclass
class Seen:
    """What one backward pass showed.

    Attributes:
        site: Call site in the script.
        scale: The loss scale that it ran with.
        losses: The detached roots.
        overflowed: Leaves whose gradients became non-finite in this pass.
        sticky: Whether a gradient was already flagged before it.
    """

    site: str
    scale: float
    losses: list[Tensor]
    overflowed: list[Tensor] = field(default_factory=list)
    sticky: bool = False

    @cached_property
    def value(self) -> float | None:
        """The loss, where it is one real number. Synchronises with an accelerator."""
        (loss, *others) = self.losses
        return None if others or loss.numel() != 1 or loss.is_complex() else float(loss.item())

    @cached_property
    def loss_finite(self) -> bool:
        """Whether every root was finite. Synchronises with an accelerator."""
        return _all_finite(self.losses) if self.value is None else math.isfinite(self.value)


class Backward:
    """Wraps `torch.autograd.backward` (which serves `Tensor.backward`) and `torch.autograd.grad`."""

    def __init__(
        self,
        scales: Scales,
        leaves: Leaves,
        flags: Flags,
        *,
        around: Callable[[], AbstractContextManager[Any]],
        judged: Callable[[Seen], None],
        checks: bool,
    ) -> None:
        """Make the service.

        Args:
            scales: Scale by call site.
            leaves: Finds whose gradients a pass may fill.
            flags: Receives the leaves that overflowed.
            around: Context for the engine's run: no autocast, working copies in place.
            judged: Told of each pass after its gradients are true again.
            checks: Whether gradients are looked at; off at O0, where nothing is touched.
        """
        self._scales, self._leaves, self._flags = scales, leaves, flags
        self._around, self._judged, self._checks = around, judged, checks
        self.current = 1.0  # scale of the running pass: what hooks of the script divide by
        self.active = True

    def wrap_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return the `torch.autograd.backward` of the session."""

        @wraps(original)
        def backward(
            tensors: Tensor | Sequence[Tensor],
            grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            grad_variables: Tensor | Sequence[Tensor | None] | None = None,
            inputs: Tensor | Sequence[Tensor] | None = None,
        ) -> None:
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            seeds = _seeds(roots, grad_tensors)
            if not self._concerns(roots, seeds) or grad_variables is not None:
                return original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            targets = None if inputs is None else [inputs] if isinstance(inputs, Tensor) else list(inputs)

            def run(scaled: list[Tensor]) -> None:
                original(tuple(roots), tuple(scaled), retain_graph, create_graph, inputs=inputs)

            return self._pass(run, roots, seeds, targets, create_graph)

        return backward

    def wrap_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the `torch.autograd.grad` of the session.

        Its result has no step that could be skipped, so an overflow is mended on the spot: the pass is run again at half the scale.
        """

        @wraps(original)
        def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: bool | None = None, *args: Any, **kwargs: Any) -> Any:
            roots = [outputs] if isinstance(outputs, Tensor) else list(outputs)
            seeds = _seeds(roots, grad_outputs)
            if not self._concerns(roots, seeds) or not self._scales.in_force:
                return original(outputs, inputs, grad_outputs, retain_graph, *args, **kwargs)
            site = caller_site()
            finite_roots = _all_finite(roots)
            while True:
                scale = self._scale_for(site, roots)
                lowered = finite_roots and not self._scales.at(site).at_floor
                with self._running(scale), self._around():
                    found = original(outputs, inputs, [s * scale for s in seeds], retain_graph or lowered or None, *args, **kwargs)
                grads = tuple(None if g is None else g * (1.0 / scale) for g in found)
                finite = _all_finite([g for g in grads if g is not None])
                if finite or not lowered:
                    return grads
                self._scales.judge(site, finite=False, backward=0)
                if self._scales.at(site).scale == scale:  # a static scale: nothing to lower
                    return grads

        return grad

    def wrap_register_hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the `Tensor.register_hook` of the session: a hook of the script receives the true gradient, and may return one."""

        @wraps(original)
        def register_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
            @wraps(hook)
            def true_scale(grad: Tensor) -> Tensor | None:
                scale = self.current
                if scale == 1.0:
                    return hook(grad)
                changed = hook(grad * (1.0 / scale))
                return None if changed is None else changed * scale

            return original(tensor, true_scale)

        return register_hook

    def wrap_register_post_accumulate_grad_hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `Tensor.register_post_accumulate_grad_hook`: the hook finds the true gradient in `.grad`, judged, as after the pass."""

        @wraps(original)
        def register_post_accumulate_grad_hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> Any:
            @wraps(hook)
            def true_scale(leaf: Tensor) -> None:
                scale = self.current
                if scale == 1.0 or leaf.grad is None:
                    return hook(leaf)
                if unscale_and_check_([leaf.grad], scale):
                    self._flags.raise_for([leaf])
                hook(leaf)
                if leaf.grad is not None:
                    scale_([leaf.grad], scale)
                return None

            return original(tensor, true_scale)

        return register_post_accumulate_grad_hook

    def _concerns(self, roots: list[Tensor], seeds: list[Tensor] | None) -> bool:
        """Whether a call is a pass of the script. Inside the engine it is re-entrant checkpointing; without seeds torch will refuse it."""
        return self.active and seeds is not None and torch._C._current_graph_task_id() == -1

    def _scale_for(self, site: str, roots: list[Tensor]) -> float:
        scale = self._scales.enter(site, roots[0]).scale
        return min(scale, LARGEST_FP16_SEED) if any(root.dtype is torch.float16 for root in roots) else scale

    def _running(self, scale: float) -> _Running:
        return _Running(self, scale)

    def _pass(
        self,
        run: Callable[[list[Tensor]], None],
        roots: list[Tensor],
        seeds: list[Tensor],
        targets: list[Tensor] | None,
        create_graph: bool,
    ) -> None:
        site = caller_site()
        scale = self._scale_for(site, roots)
        seen = Seen(site, scale, [root.detach() for root in roots])
        if not self._checks:
            run(seeds)
            self._judged(seen)
            return
        leaves = self._leaves.of(roots) if targets is None else targets
        before = [leaf for leaf in leaves if leaf.grad is not None]
        flagged = {id(leaf) for leaf in self._flags.among(before)}
        stashed = _stash_differentiable(before)
        if scale != 1.0:
            scale_([leaf.grad for leaf in before if leaf.grad is not None], scale)
        try:
            with self._running(scale), self._around():
                run([seed * scale for seed in seeds] if scale != 1.0 else seeds)
        finally:
            after = [leaf for leaf in leaves if leaf.grad is not None]
            found = _make_true(after, scale, differentiable=create_graph)
            _restore_differentiable(stashed)
        if found:
            bad = non_finite(after)
            seen.overflowed = [leaf for leaf in bad if id(leaf) not in flagged]
            self._flags.raise_for(bad)
        seen.sticky = bool(flagged)
        self._judged(seen)


class _Running:
    """Holds the scale of the running pass where hooks can read it."""

    def __init__(self, owner: Backward, scale: float) -> None:
        self._owner, self._scale = owner, scale

    def __enter__(self) -> None:
        self._outer, self._owner.current = self._owner.current, self._scale

    def __exit__(self, *error: object) -> None:
        self._owner.current = self._outer


def _seeds(roots: list[Tensor], given: Any) -> list[Tensor] | None:
    """Return a seed gradient for each root, or None where torch would raise for want of one."""
    if isinstance(given, Tensor):
        given = [given]
    given = [None] * len(roots) if given is None else list(given)
    if len(given) != len(roots):
        return None
    seeds = []
    for root, seed in zip(roots, given, strict=True):
        if seed is None:
            if not isinstance(root, Tensor) or not root.requires_grad or root.numel() != 1 or not root.is_floating_point():
                return None
            seed = torch.ones_like(root, memory_format=torch.preserve_format)
        seeds.append(seed)
    return seeds


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor.detach()).all().item()) for tensor in tensors)


def _stash_differentiable(leaves: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Set aside gradients that have a graph of their own (`create_graph`): changing them in place would break it."""
    stashed = []
    for leaf in leaves:
        if leaf.grad is not None and leaf.grad.requires_grad:
            stashed.append((leaf, leaf.grad))
            leaf.grad = None
    return stashed


def _restore_differentiable(stashed: list[tuple[Tensor, Tensor]]) -> None:
    for leaf, earlier in stashed:
        leaf.grad = earlier if leaf.grad is None else earlier + leaf.grad


def _make_true(leaves: list[Tensor], scale: float, *, differentiable: bool) -> bool:
    """Unscale the gradients of `leaves` and return whether any is infinite or NaN."""
    if not differentiable:
        return unscale_and_check_([leaf.grad for leaf in leaves if leaf.grad is not None], scale)
    for leaf in leaves:
        if leaf.grad is not None and scale != 1.0:
            leaf.grad = leaf.grad * (1.0 / scale)
    return not _all_finite([leaf.grad for leaf in leaves if leaf.grad is not None])


