"""The session: one process's services, bound to each other here and nowhere else."""

from __future__ import annotations

import weakref
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from mpx.engine.arrivals import Arrivals
from mpx.engine.audience import Audience, chosen_monitors
from mpx.engine.backward import Backward
from mpx.engine.budget import Budget
from mpx.engine.checkpoints import Checkpoints
from mpx.engine.deferred import Deferred
from mpx.engine.devices import DEVICES, HALF, peak_memory
from mpx.engine.doubts import Doubts
from mpx.engine.functions import ScriptFunctions
from mpx.engine.fused_updates import FusedUpdates
from mpx.engine.gradients import Flags, read
from mpx.engine.half_model import HalfModel, guard_optimizer
from mpx.engine.hooks import Hooks
from mpx.engine.intercepts import Intercepts
from mpx.engine.judge import Judge, say
from mpx.engine.leaves import Leaves
from mpx.engine.names import Names
from mpx.engine.oprules import OpRules
from mpx.engine.pipeline import Pipelines
from mpx.engine.ranks import Ranks
from mpx.engine.reduction import Reduction
from mpx.engine.region import AS_THEY_ARE, Adoption, Region
from mpx.engine.reruns import Reruns
from mpx.engine.running import Running
from mpx.engine.scales import Scales
from mpx.engine.script_amp import ScriptAmp
from mpx.engine.statistics import StatisticsGuard
from mpx.engine.stepping import Stepping
from mpx.engine.structure import modules_of
from mpx.engine.substitutions import Substitutions
from mpx.engine.watch import ForwardWatch
from mpx.engine.without_compiler import WithoutCompiler
from mpx.engine.working import ModuleRules, WorkingCopies
from mpx.monitors import Monitor, Progress, Seen, Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

    from mpx.engine.kernels import Report
    from mpx.presets.policy import Policy

__all__ = ["Session"]


