"""Other tensors in the places of a module tree's parameters, for a while."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["Place", "Placement", "in_transform", "traced"]

Make: TypeAlias = Callable[[Tensor], Tensor]


def in_transform() -> bool:
    """Whether `vmap`, `grad` or another transform of `torch.func` is at work here: what is computed belongs to it."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class Placement:
    """Stand-ins for parameters: made when first placed, one for each parameter however many places it has.

    What the script does to a stand-in is not lost: numbers that it writes reach the parameter, and a parameter that it
    assigns keeps its place. A stand-in that is placed again is made anew if its parameter has changed meanwhile.
    """

    def __init__(self, places: Iterable[tuple[nn.Module, str, Tensor]], make: Make) -> None:
        self._make = make
        # tensors of inference mode have no version, those of a transform of `torch.func` no address
        stateless = torch.is_inference_mode_enabled() or in_transform()
        self._stand_ins: dict[int, _StandIn] = {}
        self._places: list[Place] = []
        stand_ins, held = self._stand_ins, self._places
        for module, name, own in places:
            stand_in = stand_ins.get(id(own))
            if stand_in is None:
                stand_in = stand_ins[id(own)] = _StandIn(own, stateless=stateless)
            held.append(Place(module, name, stand_in))

    def place(self) -> None:
        """Put the stand-ins where their parameters are."""
        make = self._make
        for stand_in in self._stand_ins.values():
            stand_in.refresh(make)
        for place in self._places:
            parameters, name, stand_in = place.parameters, place.name, place.stand_in
            if parameters.get(name) is stand_in.own:
                parameters[name] = stand_in.tensor  # type: ignore[assignment]
                place.taken = True

    def withdraw(self, *, compare: bool = False) -> list[Place]:
        """Put the parameters back, and return the places of those that the script changed meanwhile.

        Args:
            compare: Whether to look at the numbers as well: writes through `.data` leave no trace.
        """
        edited = []
        for place in self._places:
            if place.taken:
                place.taken = False
                parameters, name, stand_in = place.parameters, place.name, place.stand_in
                present = parameters.get(name)
                if present is stand_in.tensor:
                    parameters[name] = stand_in.own  # type: ignore[assignment]
                elif isinstance(present, nn.Parameter) and present.dtype is stand_in.tensor.dtype:
                    # made of stand-ins by the script, whose parameter had another type here
                    present.data = present.data.to(stand_in.own.dtype)
                    edited.append(place)
        make = self._make
        written = [one for one in self._stand_ins.values() if one.is_written(make, compare=compare)]
        for stand_in in written:
            edited += [place for place in self._places if place.stand_in is stand_in]
            stand_in.write_back(make)
        return edited

    def own_of(self, tensor: Tensor) -> Tensor | None:
        """Return the parameter for which a tensor stands in, if it is one of these."""
        stand_ins = list(self._stand_ins.values())  # the thread that placed them may forget them meanwhile
        return next((one.own for one in stand_ins if one.tensor is tensor), None)

    def clear(self) -> None:
        """Forget everything; what is placed stays where it is."""
        self._places.clear()
        self._stand_ins.clear()


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


class Place:
    """Where a module has a parameter. Does not keep the module alive.

    Attributes:
        parameters: The module's.
        name: The parameter's among them.
        module: Returns the module, while it lives.
        stand_in: Of the parameter.
        taken: Whether the stand-in is there: another placement may have been first.
    """

    __slots__ = ("module", "name", "parameters", "stand_in", "taken")

    def __init__(self, module: nn.Module, name: str, stand_in: _StandIn) -> None:
        self.parameters, self.name, self.module = module._parameters, name, weakref.ref(module)
        self.stand_in = stand_in
        self.taken = False


class _StandIn:
    """One parameter's stand-in. A write shows in the version counter, an assignment to `.data` in the address."""

    # versions and addresses one by one: a pair of them would be one more object for the collector of garbage
    __slots__ = ("_address", "_own_address", "_own_version", "_tracked", "_version", "own", "tensor")

    def __init__(self, own: Tensor, *, stateless: bool) -> None:
        self.own = self.tensor = own
        self._own_version = self._version = -1
        self._own_address = self._address = 0
        # what functional_call, transforms of torch.func or distributed wrappers put there has no state of its own
        self._tracked = type(own) is nn.Parameter and not stateless and not own.is_inference()

    def refresh(self, make: Make) -> None:
        """Make the stand-in if there is none, or the parameter has changed."""
        own = self.own
        if not self._tracked:
            if self.tensor is own:
                self.tensor = make(own)
        elif self._own_version != own._version or self._own_address != own.data_ptr():
            self.tensor = make(own)
            self._note()

    def _note(self) -> None:
        own, tensor = self.own, self.tensor
        self._own_version, self._own_address = own._version, own.data_ptr()
        self._version, self._address = tensor._version, tensor.data_ptr()

    def is_written(self, make: Make, *, compare: bool) -> bool:
        if not self._tracked:
            return False
        tensor = self.tensor
        if self._version != tensor._version or self._address != tensor.data_ptr():
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
        self._note()


def _different(a: Tensor, b: Tensor) -> Tensor:
    return (a != b) & ~(a.isnan() & b.isnan())
