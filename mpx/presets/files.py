"""Where presets live, what a reference to one means, and the chain of files that it stands for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mpx.errors import PresetError, Problem
from mpx.presets.policy import FIRST_SCHEMA, field_specs
from mpx.presets.settings import Layer, Setting, read_layer
from mpx.presets.shipped import configs_dir, preset_names
from mpx.presets.tree import Place
from mpx.presets.values import nearest
from mpx.presets.yaml_file import read_yaml
from mpx.values import frozen

__all__ = [
    "PresetFile",
    "built_in",
    "configs_dir",
    "display_path",
    "load_chain",
    "locate",
    "preset_file",
    "preset_names",
]

_SUFFIXES = (".yaml", ".yml")


@frozen
class PresetFile:
    """A preset that exists as a file. `built_in` ones are part of mpx and have a name instead of a path."""

    path: Path
    display: str
    built_in: bool


def built_in(name: str) -> PresetFile:
    """Return a built-in preset by its name."""
    return PresetFile(configs_dir() / f"{name}.yaml", f"configs/{name}.yaml", built_in=True)


def preset_file(path: Path, cwd: Path) -> PresetFile:
    """Return the preset at a path; one of the shipped files is built in, however it was reached."""
    resolved = path.resolve()
    return PresetFile(resolved, display_path(resolved, cwd), built_in=resolved.parent == configs_dir())


def display_path(path: Path, cwd: Path) -> str:
    """Return the path as messages show it: relative where that is shorter to read, never with `..`."""
    resolved = path.resolve()
    if resolved.parent == configs_dir():
        return f"configs/{resolved.name}"
    base = cwd.resolve()
    return str(resolved.relative_to(base)) if resolved.is_relative_to(base) else str(resolved)


def locate(reference: str, *, base: Path, cwd: Path, place: Place, key: str) -> PresetFile:
    """Return the preset that `reference` names: a built-in name, or the path of a file.

    Args:
        reference: What was written.
        base: The folder that a relative path starts from.
        cwd: The folder that paths in messages start from.
        place: Where it was written, for the complaint.
        key: What it was written for.
    """
    names = preset_names()
    if reference in names:
        return built_in(reference)
    looks_like_path = "/" in reference or reference.endswith(_SUFFIXES)
    path = base / Path(reference).expanduser()
    if looks_like_path and _exists(path):
        return preset_file(path, cwd)
    expected = "one of " + ", ".join(f"`{name}`" for name in names)
    if looks_like_path:
        what, expected = _what_is_missing(path), f"a YAML file, or {expected}"
    else:
        what, expected = "there is no such preset", f"{expected}, or the path of a YAML file"
    suggestion = _suggest(reference, path, names, looks_like_path=looks_like_path)
    problem = place.problem(key, what, expected=expected, received=f"`{reference}`", suggestion=suggestion)
    raise PresetError.of([problem])


def load_chain(start: PresetFile, cwd: Path) -> tuple[list[Layer], list[Problem]]:
    """Return the layers of a preset from the root of its `extends` chain to itself, and what could not be followed."""
    layers: list[Layer] = []
    visited: list[PresetFile] = []
    current = start
    while True:
        visited.append(current)
        layer = _read(current)
        layers.append(layer)
        if layer.extends is None:
            return layers[::-1], []
        try:
            current = _next(layer.extends, visited, cwd)
        except PresetError as error:
            layer.broken.update(field_specs())
            return layers[::-1], list(error.problems)


def _read(file: PresetFile) -> Layer:
    table, problems = read_yaml(file.path, file.display, shipped=file.built_in)
    layer = read_layer(table, file.display, problems)
    if not file.built_in:
        # A file without a name is called after itself: the name of what it extends would lie in every report.
        for key, value in (("schema", FIRST_SCHEMA), ("name", file.path.stem), ("description", "")):
            if layer.sets(key) is None and key not in layer.broken:
                layer.add(Setting(key, value, layer.start))
    return layer


def _next(extends: Setting, visited: Sequence[PresetFile], cwd: Path) -> PresetFile:
    file = visited[-1]
    following = locate(extends.value, base=file.path.parent, cwd=cwd, place=extends.place, key=extends.key)
    paths = [earlier.path.resolve() for earlier in visited]
    if following.path.resolve() in paths:
        start = paths.index(following.path.resolve())
        chain = " → ".join([*(earlier.display for earlier in visited[start:]), following.display])
        problem = extends.place.problem(extends.key, f"the chain comes back to where it was: {chain}")
        raise PresetError.of([problem])
    return following


def _suggest(reference: str, path: Path, names: Sequence[str], *, looks_like_path: bool) -> str | None:
    if looks_like_path:
        siblings = [item.name for item in _listing(path.parent) if item.suffix in _SUFFIXES]
        guess = nearest(path.name, siblings)
        return f"did you mean `{Path(reference).parent / guess}`?" if guess else None
    if re.fullmatch(r"0\d.*", reference) and f"O{reference[1:]}" in names:
        return f"did you mean `O{reference[1:]}`? A level begins with the letter O, not with a zero"
    if reference and _exists(path):
        return f"to use the file, write `./{reference}`"
    guess = next((name for name in names if name.lower() == reference.lower()), None) or nearest(
        reference, names
    )
    return f"did you mean `{guess}`?" if guess else None


def _what_is_missing(path: Path) -> str:
    folder = path.parent.absolute()
    return f"there is no such file in `{folder}`" if _exists(folder) else f"there is no folder `{folder}`"


def _exists(path: Path) -> bool:
    # A reference may be anything that was typed, also what no file system takes for a name.
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _listing(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
