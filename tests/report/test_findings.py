"""Each finding appears when it is true, and only then."""

import math
from dataclasses import replace

import pytest

from mpx.record import RunRecord
from mpx.record.model import Process
from mpx.record.parts import (
    Coverage,
    Fault,
    LossCurve,
    OptimizerSteps,
    Overflow,
    OverflowCounts,
    Scaler,
    Steps,
)
from mpx.report import Options, findings, render, with_findings
from mpx.report.checks import SEVERITIES

O1 = {
    "name": "O1",
    "dtype": "float16",
    "cast_model_type": "none",
    "patch_torch_functions": True,
    "loss_scale": {
        "mode": "dynamic", "init": 65536.0, "backoff_factor": 0.5, "growth_interval": 2000, "min": 2.0**-14,
    },
    "skip_nonfinite": "auto",
    "collapse": {"after": 30, "action": "warn"},
    "script_amp": "takeover",
    "optimizer": {"min_eps": 0.0},
}  # fmt: skip
O0 = {
    **O1,
    "name": "O0",
    "cast_model_type": "float32",
    "patch_torch_functions": False,
    "loss_scale": {"mode": "none"},
}
BF16 = {**O1, "dtype": "bfloat16", "loss_scale": {"mode": "none"}}
O3 = {**O1, "name": "O3", "cast_model_type": "half", "loss_scale": {"mode": "none"}, "master_weights": False}


def overflow(backward, scale=65536.0, kind="backward_inf", site="t.py:1", **fields):
    return Overflow(kind=kind, backward=backward, scale=scale, site=site, process="p", **fields)


def scaler(final=65536.0, **fields):
    fields = {"min": final, "max": 65536.0, "init": 65536.0, **fields}
    return Scaler(site="t.py:1", final=final, **fields)


def trained(steps=1000, skipped=0, preset=O1, **fields):
    counts = Steps(steps, steps - skipped, skipped)
    process = Process(
        "p", ended=True, trained=True, forwards=steps, backwards=steps, steps=counts, last_t=10.0
    )
    base = RunRecord(
        preset=preset, status="completed", exit_code=0, ended_t=10.0, processes=[process],
        forwards=steps, backwards=steps, steps=counts, scalers=[scaler()],
    )  # fmt: skip
    return replace(base, **fields)


def settling(*scales, at=None, **fields):
    """A run whose first overflows came at these scales, in consecutive passes or at the passes `at`."""
    events = [overflow(pass_, scale) for pass_, scale in zip(at or range(1, 99), scales, strict=False)]
    counts = OverflowCounts(backward_inf=len(events))
    lowest = min(scales) / 2
    own = {"overflows": events, "overflow_counts": counts, "scalers": [scaler(lowest, backoffs=len(events))]}
    return trained(**{"skipped": len(events), **own, **fields})


def ids(record):
    return [finding.id for finding in findings(record)]


def the(record, name):
    [found] = [finding for finding in findings(record) if finding.id == name]
    return found


def test_a_quiet_run_has_nothing_to_tell():
    assert findings(trained()) == []
    assert findings(trained(preset=O0, scalers=[])) == []
    assert findings(trained(preset=BF16, scalers=[])) == []


def test_the_search_for_the_range_is_told_as_normal():
    found = the(settling(65536.0, 32768.0, 16384.0, at=[1, 2, 4]), "scale-settled")
    assert found.severity == "info"
    assert found.text == "3 overflows in the first 4 steps: the scale was finding its range. This is normal"
    assert found.hint == "`--set loss_scale.init=8192` starts where the search ended"


def test_a_search_below_1_gives_a_hint_that_the_command_line_accepts_exactly():
    scales = [2.0**-e for e in range(-16, 3)]
    found = the(settling(*scales), "scale-below-1")
    assert "`--set loss_scale.init=2**-3`" in found.hint
    assert found.severity == "warning"
    assert "unusual" in found.text
    assert "normal" not in found.text


def test_with_accumulation_passes_are_not_called_steps():
    record = replace(settling(65536.0), backwards=4000)
    assert "1 overflow in the first backward pass:" in the(record, "scale-settled").text


@pytest.mark.parametrize(
    ("scales", "passes", "searched"),
    [
        ([65536.0, 65536.0], [1, 2], 1),  # the scale had grown back in between
        ([65536.0, 32768.0], [1, 30], 1),  # 30 passes later is news
        ([65536.0, 32768.0], [1, 21], 2),
        ([65536.0], [500], 0),
    ],
)
def test_only_what_comes_soon_and_at_a_lower_scale_belongs_to_the_search(scales, passes, searched):
    record = settling(*scales, at=passes)
    told = [finding for finding in findings(record) if finding.id == "scale-settled"]
    assert [finding.text.split()[0] for finding in told] == ([str(searched)] if searched else [])
    assert ("rare-overflows" in ids(record)) == (searched < len(scales))


