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
# Where a module has a parameter: its parameters, the name, and itself, not to be kept alive. One is made for each
# parameter in each call, and anything but a tuple takes ten times as long.
Place: TypeAlias = tuple[dict[str, "nn.Parameter | None"], str, "weakref.ref[nn.Module]"]
NEVER = (-1, 0)  # version and address


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
        # those that were free when placed: another placement may hold some
        self._taken: list[tuple[Place, _StandIn]] = []
        stand_ins = self._stand_ins
        for module, name, own in places:
            stand_in = stand_ins.get(id(own))
            if stand_in is None:
                stand_in = stand_ins[id(own)] = _StandIn(own, stateless=stateless)
            stand_in.places.append((module._parameters, name, weakref.ref(module)))

    def place(self) -> None:
        """Put the stand-ins where their parameters are."""
        make, taken = self._make, self._taken
        for stand_in in self._stand_ins.values():
            own, tensor = stand_in.own, stand_in.refreshed(make)
            for place in stand_in.places:
                parameters, name, _ = place
                if parameters.get(name) is own:
                    parameters[name] = tensor  # type: ignore[assignment]
                    taken.append((place, stand_in))

    def withdraw(self, *, compare: bool = False) -> list[Place]:
        """Put the parameters back, and return the places of those that the script changed meanwhile.

        Args:
            compare: Whether to look at the numbers as well: writes through `.data` leave no trace.
        """
        edited = []
        for place, stand_in in self._taken:
            parameters, name, _ = place
            present = parameters.get(name)
            if present is stand_in.tensor:
                parameters[name] = stand_in.own  # type: ignore[assignment]
            elif isinstance(present, nn.Parameter) and present.dtype is stand_in.tensor.dtype:
                # made of stand-ins by the script, whose parameter had another type here
                present.data = present.data.to(stand_in.own.dtype)
                edited.append(place)
        self._taken.clear()
        make = self._make
        for stand_in in self._stand_ins.values():
            if stand_in.is_written(make, compare=compare):
                edited += stand_in.places
                stand_in.write_back(make)
        return edited

    def clear(self) -> None:
        """Forget everything; what is placed stays where it is."""
        self._taken.clear()
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


class _StandIn:
    """One parameter's stand-in. A write shows in the version counter, an assignment to `.data` in the address."""

    __slots__ = ("_made_from", "_made_with", "_tracked", "own", "places", "tensor")

    def __init__(self, own: Tensor, *, stateless: bool) -> None:
        self.own = self.tensor = own
        self.places: list[Place] = []
        self._made_from = self._made_with = NEVER
        # what functional_call, transforms of torch.func or distributed wrappers put there has no state of its own
        self._tracked = type(own) is nn.Parameter and not stateless and not own.is_inference()

    def refreshed(self, make: Make) -> Tensor:
        """Return the stand-in of the parameter as it is now."""
        own = self.own
        if not self._tracked:
            if self.tensor is own:
                self.tensor = make(own)
        elif self._made_from != (state := (own._version, own.data_ptr())):
            self.tensor = tensor = make(own)
            self._made_from = state
            self._made_with = tensor._version, tensor.data_ptr()
        return self.tensor

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
