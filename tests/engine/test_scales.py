"""Which scale a pass runs with: that of its line in the script, begun where something is known of such a loss."""

import os
from pathlib import Path

import pytest
import torch

from mpx.engine.scales import caller_site

LIBRARY = "/usr/lib/python3/site-packages/trainer/loop.py"
SCRIPT = "/home/user/project/train.py"


def scalers(recorded):
    return [(scaler["init"], scaler["final"]) for scaler in recorded.summary["scalers"]]


def leaf():
    return torch.zeros((), requires_grad=True)


def test_a_line_keeps_its_scale_and_another_begins_where_a_like_loss_is(at_level):
    """A script may differentiate one loss in several places: it looks for its range once."""
    with at_level("O1", "loss_scale.growth_interval=1", "loss_scale.init=2") as recorded:
        for _ in range(3):
            leaf().exp().backward()
        leaf().exp().backward()
        leaf().sin().backward()
        assert scalers(recorded) == [(2.0, 16.0), (16.0, 32.0), (2.0, 4.0)]


def test_a_ceiling_comes_with_the_first_half_loss(at_level):
    with at_level("O1") as recorded:
        for dtype in (torch.float32, torch.float16, torch.float32):
            torch.zeros((), dtype=dtype, requires_grad=True).exp().backward()
        (scaler,) = recorded.summary["scalers"]
    assert scaler["history"] == [[0, 2.0**16], [1, 2.0**15]]


def call(*files):
    """Call `caller_site` from functions that seem to lie in these files, the innermost last."""
    function = caller_site
    for line, file in enumerate(reversed(files), start=1):
        namespace = {"inner": function}
        exec(compile("\n" * (10 * line - 1) + "def f(): return inner()", file, "exec"), namespace)
        function = namespace["f"]
    return function()


SITES = {
    "the script": ((SCRIPT,), "train.py:10"),
    "the innermost of the script's files": ((SCRIPT, "/home/user/project/losses.py"), "losses.py:10"),
    "past torch and mpx": ((SCRIPT, str(Path(torch.__file__).parent / "_tensor.py")), "train.py:20"),
    "a library, as the script came to it": ((SCRIPT, LIBRARY), "train.py:20 (loop.py:10)"),
    "also through several": ((SCRIPT, LIBRARY, os.__file__, LIBRARY), "train.py:40 (loop.py:10)"),
    "a package whose name begins as torch's": (
        (SCRIPT, str(Path(torch.__file__).parent) + "vision/train.py"),
        "train.py:20 (train.py:10)",
    ),
    "what has no file": (("<stdin>",), "<stdin>:10"),
}


@pytest.mark.parametrize("case", SITES)
def test_a_call_site_is(case):
    files, expected = SITES[case]
    assert call(*files) == expected


def test_two_losses_that_a_trainer_differentiates_are_told_apart(at_level):
    with at_level("O1") as recorded:
        namespace = {}
        exec(compile("def step(loss): loss.backward()", LIBRARY, "exec"), namespace)
        namespace["step"](leaf().exp())
        namespace["step"](leaf().sin())
        first, second = [scaler["site"] for scaler in recorded.summary["scalers"]]
    assert first != second
    assert first.endswith("(loop.py:1)")
