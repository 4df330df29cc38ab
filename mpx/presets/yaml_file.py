"""YAML read as nodes: every key and value keeps its line and column, and nothing is guessed about types.

PyYAML's own constructors read `1e4` as text, `010` as 8 and `off` as false, and let a repeated key win in silence.
Nodes carry the text as it was written, and `mpx.presets.values` gives it the type of the field that it is for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mpx.errors import PresetError, Problem
from mpx.presets.tree import Listing, Place, Scalar, Table, Tree

__all__ = ["SHIPPED_LOADER", "parse_text", "quote", "read_text", "read_yaml"]

# A twentieth of the time of the pure Python one.
SHIPPED_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NULL = "tag:yaml.org,2002:null"


def read_text(path: Path, display: str) -> str:
    """Return the text of a file, or refuse it with the reason."""
    place = Place(origin=display, where=display)
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        problem = place.problem("", "there is no such file")
    except IsADirectoryError:
        problem = place.problem("", "this is a folder", expected="a YAML file")
    except OSError as error:
        problem = place.problem("", f"the file cannot be read ({error.strerror or error})")
    except UnicodeDecodeError as error:
        problem = place.problem(
            "", f"the file is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}"
        )
    raise PresetError.of([problem]) from None


def read_yaml(path: Path, display: str, *, shipped: bool = False) -> tuple[Table, list[Problem]]:
    """Return the mapping that a YAML file holds, and what is wrong with its keys.

    Args:
        path: The file.
        display: Its name in messages and origins.
        shipped: Whether it is one of ours, which tests hold to be valid.
    """
    tree, problems = parse_text(read_text(path, display), display, shipped=shipped)
    if isinstance(tree, Table):
        return tree, problems
    empty = isinstance(tree, Scalar) and tree.null
    what = "the file is empty" if empty else f"the file holds {tree}"
    expected = "a mapping of settings, such as `extends: O1`"
    raise PresetError.of([*problems, tree.place.problem("", what, expected=expected)])


def parse_text(text: str, display: str, *, shipped: bool = False) -> tuple[Tree, list[Problem]]:
    """Return what a YAML text says, and what is wrong with its keys; a text that is not YAML is refused."""
    reader = _Reader(text, display)
    try:
        # Others' files not by libyaml: it is not in every build of PyYAML, and words its complaints otherwise. Ours are
        # longer, are read at every start, and have nothing in them to complain of.
        node = yaml.compose(text, Loader=SHIPPED_LOADER if shipped else yaml.SafeLoader)
        tree = Scalar("", reader.start, null=True) if node is None else reader.tree(node, "")
    except yaml.MarkedYAMLError as error:
        places = [reader.place(mark) for mark in (error.problem_mark, error.context_mark) if mark]
        # What is never closed is noticed at the end of the text, where there is no line to show.
        place = next((place for place in places if place.source), places[0] if places else reader.start)
        raise PresetError.of([_syntax_problem(place, error.problem)]) from None
    except (yaml.YAMLError, ValueError) as error:
        raise PresetError.of([_syntax_problem(reader.start, str(error).splitlines()[0])]) from None
    except RecursionError:
        raise PresetError.of([reader.start.problem("", "nested too deeply")]) from None
    return tree, reader.problems


def quote(text: str) -> str:
    """Return `text` as a YAML scalar on one line that every YAML reader gives back unchanged."""
    dumped: str = yaml.safe_dump(text, default_style='"', width=2**31 - 1)
    return dumped.rstrip("\n")


class _Reader:
    """Turns nodes into trees; collects what can be wrong with the keys of a mapping."""

    def __init__(self, text: str, display: str) -> None:
        self._lines = text.splitlines()
        self._display = display
        self._trees: dict[int, Tree] = {}
        self.problems: list[Problem] = []
        self.start = Place(f"{display}:1", f"{display}:1:1")

    def place(self, mark: Any) -> Place:
        line, column = mark.line + 1, mark.column + 1
        source = self._lines[mark.line] if mark.line < len(self._lines) else None
        return Place(f"{self._display}:{line}", f"{self._display}:{line}:{column}", source, column)

    def tree(self, node: Any, key: str) -> Tree:
        place = self.place(node.start_mark)
        # An alias is the node that it names: read once, so that a few nested aliases cannot become a billion values.
        known = self._trees.get(id(node))
        if known is not None:
            return known
        tree: Tree
        if isinstance(node, yaml.ScalarNode):
            tree = Scalar(node.value, place, null=node.tag == _NULL)
        elif isinstance(node, yaml.SequenceNode):
            self._trees[id(node)] = Scalar("an alias of itself", place)
            tree = Listing(tuple(self.tree(item, key) for item in node.value), place)
        else:
            self._trees[id(node)] = Scalar("an alias of itself", place)
            tree = self._table(node, place, key)
        self._trees[id(node)] = tree
        return tree

    def _table(self, node: Any, place: Place, key: str) -> Table:
        first: dict[str, Place] = {}
        pairs: list[tuple[str, Place, Tree]] = []
        prefix = f"{key}." if key else ""
        for key_node, value_node in node.value:
            key_place = self.place(key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(key_place.problem(key, "a key must be a name"))
                continue
            name = key_node.value
            full = prefix + name
            if name == "<<":
                text = "merge keys are not read; use `extends` to build on another preset"
                self.problems.append(key_place.problem(full, text))
            elif name in first:
                text = f"the key is given twice; the first is at {first[name].origin}"
                self.problems.append(key_place.problem(full, text))
            else:
                first[name] = key_place
                pairs.append((name, key_place, self.tree(value_node, full)))
        return Table(tuple(pairs), place)


def _syntax_problem(place: Place, what: str | None) -> Problem:
    indent = place.source[: (place.column or 1)] if place.source else ""
    if "\t" in indent:
        return place.problem("", "not valid YAML: a tab indents the line", expected="spaces")
    return place.problem("", f"not valid YAML: {what or 'the text cannot be read'}")