class Session:
    """Everything that mpx does to torch in one process, from `install` to `close`.

    Attributes:
        current: The session that is installed, if any.
    """

    current: ClassVar[Session | None] = None

    def __init__(self, policy: Policy, emit: Callable[..., None], tick: Callable[..., None]) -> None:
        """Bind the services; torch is not touched before `install`.

        Args:
            policy: The resolved preset.
            emit: Writes one event of the record.
            tick: Called after each pass and step; writes a snapshot when one is due.
        """
        self.policy: Policy = policy
        self.emit: Callable[..., None] = emit
        self._emit = emit
        self._tick = tick
        self._casts = policy.cast_model_type != "float32"
        rules = self._rules = ModuleRules(policy)
        converts = self._casts and policy.master_weights is False
        self._half_model = HalfModel(HALF[policy.dtype], rules) if converts else None
        self._substitutions = Substitutions()
        self.reruns: Reruns = Reruns()
        self.working: WorkingCopies | None = (
            WorkingCopies(policy, rules, self.reruns, self._substitutions.tell)
            if policy.master_weights
            else None
        )
        self.leaves: Leaves = Leaves(scaled=policy.loss_scale.mode != "none")
        self._flags = Flags()
        self._names = Names(self.leaves)
        self._statistics = StatisticsGuard()

        self._arrivals = Arrivals()
        self.scales: Scales = Scales(policy.loss_scale, policy.monitors.history_points, self._arrivals)
        self.region: Region = Region(
            policy,
            rules,
            self._adoption(),
            called=self._called,
            began=self._began,
            ended=self.leaves.saw_output,
            around=lambda module: self._audience.around(module),  # noqa: PLW0108 - another one after a fork
            report=self._substitutions.tell,
        )
        self.functions: ScriptFunctions = ScriptFunctions(
            self.region,
            self.reruns,
            parameter_of=self.working.parameter_of if self.working is not None else lambda tensor: None,
            report=self._substitutions.tell,
        )
        watch = self._watch = ForwardWatch(self.region)
        self.tell: Report = self._substitutions.tell
        tell = self.tell
        self._judge = Judge(
            policy,
            scales=self.scales,
            statistics=self._statistics,
            watch=watch,
            rules=rules,
            names=self._names,
            report=tell,
        )
        running = Running()
        skips = self._casts and (
            policy.skip_nonfinite == "always" or (policy.skip_nonfinite == "auto" and self.scales.in_force)
        )
        self.hooks: Hooks = Hooks(running, self._flags, self.leaves, self.region, skips=skips)
        self.ranks: Ranks = Ranks(
            skips=skips, export_state=self.scales.export_state, restore_state=self.scales.restore_state
        )
        self.pipelines: Pipelines = Pipelines(
            self.ranks,
            self._flags,
            self.leaves,
            judge=self._judged_together,
            applies=lambda: self._casts and (skips or self.scales.in_force),
            skips=skips,
            report=tell,
        )
        self.reduction: Reduction = Reduction(policy.ddp.comm_dtype, applies=lambda: self._casts, report=tell)
        doubts = Doubts(self.leaves)
        deferred = Deferred(
            self._arrivals,
            self.scales,
            self.leaves,
            self._flags,
            running,
            doubts=doubts,
            mend=self._statistics.mend,
            ran=self._ran,
            judged=self._judged_later,
            report=tell,
            skips=skips,
        )
        self.backward: Backward = Backward(
            self.scales,
            self.leaves,
            self._flags,
            running,
            self.ranks,
            deferred=deferred,
            defers=lambda: not (self._budget.asks or self._watch.armed or self.hooks.waits),
            held=self.working.in_place_for_backward if self.working is not None else nullcontext,
            around=self.region.disabled,
            judged=self._judged,
            report=tell,
            checks=self._casts,
            skips=skips,
        )
        self.without_compiler: WithoutCompiler = WithoutCompiler()
        self._fused = FusedUpdates(tell, wanted=policy.optimizer.fuse)
        self.stepping: Stepping = Stepping(
            self._flags,
            self._arrivals,
            doubts,
            skips=skips,
            attempts=policy.collapse.after,
            falls=lambda: self.scales.falls,
            before=self._before_step,
            after=self._stepped,
            ahead=self._stepped_ahead,
            around=self.region.disabled,
            fused=self._fused.update,
            bare=self.without_compiler.wrap_step,
        )
        self.script_amp: ScriptAmp = ScriptAmp(
            policy,
            self.scales,
            self._substitutions.tell,
            refused=self.region.refused,
            stand_back=self._stand_back,
            stepped=self._stepped_by_scaler,
            silent_steps=self.stepping.told_by_others,
        )
        self.checkpoints: Checkpoints = Checkpoints(self.scales)
        self.oprules: OpRules = OpRules(policy, DEVICES.values(), tell)
        self._intercepts = Intercepts(self)
        self._undo = ExitStack()
        self._start_counting()

    def _start_counting(self) -> None:
        self._progress = Progress()
        self._ahead = 0  # passes whose verdict is on its way
        chosen = chosen_monitors(
            self.policy,
            casts=self._casts,
            where=self._names.of_nearest_to_loss,
            emit=self._emit,
            fetch=self._arrivals.add,
        )
        self._audience = Audience([self._progress, *chosen], self._lost)
        self._budget = Budget(self.policy, self.scales, emit=self._emit, peak_bytes=lambda: peak_memory()[1])

    def forked(self) -> None:
        """This process is a child of the one that installed the session: count anew, and see whether it is a worker."""
        self._arrivals.forget()
        self._start_counting()
        self.region.passive = None

    def _adoption(self) -> Adoption:
        working = self.working
        if working is not None:
            return Adoption(
                hold=working.in_place,
                withdrawn=working.withdrawn,
                lends=lambda tensor: working.parameter_of(tensor) is not None,
            )
        if self._half_model is not None:
            return Adoption(hold=self._half_model.hold, withdrawn=self._half_model.withdrawn)
        return AS_THEY_ARE

    def install(self) -> None:
        """Let torch work at the policy's level. If anything fails, torch is as before."""
        with ExitStack() as undo:
            undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision(self.policy.matmul_precision)
            undo.callback(self.oprules.remove)
            self.oprules.install()
            undo.callback(self.without_compiler.remove)
            undo.callback(self._intercepts.remove)
            self._intercepts.install()
            undo.callback(setattr, Session, "current", Session.current)
            Session.current = self
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Undo everything; torch is as before. Idempotent."""
        self.catch_up()
        self._undo.close()
        if self.working is not None:
            self.working.drop()

    def catch_up(self) -> None:
        """Wait for what is on its way from an accelerator; one that has failed has nothing more to say."""
        try:
            self._arrivals.wait()
        except Exception as error:  # noqa: BLE001 - the run is over: nobody but the record can be told
            self._arrivals.forget()
            self._emit("fault", where="the last verdicts", text=repr(error))

    def summary(self) -> dict[str, Any]:
        """Return the cumulative `snapshot` of the record."""
        parts: dict[str, Any] = {"scalers": self.scales.snapshot() if self.scales.in_force else []}
        parts |= self._audience.snapshot()
        parts["substitutions"] = self._substitutions.snapshot()
        parts |= self.reduction.snapshot()
        parts["shared_passes"] = self.ranks.passes
        parts["saw_script_amp"] = self._substitutions.told(
            "script-autocast", "script-gradscaler", "script-amp-kept"
        )
        return parts

    def ask_op(self, name: str, kind: str) -> None:
        """Let an op compute in another type from now on, as `OpRules.ask` says."""
        self.oprules.ask(name, kind)
        self.region.cast_at_each_use()

    def saw_group(self, optimizer: Optimizer) -> None:
        """An optimizer got a parameter group."""
        self.leaves.saw_optimizer(optimizer)
        if self._half_model is not None:
            self._half_model.convert(p for group in optimizer.param_groups for p in group["params"])
            guard_optimizer(optimizer, self.policy.optimizer, self._substitutions.tell)

    def _called(self, module: nn.Module) -> None:
        self.leaves.saw_root(module)
        self._audience.tell("called", module)

    def _began(
        self, module: nn.Module, parts: list[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch.is_grad_enabled():
            self.leaves.saw_inputs(args, kwargs)
            if module.training:
                self._statistics.before_call(parts)

    def _ran(self) -> None:
        """A backward pass returned and its gradients are true; the verdict is on its way."""
        if self.working is not None:
            self.working.drop()
        self._ahead += 1
        self._audience.tell("ran", self._progress.backwards + self._ahead)

    def _judged_later(self, seen: Seen) -> None:
        """The verdict on the oldest of those is here."""
        self._ahead -= 1
        self._follow(seen)

    def _judged(self, seen: Seen) -> None:
        """A backward pass returned, its gradients are true, and it is known whether they are finite."""
        if self.working is not None:
            self.working.drop()
        self._follow(seen)

    def _follow(self, seen: Seen) -> None:
        progress = self._progress
        one = self._judge.judge(seen, number=progress.backwards + 1, step=progress.attempted)
        wrong = one.kind is not None
        self._audience.tell("passed", one)
        if wrong:
            self._audience.tell("went_wrong", one)
        self._tick(urgent=wrong)
        if self._budget.watches:
            self._budget.passed(one)  # may end the script, as the next may
        if wrong:
            self._judge.look_at_collapse(one)

    def _judged_together(self, site: str, finite: bool) -> None:  # noqa: FBT001 - the verdict itself
        """The stages of a pipeline have one verdict on what this process ran at a call site."""
        self.scales.judge(site, finite=finite, backward=self._progress.backwards)

    def _before_step(self, optimizer: Optimizer) -> None:
        self.leaves.saw_optimizer(optimizer)
        if self.ranks.accumulates:
            for site, finite in self.ranks.left_alone(optimizer).items():
                self.scales.judge(site, finite=finite)
        if self.working is not None:
            self.working.drop()
        if self._half_model is not None:
            guard_optimizer(optimizer, self.policy.optimizer, self._substitutions.tell)

    def _stepped(self, optimizer: Optimizer, step: Step) -> None:
        self._audience.tell("asked_to_step", optimizer)
        self._count_step(step)
        if self._budget.watches:
            self._budget.stepped(step)  # may end the script

    def _count_step(self, step: Step) -> None:
        self._audience.tell("stepped", step)
        self._tick(urgent=step.skipped)

    def _stepped_ahead(self, optimizer: Optimizer, found_inf: Tensor | None) -> None:
        """An optimizer stepped by what it was handed, or for certain; counted after the passes before it."""
        stepped = weakref.ref(optimizer)  # what a script forgets is not kept

        def known(numbers: list[float]) -> None:
            skipped, optimizer = any(numbers), stepped()
            if skipped and optimizer is not None:
                self.stepping.skipped(optimizer)
            self._count_step(Step(skipped))

        self._audience.tell("asked_to_step", optimizer)
        self._arrivals.add(None if found_inf is None else found_inf.reshape(1), known)
        if self._budget.watches:
            self._budget.attempted()  # may end the script

    def _stepped_by_scaler(self, optimizer: Optimizer, flags: list[Tensor]) -> None:
        """The script's own GradScaler let an optimizer step, or not."""
        self._stepped(optimizer, Step(skipped=any(read(flags))))

    def handing_over(self, module: nn.Module) -> None:
        """DDP or FSDP2 takes a module: a type that changed later would leave its hooks and shards behind."""
        if self._half_model is not None and self._casts:
            self._half_model.adopt(module, modules_of(module))

    def sharded(self, module: nn.Module) -> None:
        """FSDP2 has taken over the parameters of a module: it makes the half copies."""
        self.ranks.shards(module)
        for part in module.modules():
            self._rules.keep(part)

    def _stand_back(self) -> None:
        """The script's own mixed precision runs and is to be kept: count, and touch nothing."""
        self._substitutions.tell(
            "script-amp-kept", "the script's own mixed precision runs; the level is not applied"
        )
        self.region.casts = self._casts = False
        self.oprules.remove()
        self._judge.stand_back()
        self._fused.stand_back()
        self.backward.stand_back(self.script_amp.true_losses)

    def _lost(self, monitor: Monitor, error: Exception) -> None:
        """A monitor failed and is off."""
        where = type(monitor).__name__
        self._emit("fault", where=where, text=repr(error))
        say(f"the monitor {where} failed and is off ({error!r}); the run goes on")
