"""Ranks that share gradients come to one verdict: they skip the same steps, and their scales move together.

Under DDP nothing is sent for it while gradients are finite: what it reduces is the same on every rank, an infinity too.
Only when such a gradient is not finite do the ranks ask each other, once, whether a loss was to blame: then the scale
has no part in it. Every rank of the group sees that gradient, so all of them ask, and nobody waits for one that does
not. Of sharded gradients (FSDP2, DTensor) each rank sees a part: two flags are reduced in each pass that changes them.
Gradients that no pass of this moment has changed are left out, as another rank may have forgotten them already.

What one rank alone knows must not move its scale. It is put into the next gradients that are shared, as a NaN (a veto):
an overflow in an accumulation window (`no_sync`), where its infinity would have travelled with the gradient, had the
script been shown it; and one in a leaf that is nobody else's.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from mpx.engine.structure import tensors
from mpx.monitors import Shared

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel as Replica
    from torch.optim import Optimizer

    Begun = tuple[dict[int, tuple[Replica, bool]], list[tuple[Tensor, tuple[int, int] | None]]]

__all__ = ["Ranks", "Waiting"]


@dataclass
class Waiting:
    """Passes that are judged later, with those of the other stages of a pipeline.

    Attributes:
        sites: Their call sites.
        bad: Whether a gradient was not finite.
        loss_bad: Whether a loss was not.
        replicas: What they went through.
        scaled: Whether they run with a loss scale.
    """

    sites: dict[str, None] = field(default_factory=dict)
    bad: bool = False
    loss_bad: bool = False
    replicas: dict[int, Replica] = field(default_factory=dict)
    scaled: bool = True


class Ranks:
    """The agreement of this process with the ranks that it shares gradients with."""

    def __init__(
        self,
        *,
        skips: bool,
        export_state: Callable[[], Mapping[str, Any]],
        restore_state: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Make the service.

        Args:
            skips: Whether overflowed gradients are kept from the weights at this level.
            export_state: Returns the state of all scales.
            restore_state: Takes over a state of all scales.
        """
        self._skips, self._export_state, self._restore_state = skips, export_state, restore_state
        self._syncing: weakref.WeakSet[Replica] = weakref.WeakSet()  # the next pass through it reduces
        self._sharded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._reached: dict[int, tuple[Replica, bool]] | None = None  # by the pass that runs
        self._touched: list[Tensor] = []  # sharded leaves whose gradient the pass has changed
        self._passed: dict[int, tuple[Replica, bool]] = {}  # by the one that has just ended
        self._waiting: dict[str, bool] = {}  # verdicts of the window: call site, finite
        self._window: weakref.WeakSet[Replica] = weakref.WeakSet()  # whose gradients wait to be reduced
        self._loss_bad = False  # in this window
        self._veto = self._vetoed = False
        self._later: Waiting | None = None
        self.passes = 0  # that were judged together
        # whether there may be others: without a process group nothing is shared, and nobody is to be asked
        self.exist: Callable[[], bool]
        self.exist = distributed.is_initialized if distributed.is_available() else lambda: False

    def shards(self, module: nn.Module) -> None:
        """A module's parameters are sharded by FSDP2."""
        self._sharded.add(module)

    def wrap_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the `DistributedDataParallel.forward` of the session: it notes which passes go through which one."""

        @wraps(original)
        def forward(replica: Replica, *inputs: Any, **kwargs: Any) -> Any:
            output = original(replica, *inputs, **kwargs)
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                if replica.require_backward_grad_sync:
                    self._syncing.add(replica)
                reached = _Reached(self, replica)
                for tensor in tensors(output):
                    if tensor.grad_fn is not None:
                        tensor.grad_fn.register_prehook(reached)
            return output

        return forward

    def wrap_sync_final_model(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return the `DistributedDataParallel._sync_final_model` of the session, the end of `join`.

        Ranks that had run out of data take over the scales, too, of the one whose weights they take.
        """

        @wraps(original)
        def _sync_final_model(replica: Replica, is_last_joiner: bool) -> None:  # noqa: FBT001 - torch's signature
            original(replica, is_last_joiner)
            state: list[Any] = [dict(self._export_state())]
            group = replica.process_group
            source = distributed.get_global_rank(group, replica._authoritative_rank)
            distributed.broadcast_object_list(state, src=source, group=group, device=replica.device)
            self._restore_state(state[0])

        return _sync_final_model

    def begin_pass(self, leaves: Iterable[Tensor]) -> Begun:
        """A pass begins; return what `end_pass` is to be given, however it ends."""
        reached: dict[int, tuple[Replica, bool]] = {}  # of this pass: another thread may run one as well
        self._reached, self._vetoed = reached, False
        return reached, [(leaf, _state(leaf)) for leaf in _sharded(leaves)]

    def end_pass(self, begun: Begun) -> None:
        """Note which replicas the pass went through, and which sharded gradients it changed."""
        reached, before = begun
        self._touched = [leaf for leaf, state in before if _state(leaf) != state]
        self._vetoed = self._vetoed or (self._veto and bool(self._touched))
        self._passed, self._reached = reached, None
        if reached:
            self._syncing.difference_update([one for one, syncs in reached.values() if syncs])

    @property
    def touched_shards(self) -> bool:
        """Whether the pass that ended changed gradients of which other ranks hold parts."""
        return bool(self._touched)

    def reach(self, replica: Replica) -> bool:
        """The running pass has come to the output of a replica; return whether to veto it."""
        if self._reached is None:
            return False  # `torch.autograd.grad`, which reduces nothing
        syncs = replica in self._syncing
        self._reached[id(replica)] = replica, syncs
        self._vetoed = self._vetoed or (syncs and self._veto)
        return syncs and self._veto

    @property
    def vetoed(self) -> bool:
        """Whether this rank's veto was part of the pass that ended: flags of before it are everybody's now."""
        return self._vetoed

    def together(self, flags: list[Tensor], of_losses: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return flags of the gradients and of the losses for all ranks, where gradients are sharded; else as they are.

        One collective, on the device: whoever reads the flags afterwards waits for it once.
        """
        groups = _groups_of(self._touched, [])
        if not groups:
            return flags, of_losses
        device = self._touched[0].device
        veto = torch.tensor(float(self._veto), device=device)
        both = [
            torch.stack([flag.to(device) for flag in some]).amax() for some in ([*flags, veto], of_losses)
        ]
        answer = _largest(torch.stack(both), groups)
        return [answer[0]], [answer[1]]

    def bad(self, bad: list[Tensor]) -> list[Tensor]:
        """Return the leaves with a gradient that is not finite, those included of which another rank's shard is not."""
        groups = _groups_of(self._touched, [])
        if not groups:
            return bad
        known = {id(leaf) for leaf in bad}
        flags = [float(self._veto or id(leaf) in known) for leaf in self._touched]
        own = torch.tensor(flags, device=self._touched[0].device)
        found = _largest(own, groups).tolist()
        others = [leaf for leaf in bad if not _is_sharded(leaf)]
        return others + [leaf for leaf, flag in zip(self._touched, found, strict=True) if flag]

    def agree(self, site: str, bad: list[Tensor], *, loss_finite: bool) -> Shared | None:
        """Return what the ranks together make of the pass that ended; None for one that is this process's alone.

        Args:
            site: Call site of the pass.
            bad: The leaves whose gradient is not finite.
            loss_finite: Whether this rank's own loss was; where gradients are sharded, everybody's.
        """
        reached, self._passed = self._passed, {}
        touched, self._touched = self._touched, []
        if self._later is not None:
            self.passes += 1
            self._later.sites[site] = None
            self._later.bad |= bool(bad)
            self._later.loss_bad |= not loss_finite
            self._later.replicas.update((key, replica) for key, (replica, _) in reached.items())
            return Shared(finite=None, loss_finite=loss_finite)
        if not (reached or touched or self._sharded):
            return None
        replicas = [replica for replica, syncs in reached.values() if syncs]
        self.passes += 1
        if len(replicas) < len(reached) or self._accumulates():
            self._waiting[site] = self._waiting.get(site, True) and not bad
            self._window.update(replica for replica, syncs in reached.values() if not syncs)
            self._loss_bad = self._loss_bad or not loss_finite
            self._veto = self._skips and (self._veto or bool(bad))
            return Shared(finite=None, loss_finite=loss_finite)
        if not (replicas or touched):
            return None
        self._waiting.clear()
        self._window.clear()
        self._veto = self._veto and not self._vetoed
        # that of an earlier pass of the window is in the gradients: it matters where a step is skipped for it
        loss_bad, self._loss_bad = (self._skips and self._loss_bad) or not loss_finite, False
        groups = _groups_of(bad, replicas)
        shared = {id(p) for replica in replicas for p in replica.parameters()}
        alone = [leaf for leaf in bad if id(leaf) not in shared and not _is_sharded(leaf)]
        if not groups:
            self._veto = self._skips and (self._veto or bool(alone))
            return Shared(finite=True, loss_finite=loss_finite, alone=tuple(alone))
        joining = any(replica._join_config.enable for replica in replicas)
        if self._skips and not joining:  # who has joined answers only what the reducer asks
            own = torch.tensor(float(loss_bad), device=next(leaf.device for leaf in bad))
            loss_bad = bool(_largest(own, groups).item())
        elif joining:
            return Shared(finite=False, loss_finite=True)
        return Shared(finite=None if loss_bad else False, loss_finite=not loss_bad)

    @property
    def judges_later(self) -> bool:
        """Whether the passes that run now are those of a pipeline's stage."""
        return self._later is not None

    @property
    def decide(self) -> bool:
        """Whether ranks look at a pass together: it is one of a pipeline's, or gradients are held in parts."""
        return self._later is not None or bool(self._sharded)

    @property
    def scaled(self) -> bool:
        """Whether the passes that run now may be scaled."""
        return self._later is None or self._later.scaled

    @contextmanager
    def waiting(self, *, scaled: bool) -> Iterator[Waiting]:
        """Passes inside are not judged, but noted in what is yielded."""
        self._later = Waiting(scaled=scaled)
        try:
            yield self._later
        finally:
            self._later = None

    def of_all_stages(
        self, passes: Waiting, flags: list[Tensor], stage: Any, leaves: Iterable[Tensor]
    ) -> tuple[bool, bool]:
        """Return whether any stage of a pipeline, or of one that shares gradients with it, had a bad gradient or loss.

        Args:
            passes: This rank's.
            flags: Of its gradients, after them.
            stage: One of its stages; it knows the pipeline's process group and where its tensors are.
            leaves: The parameters of its stages.
        """
        shared = _groups_of(_sharded(leaves), [])
        shared += [replica.process_group for replica in passes.replicas.values()]
        told = torch.tensor([float(passes.bad), float(passes.loss_bad)], device=stage.device)
        if flags:
            told[0] = torch.stack([*flags, told[0]]).amax()
        bad, loss_bad = _largest(told, [stage.group, *dict.fromkeys(shared)]).tolist()
        return bool(bad), bool(loss_bad)

    @property
    def accumulates(self) -> bool:
        """Whether verdicts wait for gradients to be shared."""
        return bool(self._waiting) and bool(self._window)

    def left_alone(self, optimizer: Optimizer) -> dict[str, bool]:
        """Return the verdicts of a window that ends with a step and no reduction: each rank trains for itself."""
        held = {id(p) for replica in self._window for p in replica.parameters()}
        if not any(id(p) in held for group in optimizer.param_groups for p in group["params"]):
            return {}
        self._window.clear()
        self._veto = self._loss_bad = False
        waiting, self._waiting = self._waiting, {}
        return waiting

    def _accumulates(self) -> bool:
        """Whether FSDP keeps the gradients of this pass from the other ranks."""
        return any(
            not group.reduce_grads
            for module in self._sharded
            for group in module._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator]
        )


