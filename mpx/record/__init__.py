"""What a run leaves behind: events on disk, and the record that they fold into. Never imports torch.

Every process of a run writes; only who reads needs the record itself, which is loaded when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from mpx.record.directory import RunDirectory
from mpx.record.find import find_run
from mpx.record.shards import ShardWriter

if TYPE_CHECKING:
    from mpx.record.model import RunRecord
    from mpx.record.parts import Finding
    from mpx.record.series import Durations, Thinned

__all__ = ["Durations", "Finding", "RunDirectory", "RunRecord", "ShardWriter", "Thinned", "find_run"]

_HOMES = {"RunRecord": "model", "Finding": "parts", "Durations": "series", "Thinned": "series"}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