@pytest.mark.parametrize(("growths", "normal"), [(4, True), (2, True), (1, False)])
def test_an_overflow_after_each_growth_is_the_scale_probing(growths, normal):
    record = trained(
        9000, 2, overflows=[overflow(3000), overflow(5000)], overflow_counts=OverflowCounts(backward_inf=2),
        scalers=[scaler(growths=growths, backoffs=2, overflows=2)],
    )  # fmt: skip
    assert ids(record) == (["scale-probing"] if normal else ["rare-overflows"])


def test_probing_is_explained_with_the_interval():
    record = trained(9000, 1, overflow_counts=OverflowCounts(backward_inf=1), scalers=[scaler(growths=4)])
    found = the(record, "scale-probing")
    assert "1 later overflow for 4 growths" in found.text
    assert "2,000 clean passes" in found.text
    assert "normal" in found.text


@pytest.mark.parametrize(
    ("number", "passes", "finding"),
    [(2, 20, "rare-overflows"), (10, 1000, "rare-overflows"), (11, 1000, "frequent-overflows")],
)
def test_one_lost_step_in_a_hundred_is_the_limit_of_normal(number, passes, finding):
    events = [overflow(100 + i) for i in range(number)]
    record = trained(passes, number, overflows=events, overflow_counts=OverflowCounts(backward_inf=number))
    assert finding in ids(record)


def test_a_static_scale_that_overflows_gets_a_way_out():
    preset = {**O1, "loss_scale": {"mode": "static", "init": 65536.0}}
    record = trained(100, 50, preset=preset, overflow_counts=OverflowCounts(backward_inf=50))
    assert "`--loss-scale dynamic`" in the(record, "frequent-overflows").hint


def collapsed(kind="backward_inf", **fields):
    events = [overflow(i + 1, 2.0 ** (16 - i), kind=kind, **fields) for i in range(31)]
    counts = OverflowCounts(**{kind: 400})
    return trained(
        400, 400, overflows=events, overflow_counts=counts, longest_skip_run=400,
        scalers=[scaler(2.0**-14, backoffs=30, overflows=400)],
    )  # fmt: skip


def test_a_scale_at_its_floor_is_a_collapse_with_the_place_and_the_way_out():
    found = the(collapsed(parameter="net.norm.weight"), "scale-collapse")
    assert found.severity == "error"
    assert "2^-14, its floor" in found.text
    assert "`net.norm.weight` (step 1)" in found.text
    assert "--dtype bfloat16" in found.hint
    assert "--fp32-module net.norm" in found.hint
    assert ids(collapsed()) == ["scale-collapse"]


def test_a_long_run_of_skips_from_which_the_scale_recovered_is_no_collapse():
    record = trained(1000, 40, longest_skip_run=30, overflow_counts=OverflowCounts(backward_inf=40))
    assert the(record, "long-skip-run").severity == "warning"
    assert "scale-collapse" not in ids(record)
    assert ids(replace(record, longest_skip_run=29)) == ["frequent-overflows"]


def nan_loss(**fields):
    """The loss became NaN in step 300 and stayed so: 101 steps in a row were skipped, at an untouched scale."""
    curve = LossCurve("t.py:1", [1, 400], [4.0, math.nan])
    counts = OverflowCounts(loss_nan=101)
    known = {"nonfinite_losses": 101, "losses": [curve], "longest_skip_run": 101, "overflow_counts": counts}
    return trained(400, 101, **{"overflows": [overflow(300, kind="loss_nan")], **known, **fields})


def test_steps_that_a_nan_loss_skips_are_no_collapse():
    assert ids(nan_loss()) == ["nan-loss"]
    found = findings(nan_loss())[0]
    assert found.severity == "error"
    assert "101 of 400 steps (25.2 %), first in step 300" in found.text
    assert "left alone" in found.text
    assert "--opt-level O0" in found.hint


