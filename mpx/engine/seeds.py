"""What a backward pass begins with: its roots, and the gradient that flows into each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import has_torch_function

from mpx.engine.compiled import is_tracing
from mpx.engine.gradients import is_one

if TYPE_CHECKING:
    from torch.autograd.graph import GradientEdge

__all__ = [
    "at_hand",
    "is_loss",
    "is_part_of_another",
    "is_torchs_own",
    "listed",
    "looked_at",
    "nobody_looks",
    "run_engine",
    "scaled_seeds",
    "seeds_of",
]


def listed(roots: Any) -> list[Any]:
    """Return the roots of a pass, or its inputs, given as torch takes them: one alone or several."""
    return [roots] if _is_alone(roots) else list(roots)


def at_hand(given: Any) -> Any:
    """Return what a pass is given besides roots, so that it can be looked at more than once."""
    return list(given) if isinstance(given, Iterator) else given


def _is_alone(value: Tensor | GradientEdge | Sequence[Any]) -> bool:
    return isinstance(value, Tensor) or hasattr(value, "node")  # an edge of the graph


def is_loss(root: Any) -> bool:
    """Whether this is a tensor of one real number with a graph, which needs no seed; no subclass, no shape alone."""
    return (
        type(root) is Tensor
        and root.requires_grad
        and root.numel() == 1
        and root.is_floating_point()
        and not root.is_meta
    )


def seeds_of(roots: list[Any], given: Any) -> list[Tensor | None] | None:
    """Return the seed gradient of each root, None where torch takes ones.

    Instead of the list None, for edges of the graph, where torch would want a seed and raise, and for tensors that have
    a shape and no numbers.
    """
    seeds: list[Tensor | None]
    seeds = [None] * len(roots) if given is None else [given] if isinstance(given, Tensor) else list(given)
    if len(seeds) != len(roots) or not roots:
        return None
    for place, root in enumerate(roots):
        if not isinstance(root, Tensor) or root.is_meta or type(root) is FakeTensor:
            return None
        if seeds[place] is None and not (
            root.requires_grad and root.numel() == 1 and root.is_floating_point()
        ):
            return None
    return seeds


def looked_at(losses: Sequence[Tensor]) -> tuple[float | None, tuple[Tensor, ...]]:
    """Return the loss where it is one number, and reading it waits for no device; elsewhere the losses, detached."""
    if len(losses) == 1:
        (loss,) = losses
        if loss.is_cpu and type(loss) is Tensor and loss.numel() == 1 and not loss.is_complex():
            return loss.item(), ()
    return None, tuple([loss.detach() for loss in losses])


def scaled_seeds(
    roots: list[Tensor], seeds: list[Tensor | None], scale: float | Tensor
) -> tuple[Tensor | None, ...]:
    """Return the seeds of a pass that is multiplied by `scale`: the graph stays as the script built it."""
    if is_one(scale):
        return tuple(seeds)
    scaled = []
    for root, seed in zip(roots, seeds, strict=True):
        if seed is not None:
            scaled.append(seed * scale)
        elif isinstance(scale, Tensor):
            scaled.append(torch.empty_like(root).copy_(scale))
        else:
            scaled.append(torch.full_like(root, scale))
    return tuple(scaled)


def is_part_of_another(roots: list[Tensor]) -> bool:
    """Whether a call is no pass of the script's: re-entrant checkpointing, `torch.func`, a compiler at its tracing."""
    if torch._C._current_graph_task_id() != -1 or is_tracing():
        return True
    return any(map(torch._C._functorch.is_functorch_wrapped_tensor, roots))


def is_torchs_own(backward: Callable[..., None]) -> bool:
    """Whether this is torch's `backward`, and not another tool's in its place."""
    code = getattr(backward, "__code__", None)
    return code is not None and bool(code.co_filename == torch.autograd.__file__)


def nobody_looks(roots: list[Tensor]) -> bool:
    """Whether no subclass or mode of the script's looks at a pass, and no transform refuses it."""
    return not has_torch_function(roots) and not torch._C._are_functorch_transforms_active()


def run_engine(
    roots: list[Tensor], seeds: Sequence[Tensor | None], *, retain_graph: bool | None, create_graph: bool
) -> None:
    """Do what `torch.autograd.backward` does for roots of one number each, whose seeds are known to fit, if any.

    To find that out takes torch 12 us, and 18 where a seed is given: a tenth of a small model's pass.
    """
    _engine_run_backward(
        tuple(roots),
        tuple(
            [
                torch.ones_like(root, memory_format=torch.preserve_format) if seed is None else seed
                for root, seed in zip(roots, seeds, strict=True)
            ]
        ),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )
