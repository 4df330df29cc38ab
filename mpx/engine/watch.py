"""Finding the module in which the forward pass leaves the range, once a loss was not finite.

Nothing is looked at while losses are finite. After one that was not, the next forward passes are watched: the first
module with finite inputs and a non-finite output is where it begins. When the inputs of the outermost call are not
finite the data are, and when a weight is NaN training has gone wrong before: neither is an overflow, and no module is
named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mpx.engine.structure import tensors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from mpx.engine.region import Region

__all__ = ["ForwardWatch"]


class ForwardWatch:
    """Armed by a call site with a non-finite loss, disarmed when that site has a finite one."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self.armed: set[str] = set()  # call sites
        self._found: nn.Module | None = None
        self._taken = False  # found belongs to a forward pass that is over; another pass may still ask for it
        self._last: nn.Module | None = None
        self.in_a_row = 0  # forward passes in which the module last taken was the one

    def arm(self, site: str) -> None:
        """Watch the forward passes that follow."""
        self.armed.add(site)
        self._region.watch = self._look

    def disarm(self, site: str) -> None:
        """Stop watching on behalf of this site."""
        self.armed.discard(site)
        if not self.armed:
            self._region.watch = self._found = self._last = None
            self.in_a_row = 0

    def take(self) -> nn.Module | None:
        """Return the module found in the forward passes since the last pass that took one; losses may share it."""
        if self._found is not None and not self._taken:
            self.in_a_row = self.in_a_row + 1 if self._found is self._last else 1
            self._last = self._found
        self._taken = True
        return self._found

    def _look(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._taken:
            self._found, self._taken = None, False
        if (
            self._found is None
            and not _finite(output)
            and _finite(inputs)
            and not _has_nan(module.parameters())
        ):
            self._found = module


def _finite(value: Any) -> bool:
    return all(
        bool(torch.isfinite(tensor.detach()).all().item())
        for tensor in tensors(value)
        if tensor.is_floating_point()
    )


def _has_nan(parameters: Iterable[Tensor]) -> bool:
    return any(bool(parameter.detach().isnan().any().item()) for parameter in parameters)
