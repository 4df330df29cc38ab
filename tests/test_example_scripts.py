"""The example scripts are what users have: plain FP32 PyTorch that repeats itself, resumes and learns."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
SMALL = ["--layers", "2", "--channels", "32", "--sample", "20", "--eval-batches", "2", "--device", "cpu"]


def output(script: str, *arguments: str) -> list[str]:
    """Return the lines a script prints under plain python, where a warning is an error, on one thread."""
    command = [sys.executable, "-W", "error", str(SCRIPTS / script), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def values(lines: list[str], name: str) -> list[float]:
    return [float(found[1]) for line in lines if (found := re.search(rf"{name} (\S+)", line))]


@pytest.mark.parametrize("script", ["train_gpt.py", "train_digits.py"])
def test_a_script_does_not_know_mpx(script):
    assert not re.search(r"mpx|autocast|GradScaler|\.half\(|float16", (SCRIPTS / script).read_text())


def test_gpt_learns_repeats_itself_and_resumes_bit_for_bit(tmp_path):
    checkpoint = str(tmp_path / "half.pt")
    whole = output("train_gpt.py", "--steps", "60", *SMALL)
    first = output("train_gpt.py", "--steps", "30", "--decay-steps", "60", "--out", checkpoint, *SMALL)
    rest = output("train_gpt.py", "--steps", "60", "--resume", checkpoint, *SMALL)
    assert first[1:4] == whole[1:4]  # steps 0, 10 and 20
    assert rest[1:] == whole[4:]  # steps 30 to 59, the validation and the sample
    losses = values(whole, "step +[0-9]+  loss")
    assert losses[0] > 4.5  # ln(103) = 4.63: it knows nothing
    assert values(whole, "val loss")[-1] < 3.5


def test_digits_learns_and_repeats_itself(tmp_path):
    arguments = ["--epochs", "4", "--width", "16", "--device", "cpu"]
    lines = output("train_digits.py", *arguments)
    assert output("train_digits.py", *arguments) == lines
    assert values(lines, "test accuracy")[-1] > 0.9


def test_digits_stops_after_the_steps_it_was_given(tmp_path):
    lines = output("train_digits.py", "--steps", "3", "--log-every", "1", "--width", "8", "--device", "cpu")
    assert len(values(lines, "loss")) == 3
