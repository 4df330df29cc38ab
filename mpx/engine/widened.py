"""FP32 faces of half tensors: what leaves a region is a cast of what the graph goes on from.

A script that differentiates with respect to such a result (the latents of a generator, the features beside the logits)
means the tensor inside: nothing else of the loss depends on the cast. So hooks and `autograd.grad` are led there, and
what `retain_grad` keeps is made whole.
"""

from __future__ import annotations

import weakref
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.autograd.graph import Node

__all__ = ["inner", "keep_grad", "lead_inside", "notes_of", "of_insides", "widen"]

INNER = "mpx_inner"


def notes_of(node: Node) -> dict[str, Any]:
    """Return what Python code has noted on a node of the graph; it lives as long as the node."""
    # a property; torch's annotation says a method
    return node.metadata  # type: ignore[return-value]


def widen(tensor: Tensor, half: torch.dtype) -> Tensor:
    """Return the FP32 face of a tensor of type `half`, any other as it is."""
    if tensor.dtype is not half:
        return tensor
    face = tensor.float()
    if tensor.grad_fn is not None:
        lead_inside(face, tensor)
    return face


def lead_inside(face: Tensor, tensor: Tensor) -> None:
    """Let whoever differentiates by a face differentiate by the tensor that it was cast from."""
    if face.grad_fn is not None:
        notes_of(face.grad_fn)[INNER] = tensor


def inner(tensor: Tensor) -> Tensor:
    """Return the half tensor behind a face; of any other tensor, itself."""
    node = tensor.grad_fn
    behind: Tensor = tensor if node is None else notes_of(node).get(INNER, tensor)
    return behind


def of_insides(grad: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """Return an `autograd.grad` of what is behind faces; each result has the type of its input."""

    @wraps(grad)
    def grad_of_insides(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        one_alone = isinstance(inputs, (Tensor, GradientEdge))
        given = [inputs] if one_alone else list(inputs)  # a ParameterList or a generator, too
        insides = [inner(one) if isinstance(one, Tensor) else one for one in given]
        return tuple(
            found.to(one.dtype) if isinstance(found, Tensor) and isinstance(one, Tensor) else found
            for one, found in zip(given, grad(outputs, insides, *args, **kwargs), strict=True)
        )

    return grad_of_insides


def keep_grad(face: Tensor) -> None:
    """Let the `.grad` that torch keeps of a face be the gradient of what is behind it.

    What flows through the face is a part of that, and comes first; the rest is added when it is known. Both are
    multiplied by the scale of the pass, as torch's part is.
    """
    inside = inner(face)
    if inside is face or face.grad_fn is None or inside.grad_fn is None:
        return
    through: list[Tensor] = []
    reference, place = weakref.ref(face), inside.output_nr  # the graph must not hold what holds the graph

    def note(grads: tuple[Tensor, ...]) -> None:
        through.append(grads[0])

    def add_rest(grads: tuple[Tensor, ...]) -> None:
        kept, grad = reference(), grads[place]
        if kept is None or grad is None:
            return
        rest = grad.detach().float()
        if through:
            rest = rest - through.pop()
        kept.grad = rest if kept.grad is None else kept.grad + rest

    face.grad_fn.register_prehook(note)
    inside.grad_fn.register_prehook(add_rest)
