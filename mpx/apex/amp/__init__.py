"""`apex.amp`: the level of the run stands in for the one that the script asks for."""

from __future__ import annotations

from mpx.apex.running import serve

from ._amp_state import _amp_state, master_params
from .amp import (
    NO_LISTS,
    float_function,
    half_function,
    init,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from .frontend import initialize, load_state_dict, state_dict
from .handle import disable_casts, scale_loss

__all__ = [
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]

serve("amp", "the level of the run does what it did")


def __getattr__(name: str) -> object:
    raise AttributeError(NO_LISTS if name == "lists" else f"module 'apex.amp' has no attribute {name!r}")
