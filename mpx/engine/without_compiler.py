"""Optimizers without the compiler, in a process that compiles nothing.

torch keeps `torch.compile` out of an optimizer's methods, and to do so it imports all of it when the first optimizer is
made: `torch._dynamo`, 800 modules, 70 MiB and half a second (torch 2.13). While nobody else has imported it there is
nothing to keep out. Then the methods run as they are; from then on torch's own functions do what they did.

With the compiler come modules that scripts use and never import (`torch.distributed.nn`). So once an import was spared,
it is made up for when somebody asks a package of torch for a module that is not there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from importlib.machinery import PathFinder
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["WithoutCompiler"]

COMPILER = "torch._dynamo"
Method = Callable[..., Any]


class WithoutCompiler:
    """Wraps the methods that would import it."""

    def __init__(self) -> None:
        # what packages look up themselves if they lack an attribute, while we look first
        self._own: dict[ModuleType, Callable[[str], Any] | None] = {}
        self._is_over = False

    def wrap_disabled(self, method: Method) -> Method:
        """Return a method that `torch._disable_dynamo` wrapped, such that it imports nothing; others as they are."""
        plain = _wrapped(method, "__dynamo_disable")
        if plain is None:
            return method

        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            return (method if self._is_there() else plain)(*args, **kwargs)

        return run

    def wrap_step(self, step: Method) -> Method:
        """Return a `step` that sets whether it is differentiable, as torch's do, without a word to the compiler."""
        plain = _wrapped(step, "differentiable")
        if plain is None or step.__code__.co_name != "_use_grad":
            return step

        @wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_there():
                return step(*args, **kwargs)
            optimizer: Optimizer = args[0]
            before = torch.is_grad_enabled()
            try:
                torch.set_grad_enabled(optimizer.defaults["differentiable"])
                return plain(*args, **kwargs)
            finally:
                torch.set_grad_enabled(before)

        return run

    def _is_there(self) -> bool:
        if self._is_over or torch.compiler.is_compiling() or COMPILER in sys.modules:
            return True
        if not self._own:
            for name, module in list(sys.modules.items()):
                if name.partition(".")[0] == "torch" and "__path__" in vars(module):
                    self._own[module] = vars(module).get("__getattr__")
                    vars(module)["__getattr__"] = partial(self._look_up, module)
        return False

    def _look_up(self, package: ModuleType, name: str) -> Any:
        """Answer for a package that lacks an attribute. `from package import name` is none of that: it imports."""
        imports = sys._getframe(1).f_code.co_filename.startswith("<frozen importlib")
        path = f"{package.__name__}.{name}"
        if not imports and PathFinder.find_spec(path, package.__path__) is not None:
            import_module(COMPILER)
        if COMPILER in sys.modules:
            self.remove()
            return getattr(package, name)
        own = self._own.get(package)
        if own is not None:
            return own(name)
        raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}", name=name, obj=package)

    def remove(self) -> None:
        """Leave packages to themselves, and methods to torch: a class keeps its `step` longer than a session."""
        self._is_over = True
        for package, own in self._own.items():
            if own is None:
                del vars(package)["__getattr__"]
            else:
                vars(package)["__getattr__"] = own
        self._own.clear()


def _wrapped(method: Method, constant: str) -> Method | None:
    """Return what is inside a wrapper of torch's that has a text in its code."""
    if isinstance(method, FunctionType) and constant in method.__code__.co_consts:
        return getattr(method, "__wrapped__", None)
    return None
