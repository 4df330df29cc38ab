"""In the middle of a call a script saves, loads and copies its own parameters, not the copies in their places."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from mpx.engine.working import WorkingCopies

__all__ = ["wrap_copying", "wrap_state_dict"]

NOTHING = nullcontext()


def wrap_state_dict(original: Callable[..., Any], copies: WorkingCopies | None) -> Callable[..., Any]:
    """Return the `Module.state_dict` or `load_state_dict` of the session."""

    @wraps(original)
    def of_parameters(*args: Any, **kwargs: Any) -> Any:
        with NOTHING if copies is None or not copies.in_use() else copies.withdrawn():
            return original(*args, **kwargs)

    return of_parameters


def wrap_copying(original: Callable[..., Any], copies: WorkingCopies | None) -> Callable[..., Any]:
    """Return the `__deepcopy__` or `__reduce_ex__` of the session: of a working copy, that of its parameter."""

    @wraps(original)
    def of_parameter(tensor: Tensor, *args: Any) -> Any:
        own = None if copies is None else copies.parameter_of(tensor)
        return original(tensor, *args) if own is None else getattr(own, original.__name__)(*args)

    return of_parameter
