"""Gradients of `DistributedDataParallel` reduced in a half type: half the bytes between the ranks.

Through torch's own interface, a communication hook. A bucket is divided by the number of ranks before it is cast: so no
sum leaves the range of the type that each part of it fits into. What comes back goes into the FP32 bucket. Gradients
are multiplied by the loss scale while they are reduced; what is infinite after the cast is so in the sum that every
rank receives, and the ranks judge it as any other overflow (`ranks`).

DDP takes one hook, and the script's own wins. Ours is registered with the first pass that may need it, when the script
has had its say, and not where DDP keeps hooks for pickling: a saved model must load without mpx.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from mpx.engine.devices import HALF
from mpx.errors import MpxError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
    from torch.futures import Future
    from torch.nn.parallel import DistributedDataParallel as Replica

    from mpx.engine.kernels import Report

__all__ = ["Reduction", "ReductionError"]


class ReductionError(MpxError):
    """Gradients would be averaged over the wrong number of ranks: raised into the script."""

    exit_code = 1


class Reduction:
    """The hooks of a process, and how many bytes went through them."""

    def __init__(self, dtype: str | None, *, applies: Callable[[], bool], report: Report) -> None:
        """Make the service.

        Args:
            dtype: `ddp.comm_dtype` of the preset.
            applies: Tells whether the level is in force; where it is not, DDP reduces as it does by itself.
            report: Tells substitutions.
        """
        self._name, self._dtype = dtype, HALF[dtype] if dtype else None
        self._applies, self._report = applies, report
        self._seen: weakref.WeakKeyDictionary[Replica, _Hook | None] = weakref.WeakKeyDictionary()
        self._buckets = self._bytes = self._full_bytes = 0

    def wrap_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the `DistributedDataParallel.forward` of the session: it sees to the hook."""
        if self._dtype is None:
            return original

        @wraps(original)
        def forward(replica: Replica, *inputs: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                self._see(replica)
            return original(replica, *inputs, **kwargs)

        return forward

    def wrap_register_comm_hook(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return the `DistributedDataParallel.register_comm_hook` of the session.

        Where ours is there already, torch would refuse the script's: ours calls it instead.
        """

        @wraps(original)
        def register_comm_hook(replica: Replica, state: object, hook: Callable[..., Any]) -> None:
            ours = self._seen.get(replica)
            if ours is None or ours.theirs is not None:
                original(replica, state, hook)
                return
            replica._check_comm_hook(hook)
            ours.theirs = lambda bucket: hook(state, bucket)
            self._give_way(f"`{hook.__qualname__}`")

        return register_comm_hook

    def snapshot(self) -> dict[str, Any]:
        """Return the record's `communication`."""
        if not self._buckets:
            return {"communication": None}
        counted = {"buckets": self._buckets, "bytes": self._bytes, "full_bytes": self._full_bytes}
        return {"communication": {"dtype": self._name, **counted}}

    def reduce(self, bucket: GradBucket, group: Any) -> Future[Tensor]:
        """Average a bucket over the ranks, in place, and return it to come."""
        buffer = bucket.buffer().div_(group.size())
        sent = buffer
        if self._applies():
            if buffer.dtype is torch.float32:
                sent = buffer.to(self._dtype)
            self._buckets += 1
            self._bytes += sent.nbytes
            self._full_bytes += buffer.nbytes
        work = distributed.all_reduce(sent, group=group, async_op=True)
        reduced: Future[Tensor] = work.get_future().then(
            lambda done: buffer if sent is buffer else buffer.copy_(done.value()[0])
        )
        return reduced

    def _see(self, replica: Replica) -> None:
        divides = replica._join_config.enable and not replica._divide_by_initial_world_size
        if replica not in self._seen:
            if not self._applies():
                return
            self._seen[replica] = self._hook(replica, divides=divides)
        ours = self._seen[replica]
        if divides and ours is not None and ours.theirs is None:
            raise ReductionError(
                "`join(divide_by_initial_world_size=False)` averages over the ranks that still have data, and "
                "`ddp.comm_dtype` over all, as it has done for this model before",
                hint="`--set ddp.comm_dtype=null` lets DDP reduce in FP32",
            )

    def _hook(self, replica: Replica, *, divides: bool) -> _Hook | None:
        """Register ours, if nothing speaks against it."""
        other = replica._get_ddp_logging_data().get("comm_hook")
        if other:
            self._give_way(f"`{other}`")
        elif replica._use_python_reducer:
            self._give_way("compiled autograd")
        elif divides:
            self._give_way("`join(divide_by_initial_world_size=False)`")
        else:
            hook = _Hook(weakref.ref(self), weakref.ref(replica))
            distributed._register_comm_hook(replica.reducer, hook, _reduce)  # type: ignore[attr-defined]
            return hook
        return None

    def _give_way(self, whose: str) -> None:
        self._report(
            f"ddp-hook:{whose}",
            f"gradients of DDP are reduced as {whose} does it, and not in {self._name}: DDP takes one hook",
        )


@dataclass
class _Hook:
    """Ours on one replica; `theirs` is the script's, from when it has registered one."""

    reduction: weakref.ref[Reduction]
    replica: weakref.ref[Replica]
    theirs: Callable[[GradBucket], Future[Tensor]] | None = None


def _reduce(hook: _Hook, bucket: GradBucket) -> Future[Tensor]:
    if hook.theirs is not None:
        return hook.theirs(bucket)
    reduction, replica = hook.reduction(), hook.replica()
    if reduction is None or replica is None:
        raise ReductionError("gradients were reduced for a model or a session that is no more")
    return reduction.reduce(bucket, replica.process_group)
