"""Other tensors in the places of a module tree's parameters, for a while."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["Place", "Placement", "in_transform", "traced"]

Make: TypeAlias = Callable[[Tensor], Tensor]


def in_transform() -> bool:
    """Whether `vmap`, `grad` or another transform of `torch.func` is at work here: what is computed belongs to it."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class Place(NamedTuple):
    """A parameter, and where a module has it. Does not keep the module alive."""

    module: weakref.ref[nn.Module]
    parameters: dict[str, nn.Parameter | None]
    name: str
    own: Tensor


class Placement:
    """Stand-ins for parameters: made when first placed, one for each parameter however many places it has.

    What the script does to a stand-in is not lost: numbers that it writes reach the parameter, and a parameter that it
    assigns keeps its place. A stand-in that is placed again is made anew if its parameter has changed meanwhile.
    """

    def __init__(self, places: Iterable[tuple[nn.Module, str, Tensor]], make: Make) -> None:
        self._make = make
        self._stand_ins: dict[int, _StandIn] = {}
        self._places: list[tuple[Place, _StandIn]] = []
        self._taken: list[
            tuple[Place, _StandIn]
        ] = []  # those that were free: another placement may hold some
        # tensors of inference mode have no version, those of a transform of `torch.func` no address
        stateless = torch.is_inference_mode_enabled() or in_transform()
        for module, name, own in places:
            stand_in = self._stand_ins.get(id(own))
            if stand_in is None:
                stand_in = self._stand_ins[id(own)] = _StandIn(own, stateless=stateless)
            self._places.append((Place(weakref.ref(module), module._parameters, name, own), stand_in))

    def place(self) -> None:
        """Put the stand-ins where their parameters are."""
        for stand_in in self._stand_ins.values():
            stand_in.refresh(self._make)
        for place, stand_in in self._places:
            if place.parameters.get(place.name) is place.own:
                place.parameters[place.name] = stand_in.tensor  # type: ignore[assignment]
                self._taken.append((place, stand_in))

    def withdraw(self, *, compare: bool = False) -> list[Place]:
        """Put the parameters back, and return the places of those that the script changed meanwhile.

        Args:
            compare: Whether to look at the numbers as well: writes through `.data` leave no trace.
        """
        edited = []
        for place, stand_in in self._taken:
            present = place.parameters.get(place.name)
            if present is stand_in.tensor:
                place.parameters[place.name] = place.own  # type: ignore[assignment]
            elif isinstance(present, nn.Parameter) and present.dtype is stand_in.tensor.dtype:
                # made of stand-ins by the script, whose parameter had another type here
                present.data = present.data.to(place.own.dtype)
                edited.append(place)
        self._taken.clear()
        written = {id(s.own) for s in self._stand_ins.values() if s.is_written(self._make, compare=compare)}
        if written:
            edited += [place for place, _ in self._places if id(place.own) in written]
            for key in written:
                self._stand_ins[key].write_back(self._make)
        return edited

    def clear(self) -> None:
        """Forget everything; what is placed stays where it is."""
        for held in (self._places, self._taken, self._stand_ins):
            held.clear()


@contextmanager
def traced(places: Iterable[tuple[nn.Module, str, Tensor]], make: Make) -> Iterator[None]:
    """Stand-ins as `torch.compile` can trace them; it lets no forward pass write or reassign parameters anyway."""
    held = list(places)
    made: dict[int, Tensor] = {}
    for module, name, own in held:
        if id(own) not in made:
            made[id(own)] = make(own)
        module._parameters[name] = made[id(own)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, name, own in held:
            module._parameters[name] = own  # type: ignore[assignment]


class _StandIn:
    """One parameter's stand-in. A write shows in the version counter, an assignment to `.data` in the address."""

    __slots__ = ("_made_from", "_made_with", "_tracked", "own", "tensor")

    def __init__(self, own: Tensor, *, stateless: bool) -> None:
        self.own = self.tensor = own
        self._made_from = self._made_with = (-1, 0)
        # what functional_call, transforms of torch.func or distributed wrappers put there has no state of its own
        self._tracked = type(own) is nn.Parameter and not stateless and not own.is_inference()

    def refresh(self, make: Make) -> None:
        own = self.own
        if not self._tracked:
            if self.tensor is own:
                self.tensor = make(own)
        elif self._made_from != (state := (own._version, own.data_ptr())):
            self.tensor = tensor = make(own)
            self._made_from = state
            self._made_with = tensor._version, tensor.data_ptr()

    def is_written(self, make: Make, *, compare: bool) -> bool:
        if not self._tracked:
            return False
        tensor = self.tensor
        if self._made_with != (tensor._version, tensor.data_ptr()):
            return True
        if not compare:
            return False
        with torch.no_grad():
            return bool(_different(make(self.own), tensor).any())

    def write_back(self, make: Make) -> None:
        own, tensor = self.own, self.tensor
        with torch.no_grad():
            if own.shape == tensor.shape:
                # elsewhere the bits are kept that the stand-in lacks
                own.copy_(torch.where(_different(make(own), tensor), tensor.to(own.dtype), own))
            else:
                own.data = tensor.detach().to(own.dtype)
        self._made_from = own._version, own.data_ptr()
        self._made_with = tensor._version, tensor.data_ptr()


def _different(a: Tensor, b: Tensor) -> Tensor:
    return (a != b) & ~(a.isnan() & b.isnan())
