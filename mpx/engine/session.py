"""The session: one process's services, bound to each other here and nowhere else."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpx.engine.backward import Backward, Seen
from mpx.engine.checkpoints import Checkpoints
from mpx.engine.devices import DEVICES, HALF
from mpx.engine.functions import ScriptFunctions
from mpx.engine.gradients import Flags
from mpx.engine.half_model import HalfModel, guard_optimizer
from mpx.engine.intercepts import Intercepts
from mpx.engine.leaves import Leaves
from mpx.engine.names import Names
from mpx.engine.oprules import OpRules
from mpx.engine.region import AS_THEY_ARE, Adoption, Region
from mpx.engine.scales import Scales
from mpx.engine.script_amp import ScriptAmp
from mpx.engine.statistics import StatisticsGuard
from mpx.engine.stepping import Step, Stepping
from mpx.engine.substitutions import Substitutions
from mpx.engine.watch import ForwardWatch
from mpx.engine.working import ModuleRules, WorkingCopies
from mpx.errors import MpxError
from mpx.monitors import Coverage, Losses, Monitor, Overflows, Pass, PeakMemory, Progress, Throughput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.optim import Optimizer

    from mpx.presets.policy import Policy

__all__ = ["CollapseError", "Session"]


class CollapseError(MpxError):
    """Training went on overflowing and the preset says to stop: raised into the script."""

    exit_code = 1


class Session:
    """Everything that mpx does to torch in one process, from `install` to `close`."""

    def __init__(self, policy: Policy, emit: Callable[..., None], tick: Callable[..., None]) -> None:
        """Bind the services; torch is not touched before `install`.

        Args:
            policy: The resolved preset.
            emit: Writes one event of the record.
            tick: Called after each pass and step; writes a snapshot when one is due.
        """
        self.policy = policy
        self._emit, self._tick = emit, tick
        half = HALF[policy.dtype]
        self._casts = policy.cast_model_type != "float32"
        self._rules = rules = ModuleRules(policy)
        converts = self._casts and policy.master_weights is False
        self._half_model = HalfModel(half, rules) if converts else None
        self._substitutions = Substitutions()
        self._working = WorkingCopies(half, rules, self._substitutions.tell) if policy.master_weights else None
        self._leaves = Leaves()
        self._flags = Flags()
        self._names = Names(self._leaves)
        self._statistics = StatisticsGuard()
        self._bad_in_a_row = 0

        self.scales = Scales(policy.loss_scale, policy.monitors.history_points)
        self.region = Region(policy, rules, self._adoption(), began=self._began, ended=self._ended, around=self._sampled)
        self.functions = ScriptFunctions(self.region)
        self._watch = ForwardWatch(self.region)
        self.backward = Backward(
            self.scales, self._leaves, self._flags, around=self._around_backward, judged=self._judged, checks=self._casts
        )
        skips = policy.skip_nonfinite == "always" or (policy.skip_nonfinite == "auto" and self.scales.in_force)
        self.stepping = Stepping(
            self._flags,
            skips=skips and self._casts,
            attempts=policy.collapse.after,
            before=self._before_step,
            after=self._stepped,
            around=self.region.disabled,
        )
        self.script_amp = ScriptAmp(
            policy, self.scales, self._substitutions.tell, refused=self.region.refused, stand_back=self._stand_back
        )
        self.checkpoints = Checkpoints(self.scales)
        self._oprules = OpRules(policy, DEVICES.values(), self._substitutions.tell)
        self._intercepts = Intercepts(self)
        self._undo = ExitStack()
        self._start_counting()

    def _start_counting(self) -> None:
        self._progress = Progress()
        self._monitors: list[Monitor] = [self._progress, *self._chosen_monitors()]

    def forked(self) -> None:
        """This process is a child of the one that installed the session: count anew, and see whether it is a worker."""
        self._start_counting()
        self.region.passive = None

    def _adoption(self) -> Adoption:
        if self._working is not None:
            return Adoption(hold=self._working.in_place, withdrawn=self._working.withdrawn)
        if self._half_model is not None:
            return AS_THEY_ARE._replace(hold=self._half_model.hold)
        return AS_THEY_ARE

    def _chosen_monitors(self) -> Iterator[Monitor]:
        chosen = self.policy.monitors
        if chosen.losses:
            yield Losses(chosen.history_points)
        if chosen.overflow:
            yield Overflows(self._names, self._emit)
        if chosen.coverage and self._casts:
            yield Coverage()
        if chosen.throughput:
            yield Throughput()
        if chosen.memory:
            yield PeakMemory()

    def install(self) -> None:
        """Let torch work at the policy's level. If anything fails, torch is as before."""
        with ExitStack() as undo:
            undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision(self.policy.matmul_precision)
            undo.callback(self._oprules.remove)
            self._oprules.install()
            undo.callback(self._intercepts.remove)
            self._intercepts.install()
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Undo everything; torch is as before. Idempotent."""
        self._undo.close()
        if self._working is not None:
            self._working.drop()

    def summary(self) -> dict[str, Any]:
        """Return the cumulative `snapshot` of the record."""
        parts: dict[str, Any] = {"scalers": self.scales.snapshot() if self.scales.in_force else []}
        for monitor in self._monitors:
            with self._guarded(monitor):
                parts.update(monitor.snapshot())
        parts["substitutions"] = self._substitutions.snapshot()
        parts["saw_script_amp"] = self._substitutions.told("script-autocast", "script-gradscaler", "script-amp-kept")
        return parts

    def saw_group(self, optimizer: Optimizer) -> None:
        """An optimizer got a parameter group."""
        self._leaves.saw_optimizer(optimizer)
        if self._half_model is not None:
            self._half_model.convert(p for group in optimizer.param_groups for p in group["params"])
            guard_optimizer(optimizer, self.policy.optimizer, self._substitutions.tell)

    def _began(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._leaves.saw_call(module, args, kwargs)
        if self._casts and torch.is_grad_enabled():
            self._statistics.before_call(module)
        self._notify(lambda monitor: monitor.called(module))

    def _ended(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._leaves.saw_output(output)
        if self.region.watch is not None:
            self.region.watch(module, args, output)

    @contextmanager
    def _sampled(self, module: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for monitor in self._monitors:
                stack.enter_context(monitor.around(module))
            yield

    @contextmanager
    def _around_backward(self) -> Iterator[None]:
        copies: AbstractContextManager[None] = self._working.in_place_for_backward() if self._working else ExitStack()
        with copies, self.region.disabled():
            yield

    def _judged(self, seen: Seen) -> None:
        """A backward pass returned and its gradients are true: move the scale, mend what an overflow left, tell the monitors."""
        if self._working is not None:
            self._working.drop()
        number = self._progress.backwards + 1
        kind, module, in_a_row = self._kind_of(seen)
        if self._casts:
            self._adjust(seen, kind, number)
        name = None if module is None else self._names.of_module(module)
        one = Pass(number, self._progress.attempted, seen, kind, name)
        self._notify(lambda monitor: monitor.passed(one))
        self._tick(urgent=kind is not None)
        if module is not None and name is not None:
            self._mend(module, name, in_a_row)
        if kind is not None:
            self._look_at_collapse(one)

    def _kind_of(self, seen: Seen) -> tuple[str | None, nn.Module | None, int]:
        """Return what went wrong in a pass, in which module, and how often in a row in that one."""
        if not seen.loss_finite:
            module, in_a_row = self._watch.take()
            return ("loss_nan" if module is None else "forward_inf"), module, in_a_row
        return ("backward_inf" if seen.overflowed else None), None, 0

    def _adjust(self, seen: Seen, kind: str | None, number: int) -> None:
        if kind is None:
            self._bad_in_a_row = 0
            self._watch.disarm()
            if not seen.sticky:  # in a window that overflowed already nothing is known of this pass alone
                self.scales.judge(seen.site, finite=True, backward=number)
                self._statistics.accept()
            return
        self._bad_in_a_row += 1
        for module in self._statistics.restore():
            name = self._names.of_module(module)
            self._substitutions.tell(f"statistics:{name}", f"running statistics of `{name}` put back after an overflowed forward pass")
        if kind == "backward_inf":
            self.scales.judge(seen.site, finite=False, backward=number)
        else:
            self._watch.arm()

    def _mend(self, module: nn.Module, name: str, in_a_row: int) -> None:
        """Let a module compute in FP32 once its forward pass left the half type's range often enough in a row."""
        after = self.policy.forward_overflow.float32_after
        if after and in_a_row >= after and not self._rules.computes_float32(module):
            self._rules.name(module)
            text = f"`{name}` computes in FP32 since its {self.policy.dtype} forward pass overflowed {in_a_row} times in a row"
            self._substitutions.tell(f"forward:{name}", text)
            _say(f"{text}; `--fp32-module '{name}'` does so from the start, `--dtype bfloat16` has the range of FP32")

    def _look_at_collapse(self, one: Pass) -> None:
        if self._bad_in_a_row != self.policy.collapse.after:
            return
        causes = {
            "loss_nan": "the loss itself is not finite, so no loss scale can help: look at the data and the learning rate",
            "forward_inf": f"the forward pass of `{one.module}` leaves the range of {self.policy.dtype}: "
            f"try `--fp32-module '{one.module}'` or `--dtype bfloat16`",
            "backward_inf": f"gradients are not finite at a loss scale of {one.seen.scale:g}: try `--dtype bfloat16`, or `--opt-level O0` to see "
            "whether FP32 trains",
        }
        text = f"{self._bad_in_a_row} backward passes in a row were not finite (last at {one.seen.site}): {causes[str(one.kind)]}"
        if self.policy.collapse.action == "stop":
            raise CollapseError(text, hint="`--on-collapse warn` lets the run go on")
        _say(text)

    def _before_step(self, optimizer: Optimizer) -> None:
        self._leaves.saw_optimizer(optimizer)
        if self._working is not None:
            self._working.drop()
        if self._half_model is not None:
            guard_optimizer(optimizer, self.policy.optimizer, self._substitutions.tell)

    def _stepped(self, step: Step) -> None:
        self._notify(lambda monitor: monitor.stepped(step))
        self._tick(urgent=step.skipped)

    def _stand_back(self) -> None:
        """The script's own mixed precision runs and is to be kept: count, and touch nothing."""
        self._substitutions.tell("script-amp-kept", "the script's own mixed precision runs; the level is not applied")
        self.region.casts = self.backward.active = False

    def _notify(self, call: Callable[[Monitor], None]) -> None:
        for monitor in list(self._monitors):
            with self._guarded(monitor):
                call(monitor)

    @contextmanager
    def _guarded(self, monitor: Monitor) -> Iterator[None]:
        """A fault of a monitor costs that monitor, never the run."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - told as an event and a line
            if monitor in self._monitors:
                self._monitors.remove(monitor)
            where = type(monitor).__name__
            self._emit("fault", where=where, text=repr(error))
            _say(f"the monitor {where} failed and is off ({error!r}); the run goes on")


def _say(text: str) -> None:
    sys.stderr.write(f"mpx: {text}\n")
