"""Walking what scripts build: the tensors in arguments and results, the modules in a tree."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.utils.rnn import PackedSequence

__all__ = ["map_tensors", "modules_of", "tensors"]

Change = Callable[[Tensor], Tensor]


def map_tensors(value: Any, change: Change) -> Any:
    """Return `value` with `change` applied to its tensors; the very same object where no tensor changes.

    Tuples, named tuples, lists, mappings, dataclasses, distributions and PackedSequence are entered, with class,
    order and attributes kept; anything else is left alone. A container that changes is copied, never edited: the
    script may hold it. What occurs twice is changed once and stays one object; a structure that contains itself is
    entered once.
    """
    if isinstance(value, Tensor):
        return change(value)
    return _map(value, change, {})


def _map(value: Any, change: Change, done: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in done:
            done[id(value)] = change(value)
        return done[id(value)]
    parts = _parts(value)
    if parts is None:
        return value
    if id(value) in done:
        return done[id(value)]
    done[id(value)] = value  # what a cycle comes back to
    changed = {key: new for key, part in parts.items() if (new := _map(part, change, done)) is not part}
    if changed:
        done[id(value)] = _with_parts(value, changed)
    return done[id(value)]


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that `map_tensors` would visit."""
    if isinstance(value, Tensor):
        yield value
        return
    seen = {}  # holds what it has seen: a part made on the fly must not give its id to the next
    stack = [value]
    while stack:
        top = stack.pop()
        if isinstance(top, Tensor):
            yield top
        elif (parts := _parts(top)) is not None and id(top) not in seen:
            seen[id(top)] = top
            stack.extend(reversed(parts.values()))


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return what a container holds, by index, key or attribute; None for what is not entered."""
    if isinstance(value, PackedSequence):
        return {"data": value.data}
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, Distribution):
        return dict(vars(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def _with_parts(value: Any, changed: dict[Any, Any]) -> Any:
    if isinstance(value, (list, tuple)) and not isinstance(value, PackedSequence):
        return _sequence_of(value, [changed.get(index, item) for index, item in enumerate(value)])
    if isinstance(value, PackedSequence):
        return value._replace(**changed)
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return value  # cannot be copied and changed
    other = copy.copy(value)
    if isinstance(other, MutableMapping):
        attributes, new = getattr(other, "__dict__", {}), {id(value[key]): changed[key] for key in changed}
        for name, attribute in attributes.items():  # items that are attributes as well
            attributes[name] = new.get(id(attribute), attribute)
        if getattr(value, "__dict__", None) is value:  # `self.__dict__ = self`
            object.__setattr__(other, "__dict__", other)
        for key, part in changed.items():
            other[key] = part
    else:
        for name, part in changed.items():
            object.__setattr__(other, name, part)  # a frozen dataclass refuses plain assignment
    return other


def _sequence_of(value: Any, items: list[Any]) -> Any:
    kind = type(value)
    if isinstance(value, list):
        other = copy.copy(value)
        other[:] = items
        return other
    if hasattr(value, "_make"):
        return value._make(items)
    if kind is tuple or hasattr(kind, "n_sequence_fields"):  # torch.return_types.max is a struct sequence
        return kind(items)
    other = tuple.__new__(kind, items)  # its own constructor may want other arguments
    for name, attribute in getattr(value, "__dict__", {}).items():
        setattr(other, name, attribute)
    return other


def modules_of(root: nn.Module) -> list[nn.Module]:
    """Return the modules of a tree, each once, parents first; several times faster than `root.modules()`."""
    found, seen = [root], {id(root)}
    for module in found:  # grows while it is walked
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found
