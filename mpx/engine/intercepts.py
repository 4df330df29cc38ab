"""THE table of everything of torch that a session replaces, and the one place that does it.

Each row names an attribute and what stands in its place, built from the attribute's own value. Rows are installed in
order and undone in reverse, also when installing fails half way. Nothing else in mpx assigns to a name of torch; op
rules live on the dispatcher (`oprules`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from mpx.engine import launcher, leaving, owned, sharding
from mpx.engine.stepping import OURS, wrap_zero_grad, wrapped_classes
from mpx.values import frozen

if TYPE_CHECKING:
    from mpx.engine.session import Session

__all__ = ["TABLE", "Intercept", "Intercepts"]


@frozen
class Intercept:
    """One attribute of torch.

    Attributes:
        module: Where it lives, as imported.
        path: Dotted path to the attribute below that module.
        build: Session and present value to the value that stands there during the session.
        late: Wait until the module is imported by someone else: importing it would cost the script time.
    """

    module: str
    path: str
    build: Callable[[Session, Any], Any]
    late: bool = False


SAVED_HOOKS = ("torch.autograd.graph", "saved_tensors_hooks")
SCALER = ("torch.amp.grad_scaler", "GradScaler")
SHARDED_SCALER = ("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler")


def _scaler(name: str, where: tuple[str, str] = SCALER) -> Intercept:
    module, kind = where
    return Intercept(
        module,
        f"{kind}.{name}",
        lambda session, original: session.script_amp.scaler_methods[name](original),
        late=where is not SCALER,
    )


def _add_param_group(session: Session, original: Callable[..., None]) -> Callable[..., None]:
    add = session.without_compiler.wrap_disabled(original)

    def add_param_group(optimizer: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        add(optimizer, param_group)
        session.saw_group(optimizer)

    add_param_group.__doc__ = original.__doc__
    return add_param_group


def _replicate(session: Session, original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def __init__(replica: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        session.handing_over(module)
        original(replica, module, *args, **kwargs)

    return __init__


OPTIMIZER = "torch.optim.optimizer"
TABLE: tuple[Intercept, ...] = (
    Intercept("torch.nn.modules.module", "Module.__call__", lambda s, original: s.region.wrap_call(original)),
    Intercept("torch.autograd", "backward", lambda s, original: s.backward.wrap_backward(original)),
    Intercept("torch.autograd", "grad", lambda s, original: s.backward.wrap_grad(original)),
    Intercept(
        "torch._tensor", "Tensor.register_hook", lambda s, original: s.hooks.wrap_register_hook(original)
    ),
    Intercept(
        "torch._tensor",
        "Tensor.register_post_accumulate_grad_hook",
        lambda s, original: s.hooks.wrap_register_post_accumulate_grad_hook(original),
    ),
    *(
        Intercept(
            "torch.nn.modules.module",
            f"Module.{name}",
            lambda s, original: s.hooks.wrap_module_hook(original),
        )
        for name in (
            "register_full_backward_hook",
            "register_full_backward_pre_hook",
            "register_backward_hook",
        )
    ),
    *(
        Intercept(
            "torch.nn.modules.module",
            f"Module.{name}",
            lambda s, original: s.hooks.wrap_forward_hook(original),
        )
        for name in ("register_forward_hook", "register_forward_pre_hook")
    ),
    *(
        Intercept(
            "torch.nn.modules.module",
            f"Module.{name}",
            lambda s, original: owned.wrap_state_dict(original, s.working),
        )
        for name in ("state_dict", "load_state_dict")
    ),
    *(
        Intercept(module, path, lambda s, original: owned.wrap_copying(original, s.working))
        for module, path in (
            ("torch._tensor", "Tensor.__deepcopy__"),
            ("torch._tensor", "Tensor.__reduce_ex__"),
            ("torch.nn.parameter", "Parameter.__deepcopy__"),
            ("torch.nn.parameter", "Parameter.__reduce_ex__"),
        )
    ),
    Intercept("torch._tensor", "Tensor.retain_grad", lambda s, original: s.leaves.wrap_retain_grad(original)),
    *(
        Intercept(
            module, name, lambda s, original: leaving.wrap_total_norm(original, s.stepping.will_skip, s.tell)
        )
        for module, name in (
            ("torch.nn.utils.clip_grad", "_get_total_norm"),
            ("torch.nn.utils", "get_total_norm"),
        )
    ),
    Intercept(
        "torch._tensor",
        "Tensor.numpy",
        lambda s, original: leaving.wrap_numpy(original, s.region.casts_to, s.tell),
    ),
    # the tracer compares its graph, which is the script's own, with the model: in FP32 both
    Intercept("torch.jit._trace", "_check_trace", lambda s, original: s.region.wrap_refused(original)),
    Intercept(
        "torch.autograd.function", "Function.apply", lambda s, original: s.functions.wrap_apply(original)
    ),
    Intercept(
        SAVED_HOOKS[0], f"{SAVED_HOOKS[1]}.__enter__", lambda s, original: s.reruns.wrap_enter(original)
    ),
    Intercept(SAVED_HOOKS[0], f"{SAVED_HOOKS[1]}.__exit__", lambda s, original: s.reruns.wrap_exit(original)),
    Intercept(
        OPTIMIZER,
        "Optimizer.profile_hook_step",
        lambda s, original: s.stepping.wrap_profile_hook_step(original),
    ),
    Intercept(
        OPTIMIZER,
        "Optimizer.zero_grad",
        lambda s, original: wrap_zero_grad(s.without_compiler.wrap_disabled(original)),
    ),
    Intercept(OPTIMIZER, "Optimizer.add_param_group", _add_param_group),
    Intercept(
        OPTIMIZER,
        "Optimizer.state_dict",
        lambda s, original: s.checkpoints.wrap_state_dict(s.without_compiler.wrap_disabled(original)),
    ),
    Intercept(
        OPTIMIZER,
        "Optimizer.load_state_dict",
        lambda s, original: s.checkpoints.wrap_load_state_dict(s.without_compiler.wrap_disabled(original)),
    ),
    Intercept(
        "torch.amp.autocast_mode",
        "autocast.__init__",
        lambda s, original: s.script_amp.wrap_autocast_init(original),
    ),
    Intercept(
        "torch.amp.autocast_mode",
        "autocast.__enter__",
        lambda s, original: s.script_amp.wrap_autocast_enter(original),
    ),
    Intercept(
        "torch.amp.autocast_mode",
        "autocast.__exit__",
        lambda s, original: s.script_amp.wrap_autocast_exit(original),
    ),
    Intercept(
        "torch.amp.grad_scaler",
        "GradScaler.__init__",
        lambda s, original: s.script_amp.wrap_scaler_init(original),
    ),
    Intercept("torch.nn.parallel.distributed", "DistributedDataParallel.__init__", _replicate),
    Intercept(
        "torch.nn.parallel.distributed",
        "DistributedDataParallel.forward",
        lambda s, original: s.reduction.wrap_forward(s.ranks.wrap_forward(original)),
    ),
    Intercept(
        "torch.nn.parallel.distributed",
        "DistributedDataParallel.register_comm_hook",
        lambda s, original: s.reduction.wrap_register_comm_hook(original),
    ),
    Intercept(
        "torch.nn.parallel.distributed",
        "DistributedDataParallel._sync_final_model",
        lambda s, original: s.ranks.wrap_sync_final_model(original),
    ),
    Intercept(
        "torch.distributed.fsdp",
        "fully_shard",
        lambda s, original: sharding.wrap_fully_shard(
            original, s.policy, before=s.handing_over, sharded=s.sharded, report=s.tell
        ),
        late=True,
    ),
    *(
        Intercept(
            "torch.distributed.pipelining.schedules",
            f"{kind}.step",
            lambda s, original: s.pipelines.wrap_step(original),
            late=True,
        )
        for kind in ("PipelineScheduleSingle", "PipelineScheduleMulti")
    ),
    Intercept(
        "torch.distributed.elastic.multiprocessing.api",
        "PContext.wait",
        lambda s, original: launcher.wrap_wait(original, s.emit),
        late=True,
    ),
    *(
        _scaler(name)
        for name in ("scale", "unscale_", "step", "update", "get_scale", "state_dict", "load_state_dict")
    ),
    *(
        _scaler(name, SHARDED_SCALER) for name in ("scale", "unscale_", "update")
    ),  # FSDP's has these of its own
    # dynamo takes the `Module.__call__` it finds for the unpatched one and skips it; shown the original, it traces ours
    Intercept(
        "torch._dynamo.utils",
        "unpatched_nn_module_call",
        lambda s, original: torch.nn.Module._wrapped_call_impl,
        late=True,
    ),
    # a compiled FP32 region must not get half backward matmuls (pytorch issue 179804)
    Intercept("torch._functorch.config", "backward_pass_autocast", lambda s, original: "off", late=True),
)


class Intercepts:
    """Installs the table for one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Replace every attribute of the table, and the `step` of optimizer classes that torch has wrapped before."""
        for row in TABLE:
            if row.late and row.module not in sys.modules:
                self._wait_for(row)
            else:
                self._replace(row)
        for kind in wrapped_classes(torch.optim.Optimizer):
            inner = kind.__dict__["step"]
            setattr(kind, "step", self._session.stepping.wrap_step(inner))  # noqa: B010 - a class attribute for mypy
            self._undo.append(lambda kind=kind, inner=inner: setattr(kind, "step", inner))  # type: ignore[misc]

    def remove(self) -> None:
        """Undo everything in reverse; also the classes that were wrapped during the session."""
        while self._undo:
            self._undo.pop()()
        for kind in wrapped_classes(torch.optim.Optimizer):
            inner = getattr(kind.__dict__["step"], OURS, None)
            if inner is not None:
                inner.hooked = True
                setattr(kind, "step", inner)  # noqa: B010

    def _replace(self, row: Intercept) -> None:
        owner: Any = import_module(row.module)
        *path, name = row.path.split(".")
        for part in path:
            owner = getattr(owner, part)
        present = getattr(owner, name)
        own = dict(vars(owner))  # the descriptors themselves: a staticmethod must come back as one
        setattr(owner, name, row.build(self._session, present))
        if isinstance(owner, type) and name not in own:  # a base class has it
            self._undo.append(lambda: delattr(owner, name))
        else:
            self._undo.append(lambda: setattr(owner, name, own.get(name, present)))

    def _wait_for(self, row: Intercept) -> None:
        finder = AfterImport(row.module, lambda: self._replace(row))
        sys.meta_path.insert(0, finder)
        self._undo.append(finder.remove)


class AfterImport:
    """A meta path finder that calls back once a module's body has run."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then
        self._asks = False  # the finders behind it, which may ask the whole meta path again

    def remove(self) -> None:
        """Stop waiting."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find nothing but the awaited module, by asking the finders behind this one."""
        if name != self._name or self._asks:
            return None
        self._asks = True
        try:
            others = (finder for finder in list(sys.meta_path) if finder is not self)
            found = (finder.find_spec(name, path, target) for finder in others)
            spec = next((one for one in found if one is not None), None)
        finally:
            self._asks = False
        if spec is not None and spec.loader is not None:
            execute, loader = spec.loader.exec_module, spec.loader

            def exec_module(module: Any) -> None:
                vars(loader).pop("exec_module", None)  # gone where several rows wait for one module
                self.remove()
                execute(module)
                self._then()

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
