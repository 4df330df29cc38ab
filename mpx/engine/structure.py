"""Walking what scripts build: the tensors in arguments and results, the modules in a tree."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

__all__ = ["map_tensors", "modules_of", "tensors"]


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with `function` applied to its tensors; the very same object where no tensor changes.

    Tuples, named tuples, lists, mappings (their class, attributes and order kept), dataclasses and PackedSequence are entered; anything else is
    left alone. A container that changes is copied, never edited: the script may hold it.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, PackedSequence):
        data = function(value.data)
        return value if data is value.data else value._replace(data=data)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, function) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_make"):
            return value._make(items)
        return type(value)(items)
    if isinstance(value, Mapping):
        return _with_items(value, {key: map_tensors(item, function) for key, item in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        changed = {name: new for name, old in fields.items() if (new := map_tensors(old, function)) is not old}
        if not changed:
            return value
        other = copy.copy(value)
        for name, new in changed.items():
            object.__setattr__(other, name, new)  # a frozen dataclass refuses plain assignment
        return other
    return value


def _with_items(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    changed = {key: item for key, item in items.items() if item is not value[key]}
    if not changed:
        return value
    if dataclasses.is_dataclass(value) or type(value) is not dict:
        other = copy.copy(value)  # an OrderedDict, a ModelOutput: keeps class, order and attributes
        for key, item in changed.items():
            other[key] = item  # type: ignore[index]
        return other
    return items


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that `map_tensors` would visit."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, PackedSequence):
        yield value.data
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))


def modules_of(root: nn.Module) -> list[nn.Module]:
    """Return the modules of a tree, each once, parents first; several times faster than `root.modules()`."""
    found = {id(root): root}
    stack = [root]
    while stack:
        for child in stack.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                stack.append(child)
    return list(found.values())
