"""Scripts as they were written for apex compute, under mpx, what they compute without a word of it, bit for bit.

Each has its own branch without amp, so both ways are one script.
"""

import pytest

LEVELS = ("O0", "O1", "O2", pytest.param("O3", marks=pytest.mark.slow))
DEFAULT = "O1"
SCRIPT = "apex_all.py"


@pytest.fixture(scope="module")
def runs(processes, as_asked):
    asked = {"python": processes.plain(SCRIPT, "plain")}
    for level in ("O0", "O1", "O2"):
        options = f"-O {level}" if level != DEFAULT else ""
        for way in ("apex", "plain"):
            asked[level, way] = processes.mpx(options, SCRIPT, way)
    for way in ("apex", "plain"):
        asked["O3", way] = lambda way=way: processes.mpx("-O O3", SCRIPT, way)
    asked["python", "apex"] = processes.plain("apex_images.py", "--opt-level", "O2")
    return as_asked(asked)


@pytest.mark.parametrize("level", LEVELS)
def test_amp_changes_nothing_that_a_script_prints(runs, level):
    assert runs[level, "apex"].succeeded().stdout == runs[level, "plain"].succeeded().stdout


def test_level_0_prints_what_plain_python_prints_without_apex(runs):
    assert runs["O0", "apex"].stdout == runs["python"].succeeded().stdout
    assert len(runs["python"].lines) == 5 + 1 + 5 + 6


def test_the_levels_compute_otherwise(runs):
    """Else the comparisons above would say nothing."""
    printed = {runs[level, "apex"].stdout for level in ("O0", "O1", "O2")}
    assert len(printed) == 3


def test_steps_are_counted_and_losses_scaled_once(runs):
    record = runs["O2", "apex"].record
    assert record["steps"] == {"attempted": 18, "applied": 18, "skipped": 0}
    assert [(scaler["init"], scaler["backoffs"]) for scaler in record["scalers"]] == [(2.0**16, 0)] * 5


@pytest.mark.parametrize(
    ("level", "asked"),
    [
        ("O1", {"apex-asks-O2"}),
        ("O2", {"apex-asks-O1", "apex-asks-options"}),
        ("O0", {"apex-asks-O1", "apex-asks-O2"}),
    ],
)
def test_what_was_asked_for_and_is_not_done_is_told(runs, level, asked):
    told = {row["id"]: row["text"] for row in runs[level, "apex"].record["substitutions"]}
    assert {name for name in told if name.startswith("apex-asks-")} == asked
    assert told["apex-amp"].startswith("apex.amp is mpx's")
    assert "apex-register-einsum" in told
    if level == "O2":
        assert told["apex-asks-options"].endswith(
            "asks apex.amp for O2, loss_scale=128.0: the run is at O2, loss_scale=dynamic"
        )


def test_a_run_without_a_level_says_what_the_script_wants(runs):
    """The default is O1, and the script's own word is not taken for the command line's; but it is worth saying."""
    record = runs[DEFAULT, "apex"].record
    assert record["origin"]["name"] == "default"
    (finding,) = [found for found in record["findings"] if found["id"] == "apex-level"]
    assert "O2" in finding["text"]
    assert "-O O2" in finding["hint"]
    assert "apex-level" not in {found["id"] for found in runs["O2", "apex"].record["findings"]}


def test_plain_python_says_what_it_always_said(runs):
    assert runs["python", "apex"].returncode == 1
    assert "Please install apex" in runs["python", "apex"].stderr
