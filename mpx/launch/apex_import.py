"""Who gets the stand-in for NVIDIA's `apex`, and for which of its modules.

`apex: on` gives it to everybody, `off` to nobody. `auto` gives it to the script, which plain python would end with an
ImportError, and not to an installed library that looks whether there is an apex: such a library has a way of its own
without it, and at O0 must go that way as it does under plain python. An apex of NVIDIA's that is installed stays what
it is, but for `apex.amp`: two mechanisms would scale twice, and the level would not mean what it says.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import FrameType, ModuleType
from typing import Any

from mpx.launch.torch_import import IMPORT_SYSTEM

__all__ = ["refused", "stand_in"]

_MPX = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED = tuple(os.sep + folder + os.sep for folder in ("site-packages", "dist-packages"))
_OF_NVIDIA = "multi_tensor_apply"  # a part that every version of NVIDIA's apex has
refused: set[str] = set()  # the installed libraries that looked and did not find it
# Import and unpickle for others: who asks is the code that called them.
_GO_BETWEENS = ("apex", "torch")


def stand_in(name: str, run_dir: str, search: Callable[[], ModuleSpec | None]) -> ModuleSpec | None:
    """Return the spec of our module of that name, or None where the other finders are to be asked.

    Args:
        name: `apex`, or a module below it.
        run_dir: The run directory, whose preset has the option.
        search: Asks the other finders.
    """
    mode = _mode(run_dir)
    if mode == "off":
        return None
    if name == "apex":
        return _package(search, everybody=mode == "on")
    ours = _spec(name)
    package = getattr(sys.modules.get("apex"), "__spec__", None)
    if ours is None or package is None:
        return None
    is_amp = name == "apex.amp" or name.startswith("apex.amp.")
    if str(package.origin).startswith(_MPX):
        everybody = mode == "on" or is_amp  # which computes nothing of its own
    elif _is_nvidias(package):
        installed = search()
        if installed is not None and not is_amp:
            return installed
        everybody = installed is not None
    else:
        return None
    return ours if everybody or _script_asks() else None


def _package(search: Callable[[], ModuleSpec | None], *, everybody: bool) -> ModuleSpec | None:
    """Return the spec of `apex` itself: ours, or NVIDIA's where that is installed."""
    found = None if everybody else search()
    if found is not None and _is_nvidias(found):
        return _completed(found)
    if found is not None and not _is_namespace(found) and not _is_another_project(found):
        return None  # a package of the user's own
    ours = _spec("apex")
    return _completed(ours) if ours is not None and (everybody or _script_asks()) else None


@cache
def _mode(run_dir: str) -> str:
    from pathlib import Path

    from mpx.errors import RecordError
    from mpx.record import RunDirectory

    try:
        preset, _ = RunDirectory.open(Path(run_dir)).read_preset()
    except RecordError:
        return "off"  # importing torch says what is wrong
    return str(preset.get("apex", "off"))


def _spec(name: str) -> ModuleSpec | None:
    """Return the spec of our module: its own file, under apex's name, so that what is pickled says `apex`."""
    place = os.path.join(_MPX, *name.split("."))
    folder = os.path.join(place, "__init__.py")
    if not os.path.isfile(folder):
        return spec_from_file_location(name, place + ".py") if os.path.isfile(place + ".py") else None
    spec = spec_from_file_location(name, folder, submodule_search_locations=[place])
    if spec is not None:
        spec.submodule_search_locations = []  # what is below is found here, or not at all
    return spec


def _is_namespace(spec: ModuleSpec) -> bool:
    """Whether it is a mere folder of the name, as the checkout of a repository is."""
    return spec.origin is None


def _is_nvidias(spec: ModuleSpec) -> bool:
    return any(
        os.path.isdir(os.path.join(place, _OF_NVIDIA)) for place in spec.submodule_search_locations or ()
    )


def _is_another_project(spec: ModuleSpec) -> bool:
    """Whether it is what `pip install apex` brings: not NVIDIA's, which is not on PyPI."""
    return not _is_nvidias(spec) and any(folder in str(spec.origin) for folder in _INSTALLED)


def _completed(spec: ModuleSpec) -> ModuleSpec:
    """Let the package find as attributes the parts that it does not import itself; NVIDIA's has some no more."""
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        if not hasattr(module, "__getattr__"):
            vars(module)["__getattr__"] = _attribute

    exec_module.__code__ = exec_module.__code__.replace(co_filename=IMPORT_SYSTEM)
    loader.exec_module = exec_module
    return spec


def _attribute(name: str) -> Any:
    full = f"apex.{name}"
    if not name.startswith("_") and _spec(full) is not None:
        from importlib import import_module

        try:
            return import_module(full)
        except ModuleNotFoundError as error:
            if error.name != full:
                raise
    raise AttributeError(f"module 'apex' has no attribute {name!r}")


def _script_asks() -> bool:
    """Whether the code that imports or probes belongs to no installed library; if it does, that is noted."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - no other way to learn who asks
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name == "__main__":
            return True
        path, top = frame.f_code.co_filename, name.partition(".")[0]
        between = top in _GO_BETWEENS or path.startswith((_MPX, "<frozen "))
        if not between and any(folder in path for folder in _INSTALLED):
            refused.add(top)
            return False
        if not between and not path.startswith(_STANDARD):
            return True
        frame = frame.f_back
    return True
