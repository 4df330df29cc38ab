"""Models that TorchScript compiled train at every level, and what is done with them is told."""

import re

import pytest

WAYS = ("script", "trace", "part")
LEVELS = ("-O O1", "-O O2", "-O O1 --dtype bfloat16", "-O O2 --dtype bfloat16", "-O O3")
FAST = [(options, how) for options in LEVELS[:2] for how in WAYS[:2]]
QUIET = {"PYTHONWARNINGS": "ignore"}


@pytest.fixture(scope="session")
def outcome(processes):
    return lambda options, how: processes.mpx(options, "scripted.py", how, **QUIET).result()


@pytest.fixture(scope="session")
def plain(processes):
    return lambda how: processes.plain("scripted.py", how, **QUIET).result().succeeded()


@pytest.fixture(scope="session")
def prefetch(processes):
    """Start all of the fast ones at once; each test waits for its own."""
    for options, how in FAST:
        processes.mpx(options, "scripted.py", how, **QUIET)


@pytest.mark.parametrize(
    ("options", "how"),
    [
        pytest.param(options, how, marks=[] if (options, how) in FAST else [pytest.mark.slow])
        for options in LEVELS
        for how in WAYS
    ],
)
@pytest.mark.usefixtures("prefetch")
def test_a_compiled_model_trains_saves_and_loads(outcome, plain, options, how):
    run = outcome(options, how).succeeded()
    ours, theirs = losses(run), losses(plain(how))
    assert len(ours) == 6
    assert ours == pytest.approx(theirs, rel=0.02)
    half = "float16" if "O3" in options else "float32"
    assert [line.split()[-2:] for line in run.lines[:6]] == [["torch.float32", f"torch.{half}"]] * 6
    assert run.lines[-1] == f"RESULT torch.{half} torch.float32 True"
    record = run.record
    assert record["steps"]["applied"] + record["steps"]["skipped"] == 6
    told = any("TorchScript" in item["text"] for item in record["substitutions"])
    assert told == ("O3" not in options)


def losses(run):
    return [float(found[1]) for line in run.lines if (found := re.match(r"step \d loss (\S+)", line))]
