"""mpx's own frames are not compiled: `torch.compile` compiles the script's, and inlines of ours what it meets there.

After a graph break of the script (at `loss.backward()`, say) dynamo tries every frame that Python enters, ours too, and
stumbles over what they do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch._C._dynamo import eval_frame

__all__ = ["leave_uncompiled"]


def leave_uncompiled(package: str) -> None:
    """Let dynamo run the frames of a package as they are; it may still inline them, and look at what they call."""
    if not hasattr(eval_frame, "set_code_exec_strategy"):
        return  # torch < 2.7: dynamo tries them, and falls back
    as_it_is = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for code in _codes(module):
                eval_frame.set_code_exec_strategy(code, as_it_is)


def _codes(owner: ModuleType | type) -> Iterator[CodeType]:
    for value in list(vars(owner).values()):
        for part in (value, *(getattr(value, name, None) for name in ("__func__", "fget", "__wrapped__"))):
            if isinstance(part, FunctionType):
                yield from _with_inner(part.__code__)
        if isinstance(value, type) and value.__module__ == _name_of(owner):
            yield from _codes(value)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _name_of(owner: Any) -> str:
    return str(owner.__name__ if isinstance(owner, ModuleType) else owner.__module__)
