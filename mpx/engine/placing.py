"""Other tensors in the places of a module tree's parameters, for a while."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["Placement", "in_transform", "traced"]

Make: TypeAlias = Callable[[Tensor], Tensor]
# A module's parameters, a name among them, the index of the parameter there, and the module, which is not kept alive.
Place: TypeAlias = tuple[dict[str, nn.Parameter | None], str, int, weakref.ref[nn.Module]]
# A write shows in the version of a tensor, an assignment to its `.data` in the address.
Mark: TypeAlias = tuple[int, int]


def in_transform() -> bool:
    """Whether `vmap`, `grad` or another transform of `torch.func` is at work here: what is computed belongs to it."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class Placement:
    """Stand-ins for parameters: made when first placed, one for each parameter however many places it has.

    What the script does to a stand-in is not lost: numbers that it writes reach the parameter, and a parameter that it
    assigns keeps its place. A stand-in that is placed again is made anew if its parameter has changed meanwhile.

    Attributes:
        closely: Whether to compare numbers as well: writes through `.data` leave no trace, on either side.
    """

    # lists side by side and not an object a parameter: at O2 each call goes through here for each of them
    __slots__ = (
        "_graded",
        "_make",
        "_marks",
        "_own_marks",
        "_owns",
        "_places",
        "_stand_ins",
        "_stateless",
        "_taken",
        "closely",
    )

    def __init__(
        self, places: Iterable[tuple[nn.Module, str, Tensor]], make: Make, *, closely: bool = False
    ) -> None:
        self._make, self.closely = make, closely
        self._places: list[Place] = []
        self._owns: list[Tensor] = []
        index_of: dict[int, int] = {}
        for module, name, own in places:
            index = index_of.setdefault(id(own), len(index_of))
            if index == len(self._owns):
                self._owns.append(own)
            self._places.append((module._parameters, name, index, weakref.ref(module)))
        self._taken: list[Place] = []
        self._graded = torch.is_grad_enabled()
        self._stand_ins: list[Tensor] = []
        self._own_marks: list[Mark | None] = []
        self._marks: list[Mark | None] = []
        # tensors of inference mode have no version, those of a transform of `torch.func` no address
        self._stateless = torch.is_inference_mode_enabled() or in_transform()

    def place(self) -> None:
        """Put the stand-ins where their parameters are."""
        if not self._stand_ins:
            self._make_all()
        else:  # in the middle of a call, where the script may have turned gradients off for a while
            with torch.set_grad_enabled(self._graded):
                if self.closely:
                    self._make_all()
                else:
                    self._refresh()
        owns, stand_ins, taken = self._owns, self._stand_ins, self._taken
        for place in self._places:
            parameters, name, index, _ = place
            if parameters.get(name) is owns[index]:
                parameters[name] = stand_ins[index]  # type: ignore[assignment]
                taken.append(place)

    def withdraw(self) -> list[tuple[nn.Module | None, str]]:
        """Put the parameters back, and return the module and name of each that the script changed meanwhile."""
        owns, stand_ins = self._owns, self._stand_ins
        edited = []
        for place in self._taken:
            parameters, name, index, module = place
            present = parameters.get(name)
            if present is stand_ins[index]:
                parameters[name] = owns[index]  # type: ignore[assignment]
            elif isinstance(present, nn.Parameter) and present.dtype is stand_ins[index].dtype:
                # made of stand-ins by the script, whose parameter had another type here
                present.data = present.data.to(owns[index].dtype)
                edited.append((module(), name))
        self._taken = []
        for written in self._written():
            edited += [(module(), name) for _, name, index, module in self._places if index == written]
            self._write_back(written)
        return edited

    def own_of(self, tensor: Tensor) -> Tensor | None:
        """Return the parameter for which a tensor stands in, if it is one of these."""
        # at once, as the thread that placed them may forget them meanwhile
        pairs = list(zip(self._owns, self._stand_ins, strict=False))
        return next((own for own, stand_in in pairs if stand_in is tensor), None)

    def clear(self) -> None:
        """Forget everything; what is placed stays where it is."""
        self._places, self._taken, self._owns, self._stand_ins = [], [], [], []
        self._own_marks, self._marks = [], []

    def _make_all(self) -> None:
        make = self._make
        self._stand_ins, self._own_marks, self._marks = [], [], []
        stand_ins, own_marks, marks = self._stand_ins, self._own_marks, self._marks
        for own in self._owns:
            stand_in = make(own)
            stand_ins.append(stand_in)
            # what functional_call or distributed wrappers put there has no state of its own
            if self._stateless or type(own) is not nn.Parameter or own.is_inference():
                own_marks.append(None)
                marks.append(None)
            else:
                own_marks.append((own._version, own.data_ptr()))
                marks.append((stand_in._version, stand_in.data_ptr()))

    def _refresh(self) -> None:
        own_marks, marks = self._own_marks, self._marks
        for index, own in enumerate(self._owns):
            mark = own_marks[index]
            if mark is not None and mark != (own._version, own.data_ptr()):
                self._stand_ins[index] = stand_in = self._make(own)
                own_marks[index] = (own._version, own.data_ptr())
                marks[index] = (stand_in._version, stand_in.data_ptr())

    def _written(self) -> list[int]:
        """Return which stand-ins are not what was made."""
        marks = self._marks
        written = [
            index
            for index, stand_in in enumerate(self._stand_ins)
            if (mark := marks[index]) is not None and mark != (stand_in._version, stand_in.data_ptr())
        ]
        if self.closely:
            with torch.no_grad():
                written += [
                    index
                    for index, (own, stand_in) in enumerate(zip(self._owns, self._stand_ins, strict=True))
                    if marks[index] is not None
                    and index not in written
                    and bool(_different(self._make(own), stand_in).any())
                ]
        return written

    def _write_back(self, index: int) -> None:
        own, stand_in = self._owns[index], self._stand_ins[index]
        with torch.no_grad():
            if own.shape == stand_in.shape:
                # elsewhere the bits are kept that the stand-in lacks
                own.copy_(torch.where(_different(self._make(own), stand_in), stand_in.to(own.dtype), own))
            else:
                own.data = stand_in.detach().to(own.dtype)
        self._own_marks[index] = (own._version, own.data_ptr())
        self._marks[index] = (stand_in._version, stand_in.data_ptr())


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


def _different(a: Tensor, b: Tensor) -> Tensor:
    return (a != b) & ~(a.isnan() & b.isnan())
