"""Verdicts: what each gate reads off a record, and that nothing passes which was not measured."""

import math

import pytest

from mpx.gates import MEASURES, parse_gate
from mpx.record import RunRecord
from mpx.record.fold import fold
from mpx.record.model import Process
from mpx.record.parts import (
    Coverage,
    Desync,
    LossCurve,
    Memory,
    Overflow,
    OverflowCounts,
    Scaler,
    Steps,
    StepTime,
    Stop,
    Throughput,
    Verdict,
)
from mpx.report import FORMATS, Options, findings, render, with_findings
from mpx.report.gates import judge, preset_gates

DYNAMIC = {"name": "O1", "loss_scale": {"mode": "dynamic", "min": 2.0**-14}, "skip_nonfinite": "auto"}


def overflow(step, kind="backward_inf"):
    return Overflow(kind, backward=step + 1, step=step, scale=2.0, process="a")


def record(**changes):
    early, late = (0, 1, 2), (500, 501, 900)
    told = {
        "preset": DYNAMIC,
        "processes": [Process("a", trained=True)],
        "forwards": 1000,
        "backwards": 1000,
        "steps": Steps(1000, 994, 6),
        "overflow_counts": OverflowCounts(backward_inf=6),
        "overflows": [overflow(step) for step in (*early, *late)],
        "longest_skip_run": 3,
        "scalers": [
            Scaler("a.py:1", 4.0, 2.0, 65536.0, 65536.0, history=[[0, 65536.0], [1, 2.0], [600, 4.0]])
        ],
        "losses": [LossCurve("a.py:1", list(range(1, 101)), [1.0 + 1.0 / i for i in range(1, 101)])],
        "throughput": Throughput(20.0, StepTime(50.0, 60.0), [[1, 500.0], [200, 40.0], [300, 42.0]]),
        "memory": Memory(3 * 2**30, "cuda"),
        "coverage": Coverage(0.75),
    }
    return RunRecord(**{**told, **changes})


def value(text, run=None, **others):
    (verdict,) = judge([parse_gate(text)], run or record(), baselines=others)
    return verdict.value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("overflow_rate", 0.006),
        ("overflow_rate after 100", 3 / 900),
        ("skipped_steps", 6),
        ("skipped_steps after 100", 3),
        ("consecutive_skips", 3),
        ("consecutive_skips after 100", 2),
        ("consecutive_skips after 600", 1),
        ("nonfinite_loss", 0),
        ("scale_floor", 0.0),
        ("final_loss>2", 1.01),
        ("peak_memory>8GiB", 3 * 2**30),
        ("step_time>1ms", 50.0),
        ("step_time>1ms after 100", 40.0),
        ("half_flops_share>1%", 0.75),
        ("steps>1", 1000),
        ("not_instrumented", 0.0),
        ("scale_desync", 0.0),
    ],
)
def test_measures(text, expected):
    assert value(text) == pytest.approx(expected)


def test_ranks_whose_scales_parted_fail_their_gate():
    parted = record(desyncs=[Desync("a.py:1", 7, scales={"0": 65536.0, "1": 32768.0})])
    assert value("scale_desync", parted) == 1.0


def test_with_accumulation_a_warm_up_counts_steps():
    run = record(backwards=4000)
    assert value("overflow_rate after 100", run) == pytest.approx(3 / 3600)


def test_the_warm_up_of_a_run_with_more_overflows_than_are_kept_is_an_upper_bound():
    run = record(overflow_counts=OverflowCounts(backward_inf=400), longest_skip_run=300)
    assert value("overflow_rate after 100", run) == pytest.approx(397 / 900)
    assert value("consecutive_skips after 100", run) == 300


def test_a_scale_that_stood_at_its_floor_is_seen_whenever_it_was():
    run = record(
        scalers=[
            Scaler("a", 1.0, 2.0**-14, 65536.0, 65536.0, history=[[0, 65536.0], [50, 2.0**-14], [90, 1.0]])
        ]
    )
    assert value("scale_floor", run) == 1.0
    assert value("scale_floor after 60", run) == 0.0


def test_a_loss_that_is_not_finite_counts_from_events_and_from_the_counter():
    run = record(nonfinite_losses=3, overflow_counts=OverflowCounts(loss_nan=1, forward_inf=1))
    assert value("nonfinite_loss", run) == 3
    late = record(
        overflow_counts=OverflowCounts(loss_nan=2),
        overflows=[overflow(5, "loss_nan"), overflow(200, "loss_nan")],
    )
    assert value("nonfinite_loss after 100", late) == 1


@pytest.mark.parametrize(
    "text",
    [
        "overflow_rate",
        "final_loss>2",
        "peak_memory>1B",
        "step_time>1ms",
        "half_flops_share>1%",
        "loss_delta_vs(x)>1%",
    ],
)
def test_what_was_not_measured_does_not_pass(text):
    (verdict,) = judge([parse_gate(text)], RunRecord(), baselines={"x": RunRecord()})
    assert (verdict.passed, verdict.value) == (False, None)
    assert verdict.text.startswith("not judged: ")


