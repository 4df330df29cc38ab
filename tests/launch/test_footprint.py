"""What mpx loads into a process that trains: each module is time before the first step, and memory until the last.

Counted, it is the same on every machine.
"""

import json

import pytest

TRAINS = """
import gc, json, sys

ours = []

def collected(phase, info):
    frame = sys._getframe(1)
    while phase == "start" and frame is not None:
        if "/mpx/engine/" in frame.f_code.co_filename:
            ours.append(info["generation"])
            break
        frame = frame.f_back

gc.callbacks.append(collected)
import torch

gc.callbacks.remove(collected)
collects = gc.isenabled()
functions = [made for age in (0, 1) for made in gc.get_objects(generation=age) if hasattr(made, "__code__")]
young = [made.__name__ for made in functions if str(made.__module__).startswith("mpx.engine")]
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    net(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
print(json.dumps({"modules": sorted(sys.modules), "collects": collects, "collections in ours": ours, "young": young}))
"""

# Beyond what torch and the script load; `resource` tells peak memory, `sitecustomize` is the start-up folder's.
PACKAGES = {"mpx", "resource", "sitecustomize"}
OF_TORCH = {"torch.utils.flop_counter", "torch.utils.module_tracker"}
# What finds the run and reads its preset, of the half that also writes presets and draws reports.
OF_OURS = {
    "mpx.launch": {"elastic", "join", "own_frames", "torch_import"},
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


def test_joining_a_run_collects_no_garbage_and_leaves_the_collector_on(seen):
    """A full collection with torch loaded takes longer than everything else that happens there."""
    _, ours = seen
    assert ours["collections in ours"] == []
    assert ours["collects"]


def test_what_a_session_is_made_of_brings_no_full_collection_nearer(seen):
    """The collector decides by what has become old since the last one."""
    _, ours = seen
    assert ours["young"] == []


def test_what_the_script_froze_stays_frozen(shared_shell):
    text = "import gc\ngc.freeze()\nimport torch\nprint(gc.get_freeze_count() > 0)\n"
    script = shared_shell.script("froze.py", text)
    assert shared_shell.mpx("-qq", "--out", "froze", script).stdout == b"True\n"


def test_a_collector_that_the_script_turned_off_stays_off(shared_shell):
    script = shared_shell.script("off.py", "import gc\ngc.disable()\nimport torch\nprint(gc.isenabled())\n")
    assert shared_shell.mpx("-qq", "--out", "off", script).stdout == b"False\n"
