"""What a module returns keeps its shape: containers come back as they were, with other tensors inside."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal
from torch.nn.utils.rnn import pack_padded_sequence

from mpx.engine.structure import map_tensors, modules_of, tensors

HALF, FULL = torch.ones(2, dtype=torch.float16), torch.zeros(2)


def widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype is torch.float16 else tensor


class Pair(NamedTuple):
    left: Any
    right: Any


OldPair = namedtuple("OldPair", ["left", "right"])  # noqa: PYI024 - scripts have these


class Point(tuple):
    """A tuple whose constructor takes its items one by one, with an attribute of its own."""

    __slots__ = ()

    def __new__(cls, x: Any, y: Any) -> Any:
        return super().__new__(cls, (x, y))


class Tagged(list):
    tag = "untagged"


@dataclass(frozen=True)
class Frozen:
    loss: Tensor
    names: list[str]


@dataclass
class Slotted:
    __slots__ = ("a", "b")
    a: Tensor
    b: Tensor


@dataclass
class Late:
    a: Tensor
    later: Tensor = field(init=False)  # set by nobody yet


@dataclass
class ModelOutput(OrderedDict):
    """As transformers writes them: an OrderedDict and a dataclass, whose items and attributes are the same."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for name in ("loss", "logits"):
            super().__setitem__(name, getattr(self, name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        return type(self), (self.loss, self.logits)


class Namespace(dict):
    """A dict whose items are its attributes, as people write it for settings and results."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Both(dict):
    """Keeps what it is given twice."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__.update(items)


CONTAINERS = {
    "tuple": (HALF, "x", 1),
    "list": [HALF, None],
    "named tuple": Pair(HALF, 3),
    "old named tuple": OldPair(HALF, 3),
    "tuple subclass": Point(HALF, 3),
    "list subclass": Tagged([HALF, 3]),
    "struct sequence": torch.max(torch.ones(2, 2, dtype=torch.float16), 0),
    "dict": {"b": HALF, "a": 1},
    "OrderedDict": OrderedDict(b=HALF, a=1),
    "defaultdict": defaultdict(list, b=HALF),
    "UserDict": UserDict(b=HALF),
    "frozen dataclass": Frozen(HALF, ["a"]),
    "slotted dataclass": Slotted(HALF, FULL),
    "dataclass with an unset field": Late(HALF),
    "model output": ModelOutput(HALF, FULL),
    "namespace": Namespace(loss=HALF, logits=FULL),
    "dict with attributes": Both(loss=HALF, logits=FULL),
    "packed sequence": pack_padded_sequence(torch.ones(2, 2, 1, dtype=torch.float16), torch.tensor([2, 1])),
    "distribution": Normal(HALF, HALF),
    "nested distribution": Independent(Normal(HALF, HALF), 1),
    "nested": [{"a": (Pair(HALF, [FULL]),)}, Frozen(HALF, [])],
}


@pytest.mark.parametrize("value", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_a_container_comes_back_as_its_class_with_changed_tensors_and_the_original_untouched(value):
    before = list(tensors(value))
    changed = map_tensors(value, widen)
    assert type(changed) is type(value)
    assert changed is not value
    assert {t.dtype for t in tensors(changed) if t.is_floating_point()} == {torch.float32}
    assert all(now is then for now, then in zip(tensors(value), before, strict=True))


@pytest.mark.parametrize("value", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_where_no_tensor_changes_the_very_same_object_comes_back(value):
    assert map_tensors(value, lambda tensor: tensor) is value


def test_keys_order_attributes_and_defaults_are_kept():
    assert list(map_tensors(OrderedDict(b=HALF, a=1), widen)) == ["b", "a"]
    factory = map_tensors(defaultdict(list, b=HALF), widen)
    assert factory["missing"] == []
    tagged = Tagged([HALF])
    tagged.tag = "mine"
    assert map_tensors(tagged, widen).tag == "mine"


@pytest.mark.parametrize("kind", [ModelOutput, Namespace, Both])
def test_a_model_output_agrees_with_itself_afterwards(kind):
    value = kind(loss=HALF, logits=FULL)
    changed = map_tensors(value, widen)
    assert value.loss is value["loss"] is HALF
    assert changed["loss"] is changed.loss
    assert changed.loss.dtype is torch.float32
    assert changed.logits is FULL
    assert list(changed) == ["loss", "logits"]
    if kind is Namespace:
        changed.extra = 1
        assert changed["extra"] == 1
        assert "extra" not in value


def test_a_distribution_samples_in_the_new_type():
    logits = torch.zeros(3, dtype=torch.float16)
    assert map_tensors(Normal(HALF, HALF), widen).rsample().dtype is torch.float32
    assert map_tensors(Categorical(logits=logits), widen).log_prob(torch.tensor(1)).dtype is torch.float32


def test_what_occurs_twice_stays_one_object():
    shared = [HALF]
    first, second, third = map_tensors((shared, shared, HALF), widen)
    assert first is second
    assert first[0] is third


def test_a_structure_that_contains_itself_is_entered_once():
    loop: list[Any] = [HALF]
    loop.append(loop)
    changed = map_tensors(loop, widen)
    assert changed[0].dtype is torch.float32
    assert sum(1 for _ in tensors(loop)) == 1


def test_what_cannot_be_rebuilt_is_left_alone():
    generator = (t for t in [HALF])
    proxy = MappingProxyType({"a": HALF})
    unknown = type("Unknown", (), {"tensor": HALF})()
    for value in (generator, proxy, unknown, "text", None, 3, Frozen, range(3), {1, 2}):
        assert map_tensors(value, widen) is value
    assert next(generator) is HALF  # not consumed


def test_tensors_come_in_the_order_of_the_script():
    a, b, c = (torch.tensor(float(i)) for i in range(3))
    assert [t.item() for t in tensors({"x": [a, (b,)], "y": c})] == [0, 1, 2]


def test_modules_are_found_once_parents_first_holes_skipped():
    shared = nn.Linear(1, 1)
    root = nn.Sequential(nn.Sequential(shared), shared)
    root.hole = None
    root.register_module("empty", None)
    found = modules_of(root)
    assert found[0] is root
    assert set(found) == set(root.modules())
    assert len(found) == 3