def test_a_run_that_is_all_warm_up_does_not_pass():
    (verdict,) = judge([parse_gate("skipped_steps>10 after 1000")], record(), baselines={})
    assert not verdict.passed
    assert "none after the first 1,000" in verdict.text


def test_a_loss_that_is_nan_does_not_pass():
    run = record(losses=[LossCurve("a", [1, 2], [1.0, math.nan])])
    assert not judge([parse_gate("final_loss>2")], run, baselines={})[0].passed
    assert not judge([parse_gate("loss_delta_vs(x)>2%")], run, baselines={"x": record()})[0].passed


def test_another_run_is_what_the_loss_is_compared_with():
    other = record(losses=[LossCurve("a", [1, 2], [2.0, 2.0])])
    assert value("loss_delta_vs(x)>2%", record(), x=other) == pytest.approx(0.494, abs=0.01)
    assert value("loss_delta_vs(x)>2%", record(), x=record()) == 0.0
    assert value("loss_delta_vs(gone)>2%", record()) is None


@pytest.mark.parametrize("name", MEASURES)
def test_every_measure_can_be_judged_of_any_record(name):
    texts = {
        "final_loss": ">1",
        "peak_memory": ">1B",
        "step_time": ">1ms",
        "half_flops_share": "<1%",
        "steps": "<1",
    }
    gate = parse_gate("loss_delta_vs(x)>1%" if MEASURES[name].of_run else name + texts.get(name, ""))
    for run in (RunRecord(), record()):
        (verdict,) = judge([gate], run, baselines={}, origin="--fail-on")
        assert verdict.text
        assert verdict.origin == "--fail-on"


def test_the_gates_of_a_preset_are_read_off_the_record():
    run = record(preset={**DYNAMIC, "gates": ["steps<10", "nonfinite_loss"]})
    assert [gate.text for gate in preset_gates(run)] == ["steps<10", "nonfinite_loss"]
    assert preset_gates(RunRecord()) == []


def judged(*verdicts):
    return with_findings(record(status="completed", exit_code=0, gates=list(verdicts)))


PASSED = Verdict(
    "nonfinite_loss", passed=True, value=0.0, text="0 of 1,000 backward passes", origin="--fail-on"
)
FAILED = Verdict("skipped_steps>2", passed=False, value=6.0, text="6 of 1,000 steps", origin="ci.yaml:4")


def test_a_failed_gate_is_an_error_that_says_what_was_measured():
    found = [finding for finding in findings(judged(PASSED, FAILED)) if finding.id == "gates-failed"]
    assert [(item.severity, item.text) for item in found] == [
        ("error", "1 of 2 gates failed: `skipped_steps>2`: 6 of 1,000 steps")
    ]
    assert not [finding for finding in findings(judged(PASSED)) if finding.id == "gates-failed"]


def test_the_short_report_keeps_its_length_and_the_long_one_has_the_table():
    many = [FAILED] * 20 + [PASSED] * 20
    assert len(render(judged(*many), Options()).splitlines()) <= 18
    long = render(judged(PASSED, FAILED), Options(verbosity=1))
    assert "FAILED" in long
    assert "ci.yaml:4" in long


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_tells_of_a_failed_gate(name):
    assert "skipped_steps" in render(judged(PASSED, FAILED), Options(verbosity=1), format_name=name)


def test_verdicts_and_stops_are_facts_of_the_events():
    events = [
        {"event": "start", "process": "a", "t": 1.0},
        {
            "event": "stopped",
            "process": "a",
            "t": 2.0,
            "reason": "max-steps",
            "step": 3,
            "text": "`--max-steps 3` asks",
        },
        {
            "event": "gates",
            "t": 3.0,
            "verdicts": [{"gate": "steps<3", "passed": True, "value": 3}, {"passed": 1}],
        },
    ]
    run = fold(events)
    assert run.stopped == Stop("max-steps", "`--max-steps 3` asks", step=3, process="a", t=2.0)
    assert run.gates == [Verdict("steps<3", passed=True, value=3.0)]
    assert RunRecord.from_dict(run.to_dict()) == run


@pytest.mark.parametrize(
    ("reason", "id_", "severity"), [("max-steps", "step-budget", "info"), ("abort-on", "aborted", "error")]
)
def test_that_mpx_ended_the_script_is_a_finding(reason, id_, severity):
    run = record(status="failed", exit_code=96, stopped=Stop(reason, "why", step=3, backward=4))
    found = {finding.id: finding.severity for finding in findings(run)}
    assert found[id_] == severity
    assert ("failed" in found) == (reason == "max-steps")  # exit code 96 of an abort is our own
