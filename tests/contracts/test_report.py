"""The report at the end of a run and the record of it: short, complete, and the same whenever one asks again."""

import json
import re
import shutil

import pytest

LINES = 18
RECORD = {
    "schema": int,
    "mpx": str,
    "torch": str,
    "python": str,
    "device": {"type": str, "name": str, "capabilities": list},
    "command": list,
    "script": str,
    "preset": {"name": str, "dtype": str, "loss_scale": dict},
    "origin": {"name": str, "dtype": str},
    "exit_code": int,
    "status": str,
    "started": str,
    "wall_s": float,
    "processes": [{"pid": int, "rank": type(None), "host": str, "torch": str, "trained": bool}],
    "forwards": int,
    "backwards": int,
    "steps": {"attempted": int, "applied": int, "skipped": int},
    "scalers": [
        {
            "site": str,
            "final": float,
            "min": float,
            "max": float,
            "init": float,
            "growths": int,
            "backoffs": int,
            "overflows": int,
            "history": list,
        }
    ],
    "overflows": [
        {
            "backward": int,
            "step": int,
            "scale": float,
            "kind": str,
            "module": (str, type(None)),
            "parameter": str,
            "site": str,
        }
    ],
    "losses": [{"site": str, "backward": list, "value": list}],
    "throughput": {"steps_per_s": float, "step_ms": {"median": float, "p95": float}},
    "memory": {"peak_bytes": int, "device": str},
    "coverage": {
        "half_flops_share": float,
        "by_op": [{"op": str, "dtype": str, "flops": float, "calls": int}],
    },
    "casts": dict,
    "substitutions": list,
    "findings": [
        {"id": str, "severity": str, "text": str, "evidence": (str, type(None)), "hint": (str, type(None))}
    ],
}


@pytest.fixture(scope="session")
def runs(processes, all_of):
    verbosities = ("", "-q", "-qq", "-v")
    started = {flag: processes.mpx(f"{flag} -O O1", "train_then_end.py", "return") for flag in verbosities}
    started["plain"] = processes.plain("train_then_end.py", "return")
    return all_of(started)


@pytest.fixture(scope="session")
def told_again(processes, runs):
    """What `mpx report` says of the run afterwards, from the folder that it ran in."""
    python, *mpx, _ = processes.command
    folder = runs[""].folder

    def ask(*words):
        return processes.start((python, *mpx, "report", *words), cwd=folder).result().succeeded()

    return ask


def misfits(value, form, where="record"):
    """Return where `value` does not have the form: a type, several, the keys of an object or the items of a list."""
    if isinstance(form, dict):
        missing = [f"{where}.{key}" for key in form if key not in value]
        return missing + [
            bad
            for key in form.keys() & value.keys()
            for bad in misfits(value[key], form[key], f"{where}.{key}")
        ]
    if isinstance(form, list):
        empty = [] if value else [f"{where} is empty"]
        return empty + [bad for item in value for bad in misfits(item, form[0], where)]
    return [] if isinstance(value, form) else [f"{where} is {type(value).__name__}"]


def test_the_record_has_every_field(runs):
    assert misfits(runs[""].succeeded().record, RECORD) == []


def test_the_record_is_strict_json(runs):
    def refuse(constant):
        raise ValueError(constant)

    json.loads((runs[""].run / "run.json").read_text(), parse_constant=refuse)


def test_the_report_is_short_and_says_what_the_record_says(runs):
    run, record = runs[""], runs[""].record
    assert run.stderr.splitlines() == run.report
    assert len(run.report) <= LINES
    steps, (scaler,), (curve,) = record["steps"], record["scalers"], record["losses"]
    text = "\n".join(run.report)
    for words in (
        "O1 float16",
        f"{steps['applied']} of {steps['attempted']} optimizer steps applied",
        f"{steps['skipped']} skipped",
        f"{scaler['init']:.0f} -> {scaler['final']:.0f}",
        f"lowered {scaler['backoffs']} times",
        f"{scaler['overflows']} of {record['backwards']} steps",
        f"`{record['overflows'][0]['parameter']}`",
        f"{curve['value'][-1]:.5g}",
        "scale was finding its range. This is normal",
        run.run.name,
    ):
        assert words in text


def test_the_numbers_are_the_scripts_own(runs):
    """The losses that it printed, and one skipped step for each overflow of the scale."""
    record = runs[""].record
    assert record["losses"][0]["value"] == [float(line.split()[-1]) for line in runs[""].lines]
    assert record["steps"]["attempted"] == record["backwards"] == record["forwards"] == 12
    assert len(record["overflows"]) == record["scalers"][0]["overflows"] == record["steps"]["skipped"]
    assert [overflow["kind"] for overflow in record["overflows"]] == ["backward_inf"] * record["steps"][
        "skipped"
    ]


def test_quiet_is_one_line_and_quieter_is_nothing(runs):
    (line,) = runs["-q"].stderr.splitlines()
    assert line == runs["-q"].report[0]
    steps = runs["-q"].record["steps"]
    assert f"{steps['applied']} of {steps['attempted']} steps applied" in line
    assert runs["-qq"].stderr == ""
    assert runs["-qq"].record["steps"] == steps  # the record is written all the same


def test_verbose_has_all_that_the_short_report_has(runs):
    label = re.compile(r" (\w[\w ]{,10}\w)  ")
    short, long = (
        {found[1] for line in runs[flag].report if (found := label.match(line))} for flag in ("", "-v")
    )
    assert short <= long
    assert len(runs["-v"].report) > LINES


@pytest.mark.parametrize("flag", ["", "-q", "-qq", "-v"])
def test_stdout_is_the_scripts_alone(runs, flag):
    def shape(outcome):
        return [line.rpartition(" ")[0] for line in outcome.lines]

    assert shape(runs[flag].succeeded()) == shape(runs["plain"])
    assert runs[flag].stdout == runs[""].stdout


def test_the_report_is_the_same_when_asked_again(runs, told_again):
    assert told_again().lines == runs[""].report
    assert told_again(runs[""].run.name).lines == runs[""].report
    assert told_again().stderr == ""
    (line,) = told_again("-q").lines
    steps = runs[""].record["steps"]
    assert f"{steps['applied']} of {steps['attempted']} steps applied" in line


def test_as_json_it_is_the_record(runs, told_again):
    assert json.loads(told_again("--format", "json").stdout) == runs[""].record


def test_it_is_made_from_the_events_and_needs_no_run_json(runs, processes, tmp_path):
    """As after a power cut: only what the processes flushed is left."""
    copy = tmp_path / "copy"
    shutil.copytree(runs[""].run, copy)
    (copy / "run.json").unlink()
    python, *mpx, _ = processes.command
    told = processes.start((python, *mpx, "report", copy, "--format", "json")).result().succeeded()
    assert json.loads(told.stdout) == runs[""].record
