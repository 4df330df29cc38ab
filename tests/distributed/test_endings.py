"""A rank that has done its work ends well: threads of gloo's release what they hold before the interpreter is gone."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.dist

ASKS = """
import json, os, sys, time
import torch, torch.distributed as dist
from mpx.engine.start import let_gloo_finish
slept = []
time.sleep = slept.append
let_gloo_finish()
before = list(slept)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
replica(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
let_gloo_finish()
print(json.dumps([before, slept]), flush=True)
os._exit(0)  # this time nobody waits
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads have names in /proc")
def test_a_process_with_threads_of_gloo_lets_go_of_the_interpreter_before_it_ends(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ASKS, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    before, slept = json.loads(done.stdout.splitlines()[-1])  # else: stderr says why
    assert not before
    assert slept == [0.005], done.stderr