class _Reached:
    """Hook on the output of a replica."""

    def __init__(self, ranks: Ranks, replica: Replica) -> None:
        self._ranks, self._replica = ranks, weakref.ref(replica)

    def __call__(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        replica = self._replica()
        if replica is None or not self._ranks.reach(replica):
            return None
        return tuple(None if grad is None else grad * float("nan") for grad in grads)


def _sharded(leaves: Iterable[Tensor]) -> list[Tensor]:
    tensor = sys.modules.get("torch.distributed.tensor")  # not imported: nothing can be of it
    return [] if tensor is None else [leaf for leaf in leaves if isinstance(leaf, tensor.DTensor)]


def _is_sharded(leaf: Tensor) -> bool:
    return bool(_sharded([leaf]))


def _state(leaf: Tensor) -> tuple[int, int] | None:
    """Return what changes when FSDP2 or autograd adds to a sharded gradient: both write into the shard."""
    if leaf.grad is None:
        return None
    shard = leaf.grad._local_tensor  # type: ignore[attr-defined]
    return id(shard), shard._version


def _groups_of(leaves: Iterable[Tensor], replicas: list[Replica]) -> list[Any]:
    """Return the process groups in which gradients are shared, in the order of the leaves: the same on every rank."""
    owner = {id(p): replica.process_group for replica in replicas for p in replica.parameters()}
    found: dict[Any, None] = {}
    meshes: set[Any] = set()
    for leaf in leaves:
        if not _is_sharded(leaf):
            found[owner.get(id(leaf))] = None
        elif (mesh := leaf.device_mesh) not in meshes:  # type: ignore[attr-defined]
            meshes.add(mesh)
            found.update(dict.fromkeys(mesh.get_all_groups()))
    found.pop(None, None)
    return list(found)


def _largest(flags: Tensor, groups: list[Any]) -> Tensor:
    for group in groups:
        distributed.all_reduce(flags, distributed.ReduceOp.MAX, group)
    return flags
