"""A script that trains nothing runs at every level: answers in FP32, near FP32's, and a report that says so."""

from functools import partial

import pytest

LEVELS = ("O0", "O1", "O1-bf16", "O2", "O3")
SLOW = {"O2-bf16": "-O O2-bf16", "O3-bf16": "-O O3 --dtype bfloat16"}
WAYS = ("eval", "no_grad", "inference_mode")


@pytest.fixture(scope="session")
def runs(processes, as_asked):
    asked = {"plain": processes.plain("infer.py", "out.pt")}
    asked |= {level: processes.mpx(f"-O {level}", "infer.py", "out.pt") for level in LEVELS}
    asked |= {name: partial(processes.mpx, options, "infer.py", "out.pt") for name, options in SLOW.items()}
    return as_asked(asked)


@pytest.fixture(scope="session")
def answers(runs):
    import torch

    return lambda name: torch.load(runs[name].succeeded().folder / "out.pt")


@pytest.fixture(params=[*LEVELS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def level(request):
    return request.param


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_float32_and_near_those_of_plain_python(answers, level, way, identical):
    import torch

    ours, plain = answers(level)[way], answers("plain")[way]
    if level == "O0":
        assert identical(ours, plain)
        return
    for name, value in ours.items():
        assert value.dtype == torch.float32
        error = (value - plain[name]).abs().max() / plain[name].abs().max()
        assert 0 < error < (0.05 if "bf16" in level else 0.005)


def test_the_script_sees_what_python_shows(runs, level):
    """Weights in FP32 (half at O3, where they are), and graphs only where the script wants them."""
    state, *rest = runs[level].lines
    plain, *expected = runs["plain"].lines
    assert rest == expected
    if "O3" not in level:
        assert state == plain
    else:
        assert ("torch.bfloat16" if "bf16" in level else "torch.float16") in state


def test_the_report_says_that_nothing_was_trained(runs, level):
    record = runs[level].record
    assert (record["backwards"], record["steps"]["attempted"]) == (0, 0)
    assert record["forwards"] == 6
    assert (record["scalers"], record["overflows"]) == ([], [])
    assert any("nothing was trained" in finding["text"] for finding in record["findings"])
    assert any("nothing was trained" in line for line in runs[level].report)
