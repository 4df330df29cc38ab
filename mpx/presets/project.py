"""The project file: `mpx.yaml`, or `[tool.mpx]` in `pyproject.toml`.

Looked for from the current folder upward to the root of the repository, and only in the current folder when there
is no repository. Never in a home folder or a cache: what a run does must be visible beside its script.
"""

from __future__ import annotations

import re
import sys
from dataclasses import field
from pathlib import Path
from typing import Any

from mpx.errors import PresetError
from mpx.presets.files import display_path
from mpx.presets.settings import Layer, read_layer
from mpx.presets.tree import Place, Table, from_object
from mpx.presets.yaml_file import read_text, read_yaml
from mpx.values import frozen

__all__ = ["PROJECT_FILES", "Project", "find_project", "read_project"]

_PROJECT_FILE = "mpx.yaml"
_PYPROJECT = "pyproject.toml"
PROJECT_FILES = (_PROJECT_FILE, _PYPROJECT)
_ROOT_MARKS = (".git", ".hg")


@frozen
class Project:
    """A project file and what it sets; `layer` is None when only notices came of it."""

    path: Path | None = None
    layer: Layer | None = None
    notices: list[str] = field(default_factory=list)


def find_project(cwd: Path) -> Project:
    """Return the nearest project file; an empty `Project` when there is none."""
    notices: list[str] = []
    for folder in _folders(cwd.resolve()):
        section, notice = _pyproject_layer(folder / _PYPROJECT, cwd)
        notices += notice
        path = folder / _PROJECT_FILE
        if path.is_file():
            if section is not None:
                ignored = display_path(folder / _PYPROJECT, cwd)
                notices.append(
                    f"`[tool.mpx]` in `{ignored}` is not used, because `{_PROJECT_FILE}` is beside it"
                )
            return Project(path, read_project(path, cwd), notices)
        if section is not None:
            return Project(folder / _PYPROJECT, section, notices)
    return Project(notices=notices)


def read_project(path: Path, cwd: Path) -> Layer:
    """Return what a project file sets."""
    if path.name == _PYPROJECT:
        layer, notices = _pyproject_layer(path, cwd)
        if layer is not None:
            return layer
        place = Place(display_path(path, cwd), display_path(path, cwd))
        raise PresetError.of(
            [place.problem("", notices[0] if notices else "the file has no section `[tool.mpx]`")]
        )
    display = display_path(path, cwd)
    table, problems = read_yaml(path, display)
    return read_layer(table, display, problems)


def _folders(cwd: Path) -> list[Path]:
    upward = [cwd, *cwd.parents]
    for count, folder in enumerate(upward, start=1):
        if any((folder / mark).exists() for mark in _ROOT_MARKS):
            return upward[:count]
    return [cwd]


def _pyproject_layer(path: Path, cwd: Path) -> tuple[Layer | None, list[str]]:
    # A pyproject.toml without a word of mpx is none of our business, not even when it is broken.
    if not path.is_file() or b"mpx" not in path.read_bytes():
        return None, []
    display = display_path(path, cwd)
    text = read_text(path, display)
    section, notices = _tool_section(text, display)
    if section is None:
        return None, notices
    lines = _key_lines(text)

    def place_of(key: str) -> Place:
        line = lines.get(key)
        if line is None:
            return Place(f"{display} [tool.mpx]", f"{display} [tool.mpx]")
        source = text.splitlines()[line - 1]
        column = len(source) - len(source.lstrip()) + 1
        return Place(f"{display}:{line}", f"{display}:{line}:{column}", source, column)

    table = from_object(section, place_of)
    if not isinstance(table, Table):
        raise PresetError.of([table.place.problem("", "`tool.mpx` is not a table", received=str(table))])
    return read_layer(table, display, []), []


def _tool_section(text: str, display: str) -> tuple[Any, list[str]]:
    if sys.version_info < (3, 11):
        if re.search(r"^\s*\[\s*tool\s*\.\s*mpx\b", text, re.MULTILINE) is None:
            return None, []
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        notice = (
            f"`[tool.mpx]` in `{display}` is not used: Python {version} cannot read TOML (3.11 can); "
            f"put the settings into `{_PROJECT_FILE}`"
        )
        return None, [notice]
    import tomllib  # not in Python 3.10

    try:
        tool = tomllib.loads(text).get("tool", {})
    except tomllib.TOMLDecodeError as error:
        raise PresetError.of([Place(display, display).problem("", f"not valid TOML: {error}")]) from None
    return tool.get("mpx") if isinstance(tool, dict) else None, []


def _key_lines(text: str) -> dict[str, int]:
    """Return the line of each dotted key below `[tool.mpx]`, for keys written in the ordinary way.

    `tomllib` gives values without lines. A key that is not found here (quoted, inline) is shown without a line.
    """
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.fullmatch(r"\s*\[\s*([\w.-]+)\s*\]\s*(?:#.*)?", line):
            section = header[1]
        elif entry := re.match(r"\s*([\w.-]+)\s*=", line):
            key = f"{section}.{entry[1]}"
            if key.startswith("tool.mpx."):
                lines.setdefault(key.removeprefix("tool.mpx."), number)
    return lines
