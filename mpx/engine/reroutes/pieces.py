"""FP32 arithmetic of large half tensors in pieces of their first dimension.

The FP32 face of a half tensor has twice its size and lives for one kernel. Whole, the faces of a large layer take more
memory than the layer keeps, and leave holes in the heap between the half tensors that stay; pieces of them fit into a
cache, which is faster besides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpx.engine.reroutes.base import is_transformed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["are_many", "by_pieces", "number_of_pieces"]

PIECE = 2**18  # numbers: 1 MiB in FP32
PLAIN = (Tensor, nn.Parameter)
is_legacy_batchedtensor = torch._C._functorch.is_legacy_batchedtensor


def are_many(numbers: int) -> bool:
    """Whether so many numbers are more than a piece."""
    return numbers >= 2 * PIECE


def number_of_pieces(length: int, numbers: int, *tensors: Tensor, least: int = 1) -> int:
    """Return into how many pieces the first dimension of an FP32 computation is cut.

    Args:
        length: Of that dimension.
        numbers: In the largest FP32 tensor of the whole computation.
        tensors: What it is made from.
        least: The length that a piece should have.

    Returns:
        1 where it fits into a piece, or is watched by somebody who must not see writes: autograd, a transform of
        `torch.func`, `autograd.grad` with `is_grads_batched`, a compiler, a subclass of tensors.
    """
    if not are_many(numbers) or is_transformed():
        return 1
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return 1
    if any(type(tensor) not in PLAIN or is_legacy_batchedtensor(tensor) for tensor in tensors):
        return 1
    return max(1, min(length // least, numbers // PIECE))


def by_pieces(
    compute: Callable[..., Sequence[Tensor | None]], number: int, tensors: Sequence[Tensor]
) -> list[Any]:
    """Compute FP32 results of half tensors in so many pieces.

    Args:
        compute: From a piece of each tensor to the same piece of each result, or None for one that is not wanted.
        number: Of pieces; 1 leaves all to `compute` and writes nothing.
        tensors: Of one first dimension, the first of the half type.

    Returns:
        The results, rounded once and laid out as `compute` does, with None where it has none.
    """
    half = tensors[0].dtype
    if number == 1:
        return [None if found is None else found.to(half) for found in compute(*tensors)]
    results: list[Any] = []
    done = 0
    for pieces in zip(*(tensor.chunk(number) for tensor in tensors), strict=True):
        found = compute(*pieces)
        if not results:
            results = [None if one is None else _whole(one, tensors[0].shape[0], half) for one in found]
        following = done + pieces[0].shape[0]
        for result, one in zip(results, found, strict=True):
            if result is not None:
                result[done:following].copy_(one)
        done = following
    return results


def _whole(piece: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Return a new tensor for a result of which this is a piece, in the order of its strides.

    No view of one: autograd would refuse a script that writes into what a Function returns.
    """
    sizes, strides = [length, *piece.shape[1:]], torch.empty_like(piece, device="meta").stride()
    wanted, step = [0] * len(sizes), 1
    for dimension in sorted(range(len(sizes)), key=lambda dimension: (strides[dimension], -dimension)):
        wanted[dimension] = step
        step *= sizes[dimension]
    return piece.new_empty_strided(sizes, wanted, dtype=dtype)
