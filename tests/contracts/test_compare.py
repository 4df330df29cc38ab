"""`mpx compare` and `mpx diff` in real processes: the launch is that of `mpx run`, and stdout is the comparison's."""

import json
import re

import pytest

SCRIPT = """
import sys, torch
print("arguments", sys.argv[1:])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(30):
    data = torch.randn(16, 8)
    loss = torch.nn.functional.cross_entropy(model(data), (data.sum(1) > 0).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {number} accuracy: 0.{50 + number}")
"""


@pytest.fixture(scope="session")
def runs(processes, all_of, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    (folder / "train.py").write_text(SCRIPT)
    python, *mpx, _ = processes.command
    options = "--levels O0,O1 --repeat 1 --max-steps 20 --seed 3 --out out --metric accuracy.*"
    words = (python, *mpx, "compare", *options.split(), "train.py", "--max-steps", "7", "-m", "--", "x")
    compared = processes.start(words, cwd=folder).result()
    again = {
        "diff": processes.start(
            (python, *mpx, "diff", "out/1-1-O0", "out/1-2-O1", "--format", "json"), cwd=folder
        ),
        "wrong level": processes.start(
            (python, *mpx, "compare", "--levels", "O0,O7", "train.py"), cwd=folder
        ),
        "one level": processes.start((python, *mpx, "compare", "--levels", "O0", "train.py"), cwd=folder),
        "bad regex": processes.start((python, *mpx, "compare", "--metric", "(", "train.py"), cwd=folder),
        "no share": processes.start((python, *mpx, "compare", "--tolerance", "5x", "train.py"), cwd=folder),
        "nothing": processes.start((python, *mpx, "compare"), cwd=folder),
        "not empty": processes.start((python, *mpx, "compare", "--out", ".", "train.py"), cwd=folder),
    }
    return {"compare": compared, **all_of(again)}


def test_it_says_which_level_to_take(runs):
    run = runs["compare"].succeeded()
    assert re.search(r"^  O0 +1 +20 ", run.stdout.decode(), re.MULTILINE)
    assert re.search(r"^  O1 +1 +20 ", run.stdout.decode(), re.MULTILINE)
    assert "verdict: " in run.stdout.decode()


def test_the_script_has_its_own_arguments_and_its_output_is_kept(runs):
    folder = runs["compare"].folder / "out"
    for name in ("1-1-O0", "1-2-O1"):
        lines = (folder / f"{name}.stdout.txt").read_text().splitlines()
        assert lines[0] == "arguments ['--max-steps', '7', '-m', '--', 'x']"
        assert len(lines) == 1 + 19  # the last of 20 steps is where the budget ends
        assert "arguments" not in runs["compare"].stdout.decode()


def test_the_comparison_is_written_for_tools(runs):
    result = json.loads((runs["compare"].folder / "out" / "compare.json").read_text())
    base, half = result["levels"]
    assert (base["level"], half["level"], result["baseline"]) == ("O0", "O1", "O0")
    assert base["metric"] == half["metric"] == 0.68
    assert abs(half["final_gap"]) < 0.05
    assert half["speedup"] > 0
    assert result["verdict"] in ("O0", "O1")
    assert (runs["compare"].folder / "out" / "compare.md").read_text().startswith("### mpx: ")


def test_two_records_tell_the_same(runs):
    result = json.loads(runs["diff"].succeeded().stdout)
    compared = json.loads((runs["compare"].folder / "out" / "compare.json").read_text())
    for one, other in zip(result["levels"], compared["levels"], strict=True):
        assert {**one, "metric": None, "metric_gap": None} == {**other, "metric": None, "metric_gap": None}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wrong level", "O7"),
        ("one level", "at least two"),
        ("bad regex", "no regular expression"),
        ("no share", "no share"),
        ("nothing", "nothing to run"),
        ("not empty", "not empty"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(runs, name, says):
    assert runs[name].returncode == 2
    assert says in runs[name].stderr
    assert not runs[name].runs
