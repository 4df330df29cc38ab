"""Hooks of the script see true gradients while the engine works on scaled ones, and FP32 tensors inside a region."""

from __future__ import annotations

import copy
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpx.engine.gradients import is_one, non_finite_flags, read, rescale, unscale_
from mpx.engine.structure import map_tensors, tensors
from mpx.engine.widened import inner

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpx.engine.gradients import Flags
    from mpx.engine.leaves import Leaves
    from mpx.engine.region import Region
    from mpx.engine.running import Running, RunningPass

__all__ = ["Hooks"]

LOW = (torch.float16, torch.bfloat16)


class Hooks:
    """Wraps the methods by which a script registers hooks."""

    def __init__(
        self,
        running: Running,
        flags: Flags,
        leaves: Leaves,
        region: Region,
        *,
        skips: bool,
    ) -> None:
        """Make the service.

        Args:
            running: Tells the scale of the pass inside which a hook fires.
            flags: Receives the leaves that overflowed.
            leaves: Knows which of them an optimizer steps.
            region: Where forward hooks fire.
            skips: Whether overflowed gradients are kept from the weights at this level.
        """
        self.waits: bool = False  # whether the script has asked for a hook that waits for the device
        self._running, self._flags, self._leaves, self._skips = running, flags, leaves, skips
        self._region = region

    def wrap_register_hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `Tensor.register_hook`: the hook receives the true gradient, and may return another or write into it.

        For a half tensor it is given in FP32: a true gradient may be too small for the half type, and what the hook
        returns takes its place. Of a face the hook is that of the half tensor behind it.
        """

        @wraps(original)
        def register_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
            @wraps(hook)
            def true_scale(grad: Tensor) -> Tensor | None:
                now = self._running.latest
                scale = 1.0 if now is None else now.scale
                if is_one(scale) and grad.dtype not in LOW:
                    return hook(grad)
                true = _true(grad, scale)
                version = true._version
                changed = hook(true) if now is None else now.show(hook, true)
                if changed is None and true._version != version:
                    changed = true
                return None if changed is None else (changed * _beside(changed, scale)).to(grad.dtype)

            return original(inner(tensor), true_scale)

        return register_hook

    def wrap_module_hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of `nn.Module` that registers a backward hook: it receives the true gradients.

        Half ones are given in FP32, as to the hooks of tensors.
        """

        @wraps(original)
        def register(module: nn.Module, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return original(module, _TrueScale(hook, self._running), *args, **kwargs)

        return register

    def wrap_forward_hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of `nn.Module` that registers a forward hook: it is given FP32 tensors, and computes in FP32.

        What it keeps, it uses where the script is in FP32; torch's own hooks (weight norm) work on the model itself.
        """

        @wraps(original)
        def register(module: nn.Module, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if str(getattr(hook, "__module__", "")).startswith("torch."):
                return original(module, hook, *args, **kwargs)
            return original(module, _Float32Hook(hook, self._region, original.__name__), *args, **kwargs)

        return register

    def wrap_register_post_accumulate_grad_hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `Tensor.register_post_accumulate_grad_hook`: the hook finds the true gradient in `.grad`.

        It may use it up: an optimizer may step here, which needs to know of an overflow. So each hook waits for the
        device.
        """

        @wraps(original)
        def register_post_accumulate_grad_hook(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
            @wraps(hook)
            def true_scale(leaf: Tensor) -> Any:
                now = self._running.latest
                if now is None or leaf.grad is None:
                    return hook(leaf)
                true = self._make_true(leaf, leaf.grad, now)
                now.shown.append(leaf)
                try:
                    returned = now.show(hook, leaf)
                finally:
                    now.shown.pop()
                if leaf.grad is not true:
                    now.replaced.append(true)
                rescale([leaf], now.scale)
                return returned  # None, or torch says that it should be

            self.waits = True
            return original(tensor, true_scale)

        return register_post_accumulate_grad_hook

    def _make_true(self, leaf: Tensor, grad: Tensor, now: RunningPass) -> Tensor:
        if grad.requires_grad:  # by `create_graph`: its graph must not notice
            leaf.grad = grad = grad * (1.0 / now.scale)
            flags = non_finite_flags([grad])
        else:
            flags = unscale_([grad], now.scale)
        if any(read(flags)):
            now.overflowed.append(leaf)
            stepped = self._leaves.stepped() if self._skips else None
            now.zeroed |= self._flags.expose([leaf], [leaf], stepped, by_scale=True)
        return grad


def _true(grad: Tensor, scale: float | Tensor) -> Tensor:
    return (grad.float() if grad.dtype in LOW else grad) * (1.0 / _beside(grad, scale))


def _beside(grad: Tensor, scale: float | Tensor) -> float | Tensor:
    """Return a scale where a gradient is: a model may span devices."""
    return scale.to(grad.device) if isinstance(scale, Tensor) else scale


class _Instead:
    """A hook of the script's with something around it: copied with its module, pickled as the script's own."""

    def __init__(self, hook: Callable[..., Any], *around: Any) -> None:
        self._hook, self._around = hook, around

    def __deepcopy__(self, memo: dict[int, Any]) -> _Instead:
        return type(self)(copy.deepcopy(self._hook, memo), *self._around)

    def __reduce__(self) -> Any:
        return copy.copy, (self._hook,)  # which returns a function as it is


class _TrueScale(_Instead):
    """A backward hook of a module."""

    def __call__(self, module: nn.Module, *grads: Any) -> Any:
        (running,) = self._around
        now = running.latest
        scale = 1.0 if now is None else now.scale
        if is_one(scale) and not any(grad.dtype in LOW for some in grads for grad in tensors(some)):
            return self._hook(module, *grads)
        true = [map_tensors(some, lambda grad: _true(grad, scale)) for some in grads]
        changed = self._hook(module, *true) if now is None else now.show(self._hook, module, *true)
        if changed is None:
            return None
        dtypes = [None if grad is None else grad.dtype for grad in _listed(grads[0])]
        scaled = [
            grad if grad is None else (grad * _beside(grad, scale)).to(dtype)
            for grad, dtype in zip(_listed(changed), dtypes, strict=False)
        ]
        return scaled[0] if isinstance(changed, Tensor) else (*scaled, *_listed(changed)[len(scaled) :])


class _Float32Hook(_Instead):
    """A forward hook of a module, or one that comes before the forward pass."""

    def __call__(self, module: nn.Module, *values: Any) -> Any:
        region, kind = self._around
        if torch.compiler.is_compiling() or not region.is_open():
            return self._hook(module, *values)
        faces: list[tuple[Tensor, int]] = []

        def face_of(tensor: Tensor) -> Tensor:
            face: Tensor = region.widened(tensor)
            if face is not tensor and not face.is_inference():
                faces.append((face, face._version))
            return face

        shown = [map_tensors(value, face_of) for value in values]
        with region.in_float32():
            changed = self._hook(module, *shown)
        if changed is not None or all(face._version == version for face, version in faces):
            return changed
        # edited in place: the model goes on with that
        if kind == "register_forward_hook":
            return shown[-1]
        return shown[0] if len(shown) == 1 else tuple(shown)


def _listed(grads: Any) -> list[Any]:
    return [grads] if isinstance(grads, Tensor) else list(grads)
