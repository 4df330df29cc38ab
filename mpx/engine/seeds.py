"""What a backward pass begins with: its roots, and the gradient that flows into each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import has_torch_function

from mpx.engine.gradients import is_one

if TYPE_CHECKING:
    from torch.autograd.graph import GradientEdge

__all__ = ["at_hand", "listed", "may_run_straight", "run_engine", "scaled_seeds", "seeds_of"]


def listed(roots: Any) -> list[Any]:
    """Return the roots of a pass, or its inputs, given as torch takes them: one alone or several."""
    return [roots] if _is_alone(roots) else list(roots)


def at_hand(given: Any) -> Any:
    """Return what a pass is given besides roots, so that it can be looked at more than once."""
    return list(given) if isinstance(given, Iterator) else given


def _is_alone(value: Tensor | GradientEdge | Sequence[Any]) -> bool:
    return isinstance(value, Tensor) or hasattr(value, "node")  # an edge of the graph


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


def may_run_straight(backward: Callable[..., None], roots: list[Tensor]) -> bool:
    """Whether `run_engine` does for roots without seeds and inputs all that `backward` would.

    Not if it is another tool's, would refuse the call, or is looked at by a subclass or a mode of the script's.
    """
    code = getattr(backward, "__code__", None)
    return (
        code is not None
        and code.co_filename == torch.autograd.__file__
        and not has_torch_function(roots)
        and not torch._C._are_functorch_transforms_active()
    )


def run_engine(
    roots: list[Tensor], seeds: Sequence[Tensor | None], *, retain_graph: bool | None, create_graph: bool
) -> None:
    """Do what `torch.autograd.backward` does for roots of one number each, whose seeds are known to fit.

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
