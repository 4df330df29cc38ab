"""Frozen values: what they share with the dataclasses of the standard library."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import field
from typing import Any, ClassVar

import pytest

from mpx.values import frozen, frozen_by_keywords


@frozen
class Point:
    """By position or by name."""

    MADE: ClassVar[int] = 0

    x: int
    y: int = 2
    names: list[str] = field(default_factory=list)

    @property
    def sum(self) -> int:
        return self.x + self.y


@frozen_by_keywords
class Limits:
    """By name, also where one without a default follows one with."""

    least: float = 0.0
    most: float


@dataclasses.dataclass(frozen=True)
class Theirs:
    """What a `Point` is compared with."""

    x: int
    y: int = 2
    names: list[str] = field(default_factory=list)


def test_made_by_position_by_name_and_from_defaults_as_a_dataclass_is():
    for args, given in (((1,), {}), ((1, 3), {}), ((1,), {"names": ["a"]}), ((), {"x": 1, "y": 5})):
        assert dataclasses.asdict(Point(*args, **given)) == dataclasses.asdict(Theirs(*args, **given))
    assert Limits(most=3.0) == Limits(least=0.0, most=3.0)


@pytest.mark.parametrize(
    "make",
    [
        Point,
        lambda: Point(1, 2, [], 4),
        lambda: Point(1, x=1),
        lambda: Point(1, z=1),
        lambda: Point(y=1),
        lambda: Limits(3.0),
    ],
)
def test_what_does_not_fit_is_a_type_error(make: Callable[..., Any]):
    with pytest.raises(TypeError, match="does not fit"):
        make()


def test_a_factory_makes_a_new_one_each_time():
    assert Point(1).names is not Point(1).names


def test_frozen_against_assignment_deletion_and_new_names():
    point = Point(1)
    for change in (
        lambda: setattr(point, "x", 3),
        lambda: delattr(point, "x"),
        lambda: setattr(point, "z", 3),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    assert point == Point(1)


def test_equal_by_type_and_fields_and_hashed_alike():
    assert Point(1) == Point(1, 2)
    assert Point(1) != Point(2)
    assert Point(1) != Theirs(1)
    assert hash(Limits(most=1.0)) == hash(Limits(least=0.0, most=1.0))
    with pytest.raises(TypeError):
        hash(Point(1))  # of a list, as a dataclass


def test_shown_as_a_dataclass_is():
    assert repr(Point(1, names=["a"])) == repr(Theirs(1, names=["a"])).replace("Theirs", "Point")


def test_the_tools_of_dataclasses_work_on_it():
    point = Point(1)
    assert dataclasses.is_dataclass(point)
    assert [one.name for one in dataclasses.fields(Point)] == ["x", "y", "names"]
    assert dataclasses.replace(point, y=7) == Point(1, 7)
    match point:
        case Point(x, y):
            assert (x, y, point.sum) == (1, 2, 3)


def test_copied_and_pickled():
    point = Point(1, 2, ["a"])
    assert copy.deepcopy(point) == point
    assert copy.copy(point) == point
    assert pickle.loads(pickle.dumps(point)) == point
