"""Training scripts after public reports of people whose mixed precision went wrong, run unmodified.

They lie beside the checkout, with what each must show (`checks.yaml`) and the code that evaluates it (`run_cases.py`):
neither is copied here. About 10 minutes on two cores: every script under plain python, at O0, and at O1 and O2 in both
half types.
"""

import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

CASES = Path(__file__).parents[3] / "shared" / "cases"
SCRIPTS = sorted(CASES.glob("[0-9][0-9]_*.py"))
MIXED = [(level, half) for half in ("float16", "bfloat16") for level in ("O1", "O2")]
DEADLINE_S = 600
# 03 does not step when its own check finds a gradient that is not finite.
STEPS_BY_ITSELF = "03"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SCRIPTS, reason=f"not run: no reported cases at {CASES}"),
]


@dataclass(frozen=True)
class Outcome:
    """What a case printed in its RESULT line, and what mpx recorded of it."""

    figures: dict
    returncode: int
    stderr: str
    record: dict | None


@pytest.fixture(scope="session")
def runner():
    """The `run_cases.py` of the folder."""
    spec = importlib.util.spec_from_file_location("run_cases", CASES / "run_cases.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)  # the folder is not ours
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def checks():
    import yaml

    return yaml.safe_load((CASES / "checks.yaml").read_text())


@pytest.fixture(scope="session")
def outcome(runner, request, tmp_path_factory):
    """Run the cases that the collected tests ask for, two at a time and in their order; wait for one of them."""
    work = tmp_path_factory.mktemp("cases")
    started = {}

    def run(script, level, half):
        if level == "plain":
            command, kept = [sys.executable], None
        else:
            kept = work / f"{script.stem}-{level}-{half}"
            options = ["--opt-level", level, "--out", str(kept), *(["--dtype", half] if half else [])]
            command = [sys.executable, "-m", "mpx", "run", *options]
        figures, code, _, stderr = runner.run(command, script, work, DEADLINE_S)
        record = (
            json.loads((kept / "run.json").read_text()) if kept and (kept / "run.json").exists() else None
        )
        return Outcome(figures, code, stderr, record)

    with ThreadPoolExecutor(2) as pool:

        def start(script, level, half=None):
            key = (script, level, half)
            if key not in started:
                started[key] = pool.submit(run, *key)
            return started[key]

        for item in request.session.items:
            asked = item.callspec.params if "outcome" in getattr(item, "fixturenames", ()) else {}
            if asked.get("case") is not None:
                start(asked["case"], "plain")
                start(asked["case"], asked.get("level", "O0"), asked.get("half"))

        yield lambda *key: start(*key).result()
        pool.shutdown(cancel_futures=True)


def only(*numbers):
    """Parametrize a test with some of the cases, by number."""
    found = [script for script in SCRIPTS if script.name[:2] in numbers]
    return pytest.mark.parametrize("case", found or [None], ids=[script.stem for script in found] or ["none"])


every_case = only(*(script.name[:2] for script in SCRIPTS))
mixed = pytest.mark.parametrize(("level", "half"), MIXED)


@every_case
def test_at_level_0_a_case_prints_what_it_prints_under_python(outcome, case):
    plain, ours = outcome(case, "plain"), outcome(case, "O0")
    assert (plain.returncode, ours.returncode) == (0, 0), ours.stderr
    assert repr(ours.figures) == repr(plain.figures)  # a NaN is equal to itself here
    assert ours.figures
    assert ours.record["steps"]["skipped"] == 0


@every_case
@mixed
def test_a_case_behaves(outcome, runner, checks, case, level, half):
    plain, ours = outcome(case, "plain"), outcome(case, level, half)
    assert ours.returncode == 0, ours.stderr
    assert ours.figures, ours.stderr
    kind = "fp16" if half == "float16" else "bf16"
    assert runner.failures(checks[case.name[:2]], level, kind, ours.figures, plain.figures) == []


@every_case
@mixed
def test_every_step_is_applied_or_reported_as_skipped(outcome, case, level, half):
    ours, plain = outcome(case, level, half).record, outcome(case, "O0").record
    steps = ours["steps"]
    assert steps["applied"] + steps["skipped"] == steps["attempted"]
    for optimizer in ours["optimizers"]:
        assert optimizer["applied"] + optimizer["skipped"] == optimizer["attempted"]
    if half == "bfloat16":
        assert (steps["skipped"], ours["overflows"]) == (0, [])
    if not case.name.startswith(STEPS_BY_ITSELF):
        assert steps["attempted"] == plain["steps"]["attempted"]
        attempts = [
            [optimizer["attempted"] for optimizer in record["optimizers"]] for record in (ours, plain)
        ]
        assert attempts[0] == attempts[1]


def told(record):
    """Everything that a report says in words."""
    findings = [f"{finding['text']} {finding['hint']}" for finding in record["findings"]]
    return " ".join([*findings, *(item["text"] for item in record["substitutions"])])


@only("09")
@pytest.mark.parametrize(("level", "half"), MIXED[:2])
def test_overflows_are_attributed_to_the_decoder_alone(outcome, case, level, half):
    record = outcome(case, level, half).record
    assert record["overflows"]
    assert {overflow["parameter"].split(".")[0] for overflow in record["overflows"]} == {"dec"}
    decoder, encoder = sorted(record["optimizers"], key=lambda optimizer: -optimizer["skipped"])
    assert decoder["skipped"] > 0
    assert encoder["skipped"] == 0


@only("53")
@pytest.mark.parametrize(("level", "half"), MIXED[:2])
def test_the_module_whose_activations_overflow_is_named_with_a_way_out(outcome, case, level, half):
    record = outcome(case, level, half).record
    modules = {overflow["module"] for overflow in record["overflows"] if overflow["kind"] == "forward_inf"}
    assert modules == {"blocks.2.wo"}
    assert "`blocks.2.wo`" in told(record)
    assert "bfloat16" in told(record)
    assert "--fp32-module" in told(record)
    assert min(overflow["step"] for overflow in record["overflows"]) < 30


@only("01", "51")
@pytest.mark.parametrize(("level", "half"), MIXED[:2])
def test_what_a_script_counts_as_applied_is_what_is_recorded(outcome, case, level, half):
    ours, plain = outcome(case, level, half), outcome(case, "plain")
    steps = ours.record["steps"]
    assert steps["applied"] == ours.figures["applied"]
    assert steps["applied"] + steps["skipped"] == plain.figures["applied"]
    assert steps["skipped"] == len(ours.record["overflows"]) > 0


@only("17")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_checkpoint_files_are_read_by_plain_python_without_mpx(processes, case, level):
    """The whole model, its state and its optimizer, as the script's second way of being called reads them."""
    written = processes.mpx(f"-O {level}", case, "files").result().succeeded()
    read = processes.without_mpx(case, "--load", written.folder / "files").result().succeeded()
    (ours,) = (line.split(" final_loss=")[0] for line in written.lines if line.startswith("RESULT"))
    (theirs,) = read.lines
    assert theirs.rpartition(" probe=")[0] == ours.rpartition(" probe=")[0]
    assert "sd_dtypes=float32 opt_dtypes=float32 n_moments=12" in theirs
    probes = [float(line.rpartition(" probe=")[2]) for line in (ours, theirs)]
    assert probes[0] == pytest.approx(probes[1], rel=1e-3)


@only("45")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_workers_that_are_spawned_do_not_report(outcome, case, level):
    ours = outcome(case, level)
    assert ours.returncode == 0, ours.stderr
    assert ours.stderr.count("mpx  O") == 1
    assert len(ours.record["processes"]) == 1
