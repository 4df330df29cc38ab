"""Finding the module in which the forward pass leaves the range, once a loss was not finite.

Nothing is looked at while losses are finite. After one that was not, the next forward passes are watched: the first module with finite inputs and a
non-finite output is where it begins; when the inputs of the outermost call are not finite, the data are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mpx.engine.structure import tensors

if TYPE_CHECKING:
    from torch import nn

    from mpx.engine.region import Region

__all__ = ["ForwardWatch"]


class ForwardWatch:
    """Armed by a non-finite loss, disarmed by a finite one."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._found: nn.Module | None = None
        self.in_a_row = 0  # passes in which the module last taken was the one
        self._last: nn.Module | None = None

    def arm(self) -> None:
        """Watch the forward passes that follow."""
        self._region.watch = self._look
        self._found = None

    def disarm(self) -> None:
        """Stop watching."""
        self._region.watch = None
        self._found = self._last = None
        self.in_a_row = 0

    def take(self) -> nn.Module | None:
        """Return the module found since the last call."""
        found, self._found = self._found, None
        if found is not None:
            self.in_a_row = self.in_a_row + 1 if found is self._last else 1
            self._last = found
        return found

    def _look(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._found is None and not _finite(output) and _finite(args):
            self._found = module


def _finite(value: Any) -> bool:
    return all(
        bool(torch.isfinite(tensor.detach()).all().item()) for tensor in tensors(value) if tensor.is_floating_point()
    )
