"""Memory for FP32 matrices that live for one kernel, between half tensors that stay.

Taken from the heap and freed again for each piece of each product, they leave holes in it: glibc 2.36 does not find a
hole again for an aligned tensor of the same size. So each thread keeps one room for each place in a product, of two
pieces at most, and the next piece is written over the one before.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from mpx.engine.reroutes.pieces import are_many

__all__ = ["ROOMS", "face_in", "times_in"]

TORCHS_OWN = torch.mm, torch.addmm  # which take an `out`


class _Here(threading.local):
    def __init__(self) -> None:
        self.rooms: dict[str, Tensor] = {}
        # how many are being computed: two where a signal's handler trains in the middle of one
        self.products = 0


_here = _Here()


class _Rooms:
    """Context of one product, which has the rooms of its thread to itself."""

    def __enter__(self) -> None:
        _here.products += 1

    def __exit__(self, *error: object) -> None:
        _here.products -= 1


ROOMS = _Rooms()


def _room(place: str, rows: int, columns: int, device: torch.device) -> Tensor:
    """Return an FP32 matrix to write into; whoever asks for the same place next, inside `ROOMS`, gets the same memory.

    New memory where it is larger than two pieces, for a product in the middle of another, and on an accelerator, where
    kernels run later and streams side by side.
    """
    numbers = rows * columns
    if are_many(numbers) or _here.products != 1 or device.type != "cpu":
        return torch.empty(rows, columns, dtype=torch.float32, device=device)
    there = _here.rooms.get(place)
    if there is None or there.numel() < numbers:
        with torch.inference_mode(mode=False):  # or nobody could write into it outside of that mode
            there = _here.rooms[place] = torch.empty(numbers, dtype=torch.float32, device=device)
    return there[:numbers].view(rows, columns)


def _is_looked_at() -> bool:
    """Whether a mode looks on, which may keep what it sees and knows `mm`, no `mm.out`, or the script's own `mm`."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or (torch.mm, torch.addmm) != TORCHS_OWN
    )


def face_in(place: str, matrix: Tensor) -> Tensor:
    """Return the FP32 face of a half matrix, in the order of its strides."""
    if _is_looked_at():
        return matrix.float()
    by_rows = matrix.mT if matrix.stride(0) == 1 != matrix.stride(1) else matrix
    face = _room(place, by_rows.shape[0], by_rows.shape[1], matrix.device).copy_(by_rows)
    return face if by_rows is matrix else face.mT


def times_in(
    place: str, left: Tensor, right: Tensor, bias: Tensor | None = None, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Return `left @ right` of FP32 matrices, or with a bias `beta * bias + alpha * (left @ right)`."""
    out = None if _is_looked_at() else _room(place, left.shape[0], right.shape[1], left.device)
    written = {} if out is None else {"out": out}
    if bias is None:
        return torch.mm(left, right, **written)
    return torch.addmm(bias, left, right, beta=beta, alpha=alpha, **written)
