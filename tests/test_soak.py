"""`scripts/soak.py` works, on a run that is short: the long one is started by hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_a_short_soak_neither_grows_nor_fills_the_disk():
    command = [sys.executable, "scripts/soak.py", "--steps", "3000", "--sample-every", "0.3"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "the record took" in done.stdout
