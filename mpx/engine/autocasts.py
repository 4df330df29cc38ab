"""Contexts of autocast, without the checks of `torch.autocast`.

As classes they take half the time of generators, and a step enters several.
"""

from __future__ import annotations

import torch

from mpx.engine.devices import DEVICES

__all__ = ["AutocastTo", "AutocastToFloat32", "NoAutocast"]


class AutocastTo:
    """Autocast to a half type on one device, without the casts of weights that torch keeps."""

    __slots__ = ("_before", "_cached", "_device_type", "_half")

    def __init__(self, device_type: str, half: torch.dtype) -> None:
        self._device_type, self._half = device_type, half

    def __enter__(self) -> None:
        kind = self._device_type
        self._before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # a cast that is kept goes stale at a step inside the call, and sums the gradients of its uses in half
        self._cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        torch.set_autocast_enabled(kind, True)
        torch.set_autocast_dtype(kind, self._half)

    def __exit__(self, *error: object) -> None:
        torch.set_autocast_cache_enabled(self._cached)
        torch.set_autocast_enabled(self._device_type, self._before[0])
        torch.set_autocast_dtype(self._device_type, self._before[1])


class NoAutocast:
    """No autocast on any device."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = [kind for kind in DEVICES if torch.is_autocast_enabled(kind)]
        for kind in self._before:
            torch.set_autocast_enabled(kind, False)

    def __exit__(self, *error: object) -> None:
        for kind in self._before:
            torch.set_autocast_enabled(kind, True)


class AutocastToFloat32:
    """Autocast where it is on, but to FP32: half weights may be held here."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = [(k, torch.get_autocast_dtype(k)) for k in DEVICES if torch.is_autocast_enabled(k)]
        for kind, _ in self._before:
            torch.set_autocast_dtype(kind, torch.float32)

    def __exit__(self, *error: object) -> None:
        for kind, half in self._before:
            torch.set_autocast_dtype(kind, half)