def test_the_module_that_a_nan_came_out_of_is_named_with_its_way_out():
    events = [overflow(300, kind="loss_nan"), overflow(301, kind="forward_inf", module="net.attn")]
    events.append(overflow(302, kind="forward_inf", module="net.ffn"))
    record = nan_loss(overflows=events, overflow_counts=OverflowCounts(loss_nan=1, forward_inf=100))
    assert ids(record) == ["forward-infinity"]
    found = findings(record)[0]
    assert "`net.attn` (first seen in step 301), `net.ffn` (first seen in step 302)" in found.text
    assert "101 of 400 steps" in found.text
    assert "65504" in found.text
    assert found.hint.startswith("`--fp32-module net.attn`, or `--dtype bfloat16`; ")
    wide = the(replace(record, preset=BF16), "forward-infinity")
    assert "65504" not in wide.text
    assert "There is no loss scale" in wide.text
    assert "bfloat16" not in wide.hint


def test_a_nan_loss_that_passed_is_a_warning():
    curve = LossCurve("t.py:1", [1, 400], [4.0, 1.0])
    record = trained(nonfinite_losses=1, losses=[curve], overflow_counts=OverflowCounts(loss_nan=1))
    assert the(record, "nan-loss").severity == "warning"


def test_a_nan_loss_without_any_half_precision_is_not_ours():
    found = the(trained(preset=O0, scalers=[], nonfinite_losses=1), "nan-loss")
    assert "Nothing ran in half precision" in found.text
    assert "loss scale" not in found.text


@pytest.mark.parametrize("last", [1.0, math.nan])
def test_gradients_that_nothing_skipped_are_told(last):
    curve = LossCurve("t.py:1", [1, 2], [4.0, last])
    record = trained(preset=BF16, losses=[curve], overflow_counts=OverflowCounts(backward_inf=3), scalers=[])
    found = the(record, "nonfinite-gradients")
    assert found.severity == ("error" if math.isnan(last) else "warning")
    assert "skip_nonfinite=always" in found.hint
    skipping = replace(record, preset={**BF16, "skip_nonfinite": "always"})
    assert "nonfinite-gradients" not in ids(skipping)


def test_a_run_too_short_for_the_search_says_that_nothing_was_learned():
    record = settling(65536.0, 32768.0, 16384.0, 8192.0, steps=4, skipped=4)
    found = the(record, "nothing-applied")
    assert "all 4 steps were skipped" in found.text
    assert "loss_scale.init=4096" in found.hint
    assert ids(record) == ["nothing-applied"]


def test_a_script_without_torch_had_nothing_to_do():
    record = RunRecord(preset=O1, status="completed", exit_code=0)
    assert "python -I" in the(record, "nothing-instrumented").hint


def test_a_script_that_fails_before_torch_has_told_enough_itself():
    record = RunRecord(preset=O1, script="t.py", status="failed", exit_code=1)
    assert ids(record) == ["ended-before-torch"]
    (line,) = render(with_findings(record), Options()).splitlines()
    assert line == "mpx  O1 float16 | t.py | torch not imported | exit code 1"
    stopped = RunRecord(preset=O1, script="t.py", status="interrupted", signal="SIGINT")
    assert set(ids(stopped)) == {"interrupted", "ended-before-torch"}
    assert render(with_findings(stopped), Options()).count("\n") == 1
    # where mpx could not follow it, that is worth the room
    assert ids(replace(record, notices=["shut out"])) == ["nothing-instrumented"]


def test_a_script_that_only_imports_torch_had_nothing_to_do():
    assert ids(RunRecord(preset=O1, status="completed", processes=[Process("p", ended=True)])) == [
        "nothing-ran"
    ]


def test_who_ended_without_exit_handlers_is_told():
    parent = Process("p", pid=1, trained=True, ended=True, last_t=10.0)
    child = Process("c", pid=2, ppid=1, trained=True, last_t=4.0)
    of_child = the(trained(processes=[parent, child]), "ended-without-cleanup").text
    assert of_child.startswith("1 child process of the script's ended without exit handlers")
    assert "6.00 s before the end" in of_child
    alone = the(trained(processes=[replace(parent, ended=False)]), "ended-without-cleanup").text
    assert alone.startswith("the process ended without exit handlers")


def test_inference_is_told_as_normal():
    process = Process("p", ended=True, forwards=7)
    record = RunRecord(preset=O1, status="completed", processes=[process], forwards=7)
    found = the(record, "inference-only")
    assert "7 forward calls" in found.text
    assert "Normal" in found.text


def test_gradients_without_an_optimizer_are_told():
    assert ids(replace(trained(), steps=Steps())) == ["no-step"]


def test_a_script_without_modules_is_told():
    assert "no-module" in ids(trained(forwards=0))
    assert "no-module" not in ids(trained(forwards=0, preset=O0, scalers=[]))


