"""Scripts that import the real torch, launched as users do. Each costs seconds: what needs none is elsewhere."""

import json

import pytest

SMALL = """
import inspect, json, sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x):
        if len(x) == 3:
            raise RuntimeError("a batch of three")
        return self.layer(x)

if __name__ == "__main__":
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        loss = net(torch.randn(2, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    loader = torch.__spec__.loader
    print(type(loader).__name__, sorted(vars(loader)), len(inspect.getsource(torch)))
    # some finders wait for modules that this script never imports
    finders = [getattr(f, '__name__', type(f).__name__) for f in sys.meta_path]
    print([name for name in finders if name not in ('AfterImport', 'ApexFinder')])
"""


def test_a_script_trains_and_its_error_is_shown_as_by_python(shell):
    script = shell.script("trains.py", SMALL + "    net(torch.randn(3, 4))\n")
    plain = shell.python(script)
    ours = shell.mpx("-O", "O0", "--require-instrumented", script)
    assert (ours.returncode, ours.stdout) == (1, plain.stdout)
    assert ours.stderr.startswith(plain.stderr)
    assert b"a batch of three" in plain.stderr
    record = ours.record
    assert (record["status"], record["backwards"], record["steps"]["applied"]) == ("failed", 3, 3)
    assert [process["ended"] for process in record["processes"]] == [True]


@pytest.mark.parametrize("first", ["mpx.engine.session", "mpx.monitors.coverage"])
def test_a_script_may_import_a_part_of_ours_that_imports_torch_before_torch(shell, first):
    script = shell.script("trains.py", f"import {first}\n" + SMALL)
    ours = shell.mpx("-O", "O1", "--require-instrumented", script)
    assert ours.returncode == 0, ours.stderr
    assert ours.record["backwards"] == 3


def test_an_error_inside_backward_is_shown_as_by_python(shell):
    """Backward and step go through functions of ours at every level that scales."""
    script = shell.script("trains.py", SMALL + "    net(torch.randn(2, 4)).backward()\n")
    plain = shell.python(script)
    ours = shell.mpx("-qq", "-O", "O2", script)
    assert ours.returncode == 1
    assert ours.stderr == plain.stderr
    assert b"grad can be implicitly created only for scalar outputs" in plain.stderr


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_worker_that_a_script_starts_is_followed_to_its_end(shell, method):
    """Longer than any worker here lives, no snapshot is due: what counts is what it leaves when it ends."""
    text = """
import multiprocessing, sys
import torch

def train():
    layer = torch.nn.Linear(4, 2)
    layer(torch.randn(2, 4)).sum().backward()

if __name__ == "__main__":
    torch.set_num_threads(1)
    child = multiprocessing.get_context(sys.argv[1]).Process(target=train)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""
    ours = shell.mpx(
        "-q", "-O", "O0", "--set", "flush_interval_s=600", shell.script("starts.py", text), method
    )
    assert ours.returncode == 0, ours.text
    (worker,) = [process for process in ours.record["processes"] if process["trained"]]
    assert (worker["forwards"], worker["backwards"], worker["ended"]) == (1, 1, True)


@pytest.mark.slow
def test_a_killed_script_leaves_what_it_had_flushed(shell):
    text = SMALL + "    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    text = text.replace("range(3)", "range(10_000)").replace("print(repr(loss.item()))", "pass")
    ours = shell.mpx("-O", "O0", "--set", "flush_interval_s=0.1", shell.script("dies.py", text))
    assert ours.returncode == -9
    assert ours.record["backwards"] > 0
    assert json.loads((ours.runs[0] / "run.json").read_text())["signal"] == "SIGKILL"
