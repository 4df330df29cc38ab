"""Install the session the moment torch has been imported, before a line of the script can bind a name of it.

Runs at the start of every Python process of a run, so it imports nothing that the interpreter has not loaded already.
"""

from __future__ import annotations

import _thread
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

__all__ = ["IMPORT_SYSTEM", "ApexFinder", "TorchFinder", "follow"]

# Python drops the import system's own frames from tracebacks and from the count of a warning's `stacklevel`, and
# knows them by this file name. A frame that carries it is dropped with them.
IMPORT_SYSTEM = "<frozen importlib._bootstrap_external>"


class TorchFinder:
    """A meta path finder for exactly `torch` that calls back once torch's module body has run.

    The spec comes from the finders behind it. Only `exec_module` of that spec's loader is replaced, on the instance and
    for one call; after torch is imported neither the finder nor a trace of it on `torch.__spec__` is left. It stays
    after a mere `importlib.util.find_spec("torch")`, and after an import that failed.
    """

    def __init__(self, on_import: Callable[[], None]) -> None:
        self._on_import = on_import
        # Threads that are in `find_spec`: a finder behind us may ask the whole meta path again.
        self._searching: set[int] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return torch's spec with its loader watched; None for every other module."""
        thread = _thread.get_ident()
        if name != "torch" or thread in self._searching:
            return None
        self._searching.add(thread)
        try:
            spec = _search(self, name, path, target)
        finally:
            self._searching.remove(thread)
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: Any) -> None:
        execute = loader.exec_module
        inner = vars(loader).get("exec_module")  # another tool's, or ours if a loader serves two specs

        def exec_module(module: ModuleType) -> None:
            if inner is None:
                del loader.exec_module
            else:
                loader.exec_module = inner
            from mpx.launch.collector import Rest

            with Rest():
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._on_import()

        exec_module.__code__ = exec_module.__code__.replace(co_filename=IMPORT_SYSTEM)
        loader.exec_module = exec_module


class ApexFinder:
    """A meta path finder for `apex` and what is below it; all that it does is in `apex_import`, loaded when asked."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._searching: set[int] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the stand-in where the run gives it to who asks; None for every other module."""
        thread = _thread.get_ident()
        if name[:4] != "apex" or name.partition(".")[0] != "apex" or thread in self._searching:
            return None
        self._searching.add(thread)
        try:
            from mpx.launch.apex_import import stand_in

            return stand_in(name, self._run_dir, lambda: _search(self, name, path, target))
        finally:
            self._searching.remove(thread)


def follow(run_dir: str) -> None:
    """See to it that this process joins the run of `run_dir` if it ever imports torch, and finds our `apex`."""

    def join() -> None:
        from mpx.launch.join import join_run

        join_run(run_dir)

    if not any(isinstance(finder, ApexFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, ApexFinder(run_dir))
    if "torch" in sys.modules:
        join()
    elif not any(isinstance(finder, TorchFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchFinder(join))


def _search(
    asking: TorchFinder | ApexFinder, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        if finder is not asking:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
    return None