@pytest.mark.parametrize(("share", "told"), [(0.49, True), (0.5, False), (None, False)])
def test_little_work_in_half_is_told(share, told):
    assert ("little-in-half" in ids(trained(coverage=Coverage(share)))) == told


def test_amp_of_the_scripts_own_is_told_either_way():
    record = trained(saw_script_amp=True)
    assert ids(record) == ["script-amp-taken-over"]
    assert ids(replace(record, preset={**O1, "script_amp": "keep"})) == ["script-amp-kept"]


def test_o3_tells_what_it_costs():
    record = trained(preset=O3, optimizers=[OptimizerSteps("AdamW")], scalers=[])
    assert ids(record) == ["adam-eps", "half-weights"]
    assert the(record, "adam-eps").severity == "warning"
    guarded = replace(record, preset={**O3, "optimizer": {"min_eps": 1e-4}})
    assert the(guarded, "adam-eps").severity == "info"
    assert "0.0001" in the(guarded, "adam-eps").text
    wide = replace(record, preset={**O3, "dtype": "bfloat16"})
    assert ids(wide) == ["half-weights"]
    assert "1/256" in the(wide, "half-weights").text
    assert ids(replace(record, preset={**O3, "master_weights": True})) == []


def unfinished(status, signal=None, **fields):
    record = trained(status=status, signal=signal, exit_code=None if signal else 7, **fields)
    return replace(record, processes=[replace(record.processes[0], ended=False, last_t=6.8)])


def test_a_killed_run_says_by_what_and_how_much_is_missing():
    found = the(unfinished("killed", "SIGKILL"), "killed")
    assert "SIGKILL" in found.text
    assert "memory" in found.text
    assert "3.20 s before the end" in found.text
    assert "compiled code" in the(unfinished("killed", "SIGSEGV"), "killed").text
    assert "memory" not in the(unfinished("killed", "SIGTERM"), "killed").text


def test_a_run_that_was_killed_before_its_first_flush_is_not_said_to_have_done_nothing():
    process = Process("p", ended=False, last_t=9.1)
    record = RunRecord(preset=O1, status="killed", signal="SIGKILL", ended_t=10.0, processes=[process])
    assert ids(record) == ["killed"]
    assert "0.90 s after torch was imported" in the(record, "killed").text
    assert ids(replace(record, status="failed", exit_code=7, signal=None)) == [
        "ended-without-cleanup",
        "failed",
    ]


def test_an_end_without_exit_handlers_says_how_much_is_missing():
    assert "3.20 s" in the(unfinished("failed"), "ended-without-cleanup").text
    assert "ended-without-cleanup" not in ids(trained())


def test_a_worker_that_did_nothing_may_end_as_it_likes():
    record = trained()
    workers = [*record.processes, Process("worker", ended=False, last_t=1.0)]
    assert ids(replace(record, processes=workers)) == []


def test_endings_that_are_not_mpxs_are_told_as_such():
    assert ids(trained(status="failed", exit_code=3)) == ["failed"]
    assert ids(trained(status="interrupted", signal="SIGINT")) == ["interrupted"]


def test_a_run_without_an_ending_may_still_go_on():
    assert ids(unfinished("unknown")) == ["no-ending"]
    assert (
        ids(trained(status="unknown")) == []
    )  # ranks under a launcher: each ended, nobody wrote the whole's end


def test_a_fault_of_ours_is_told_last_and_not_hidden():
    record = trained(faults=[Fault("monitors.memory", "ZeroDivisionError", count=3)], nonfinite_losses=1)
    assert ids(record) == ["nan-loss", "mpx-fault"]
    assert "3 faults" in the(record, "mpx-fault").text


def test_of_several_ranks_the_lowest_tells_the_search():
    ranks = [Process(f"r{rank}", rank=rank, trained=True, ended=True, backwards=1000) for rank in (0, 1)]
    events = [replace(overflow(1), process=f"r{rank}", rank=rank) for rank in (0, 1)]
    record = trained(
        1000, 1, processes=ranks, overflows=events, overflow_counts=OverflowCounts(backward_inf=1),
        scalers=[scaler(32768.0, backoffs=1)],
    )  # fmt: skip
    assert the(record, "scale-settled").text.startswith("1 overflow in the first step")


def test_the_gravest_comes_first():
    record = replace(collapsed(), status="failed", exit_code=1, saw_script_amp=True, nonfinite_losses=3)
    order = [SEVERITIES.index(finding.severity) for finding in findings(record)]
    assert order == sorted(order)
    assert len(order) >= 3
