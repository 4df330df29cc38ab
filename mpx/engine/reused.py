"""A layer that a call uses again and again casts its weights once for some of the uses, at O1 and O2.

`torch.autocast` casts a weight once a region: after a write it is old, and gradients of all uses are added in half. To
cast at each use is right and takes time, and the backward pass keeps every copy: of a cell in a loop they were more
than all else. So layers of torch, of which nothing but their own `forward` sees a weight, keep their casts from the
second use in a call on, and of no weight for more than `MOST` uses: the sums of so many gradients are added in FP32.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CAST_AT_USE", "COMPARED_CALLS", "ReusedWeights"]

# Layers that use each weight once, in an op that casts it as it comes.
CAST_AT_USE: frozenset[type[nn.Module]] = frozenset(
    {
        nn.Linear,
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        *(nn.LSTMCell, nn.GRUCell, nn.RNNCell),
    }
)
# What may be replaced by somebody who looks at the weights: the methods that a layer's call runs, and what they call.
METHODS = ("forward", "_conv_forward")
RUN = {kind: [getattr(kind, name, None) for name in METHODS] for kind in CAST_AT_USE}
FUNCTIONS = ("linear", *(f"conv{n}d" for n in (1, 2, 3)), *(f"conv_transpose{n}d" for n in (1, 2, 3)))
CALLED = [getattr(functional, name) for name in FUNCTIONS]
# In BF16 the sum of 16 equal numbers is off by 0.7 % on average and 1.7 at most, of 64 by 2.7 and 6, of 1,000 by half.
MOST = 16
LARGE = 2**14  # numbers of a weight; to find the cast of a smaller one takes as long as to cast it
# Calls that train in which half copies are compared with their weights: writes through `.data` leave no trace.
COMPARED_CALLS = 3


class _Cast(NamedTuple):
    """A half copy of a weight; the weight is held, or another one could have its id."""

    weight: Tensor
    half: Tensor
    mark: tuple[int, int]  # version and address of the weight: a write shows in the one, a swap in the other
    uses: int


class _Here(threading.local):
    """What the outermost call of this thread has used."""

    def __init__(self, threads: set[int]) -> None:
        threads.add(threading.get_ident())
        self.open = False  # whether there is one, and weights are cast in it
        self.seen: set[int] = set()  # ids of layers
        self.casts: dict[int, _Cast] = {}  # by id of the weight
        self.compared: dict[int, bool] = {}  # by id of the layer: whether its casts are compared in this call
        # to compare them in: made anew for each use it leaves holes in the heap, between what the graph keeps
        self.rooms: dict[tuple[torch.Size, torch.device], Tensor] = {}


class ReusedWeights:
    """The casts that layers keep. As a context: the length of an outermost call."""

    def __init__(self, half: torch.dtype, *, wanted: bool) -> None:
        """Make the service.

        Args:
            half: Type of the casts.
            wanted: Whether the ops of all these layers cast to it.
        """
        self.wanted = wanted
        self._half = half
        self._cast = Tensor.half if half is torch.float16 else Tensor.bfloat16
        self._threads: set[int] = set()
        self._here = _Here(self._threads)
        self._calls: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._unseen: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # whose weights change without a trace

    def __enter__(self) -> None:
        self._here.open = self.wanted
        self._here.seen.clear()

    def __exit__(self, *error: object) -> None:
        self._here.open = False
        self.forget()

    def forget(self) -> None:
        """Cast anew what is used next: a pass or a step is to come, or the call is over."""
        here = self._here
        if here.casts:
            here.casts.clear()
            here.compared.clear()
            here.rooms.clear()

    def is_again(self, module: nn.Module) -> bool:
        """Whether this call uses a layer for the second time or more."""
        here, key = self._here, id(module)
        if key in here.seen:
            return here.open
        here.seen.add(key)
        return False

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a layer with kept casts of its large weights, if nobody can notice."""
        shadows = vars(module)
        large = [
            (name, weight)
            for name, weight in module._parameters.items()
            if weight is not None
            and weight.numel() >= LARGE
            and self._is_ours(weight)
            and name not in shadows
        ]
        if not large or not self._may_keep(module):
            return original(module, *args, **kwargs)
        closely = self._looks_closely(module)
        try:
            # an attribute hides the parameter of its name, which stays where it is
            for name, weight in large:
                shadows[name] = self._cast_of(weight, module, closely=closely)
            return original(module, *args, **kwargs)
        finally:
            for name, _ in large:
                shadows.pop(name, None)

    def _may_keep(self, module: nn.Module) -> bool:
        """Whether only torch's own `forward` runs in this call, in this thread alone, and has a graph.

        Modes of others may look at weights, or count casts (selective checkpointing does).
        """
        kind = type(module)
        return (
            torch.is_grad_enabled()
            and len(self._threads) == 1
            and [getattr(kind, name, None) for name in METHODS] == RUN[kind]
            and vars(module).keys().isdisjoint(METHODS)
            and [getattr(functional, name) for name in FUNCTIONS] == CALLED
            and not (module._forward_hooks or module._forward_pre_hooks)
            and not (modules._global_forward_hooks or modules._global_forward_pre_hooks)
            and (not torch._C._len_torch_dispatch_stack() or _are_ours(_get_current_dispatch_mode_stack()))
            and (not torch._C._len_torch_function_stack() or _are_ours(_get_current_function_mode_stack()))
            and module not in self._unseen
        )

    def _is_ours(self, weight: Tensor) -> bool:
        """Whether this is a parameter that trains, and is cast to our type: the script may have regions of its own."""
        if type(weight) is not nn.Parameter or not weight.requires_grad or weight.dtype is not torch.float32:
            return False
        device_type = weight.device.type
        return torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) is self._half

    def _cast_of(self, weight: Tensor, module: nn.Module, *, closely: bool) -> Tensor:
        casts, key = self._here.casts, id(weight)
        mark = weight._version, weight.data_ptr()
        kept = casts.get(key)
        if kept is not None and kept.mark == mark and kept.uses < MOST:
            if not closely or self._is_still(weight, kept.half):
                casts[key] = kept._replace(uses=kept.uses + 1)
                return kept.half
            self._unseen.add(module)
        half = self._cast(weight)
        casts[key] = _Cast(weight, half, mark, 1)
        return half

    @torch.no_grad()
    def _is_still(self, weight: Tensor, half: Tensor) -> bool:
        """Whether a copy holds what its weight does."""
        rooms, kind = self._here.rooms, (half.shape, half.device)
        if kind not in rooms:
            rooms[kind] = torch.empty_like(half)
        return torch.equal(rooms[kind].copy_(weight), half)

    def _looks_closely(self, module: nn.Module) -> bool:
        """Whether this is one of the first calls in which the layer is used again."""
        compared, key = self._here.compared, id(module)
        if key not in compared:
            calls = self._calls.get(module, 0)
            compared[key] = calls < COMPARED_CALLS
            self._calls[module] = calls + 1
        return compared[key]


def _are_ours(modes: list[Any]) -> bool:
    """Whether no mode is the script's; that of `torch.set_default_device` looks at nothing."""
    return all(type(mode) is DeviceContext or type(mode).__module__.startswith("mpx.") for mode in modes)
