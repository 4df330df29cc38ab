"""Frozen dataclasses that cost next to nothing to define.

`dataclasses.dataclass(frozen=True)` writes and compiles six methods for each class, which takes a third of a
millisecond: with the 80 classes of policy, record and report a tenth of what an `mpx run` adds to its script. Here the
methods are the same for all and look at the fields instead. To `fields`, `replace` and `is_dataclass`, and to mypy, the
classes are dataclasses. What is made once a step or pass is no case for this: its `__init__` is the slower one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, FrozenInstanceError, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: object) -> Callable[[T], T]:
        """Stand in for the one of `typing`, which came with Python 3.11."""
        return lambda decorator: decorator


__all__ = ["frozen", "frozen_by_keywords"]

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass."""
    return _made(dataclasses.dataclass(init=False, repr=False, eq=False)(cls))


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen_by_keywords(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass whose fields are given by name only."""
    return _made(dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=True)(cls))


class _Shape(NamedTuple):
    names: tuple[str, ...]
    positional: tuple[str, ...]
    defaults: dict[str, Any]
    factories: dict[str, Callable[[], Any]]


def _made(cls: type[T]) -> type[T]:
    own = dataclasses.fields(cls)  # type: ignore[arg-type]
    shape = _Shape(
        names=tuple(one.name for one in own),
        positional=tuple(one.name for one in own if not one.kw_only),
        defaults={one.name: one.default for one in own if one.default is not MISSING},
        factories={one.name: one.default_factory for one in own if one.default_factory is not MISSING},
    )
    for name, what in (("__shape__", shape), *_METHODS):
        setattr(cls, name, what)
    return cls


def _init(self: Any, /, *args: Any, **given: Any) -> None:
    shape: _Shape = self.__shape__
    if args:
        by_position = dict(zip(shape.positional, args, strict=False))
        if len(args) > len(by_position) or not by_position.keys().isdisjoint(given):
            raise _misfit(self, f"{len(args)} values by position and {sorted(given)}")
        given |= by_position
    state = self.__dict__
    for name in shape.names:
        if name in given:
            state[name] = given.pop(name)
        elif name in shape.defaults:
            state[name] = shape.defaults[name]
        elif name in shape.factories:
            state[name] = shape.factories[name]()
        else:
            raise _misfit(self, f"no `{name}`")
    if given:
        raise _misfit(self, f"{sorted(given)} as well")


def _misfit(self: Any, received: str) -> TypeError:
    return TypeError(
        f"{type(self).__name__} does not fit. Expected {', '.join(self.__shape__.names)}. Received {received}"
    )


def _values(self: Any) -> tuple[Any, ...]:
    state = self.__dict__
    return tuple([state[name] for name in self.__shape__.names])


def _eq(self: Any, other: object) -> Any:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_values(self))


def _repr(self: Any) -> str:
    pairs = zip(self.__shape__.names, _values(self), strict=True)
    return f"{type(self).__qualname__}({', '.join(f'{name}={one!r}' for name, one in pairs)})"


def _setattr(self: Any, name: str, _: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _delattr(self: Any, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


_METHODS = (
    ("__init__", _init),
    ("__eq__", _eq),
    ("__hash__", _hash),
    ("__repr__", _repr),
    ("__setattr__", _setattr),
    ("__delattr__", _delattr),
)
