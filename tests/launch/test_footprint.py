"""What mpx loads into a process that trains: each module is time before the first step, and memory until the last.

Counted, it is the same on every machine.
"""

import json

import pytest

TRAINS = """
import gc, json, sys

import torch

functions = [made for age in (0, 1) for made in gc.get_objects(generation=age) if hasattr(made, "__code__")]
young = [made.__name__ for made in functions if str(made.__module__).startswith("mpx.engine")]
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    net(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
print(json.dumps({"modules": sorted(sys.modules), "young": young}))
"""

# Beyond what torch and the script load; `resource` tells peak memory, `sitecustomize` is the start-up folder's.
PACKAGES = {"mpx", "resource", "sitecustomize"}
OF_TORCH = {"torch.utils.flop_counter", "torch.utils.module_tracker"}
# What finds the run and reads its preset, of the half that also writes presets and draws reports.
OF_OURS = {
    "mpx.launch": {"collector", "elastic", "join", "own_frames", "torch_import"},
    "mpx.presets": {"groups", "policy"},
    "mpx.record": {"codec", "directory", "find", "retention", "series", "shards"},
    "mpx.report": set(),
    "mpx.cli": set(),
    "mpx.apex": set(),
}


@pytest.fixture(scope="module", params=["O0", "O1", "O2"])
def seen(request, shared_shell):
    """What the script says under plain python and under mpx."""
    script = shared_shell.script("trains.py", TRAINS)
    plain = shared_shell.python(script)
    ours = shared_shell.mpx("-qq", "-O", request.param, "--out", request.param, script)
    assert (plain.returncode, ours.returncode) == (0, 0), ours.text
    return json.loads(plain.stdout), json.loads(ours.stdout)


def test_a_process_that_trains_loads_little_more(seen):
    plain, ours = (set(outcome["modules"]) for outcome in seen)
    added = ours - plain
    assert {name.partition(".")[0] for name in added if not name.startswith("torch.")} <= PACKAGES
    assert {name for name in added if name.startswith("torch.")} <= OF_TORCH
    for part, expected in OF_OURS.items():
        below = {name.removeprefix(f"{part}.") for name in added if name.startswith(f"{part}.")}
        assert below == expected, part


def test_a_process_that_compiles_nothing_does_not_load_the_compiler(seen):
    """torch does, with the first optimizer: 70 MiB and half a second."""
    plain, ours = (set(outcome["modules"]) for outcome in seen)
    assert "torch._dynamo" in plain
    assert "torch._dynamo" not in ours
    assert len(plain) - len(ours) > 500


def test_what_a_session_is_made_of_brings_no_full_collection_nearer(seen):
    """The collector decides by what has become old since the last one."""
    _, ours = seen
    assert ours["young"] == []
