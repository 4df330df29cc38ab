"""Who was sent a signal: the group or one process. Asked in a process of its own, which leads a group of its own."""

import json
import subprocess
import sys

import pytest

QUESTIONS = """
import json, os, signal
from pathlib import Path
from mpx.launch.witness import Witness

number = signal.SIGINT
signal.pthread_sigmask(signal.SIG_BLOCK, {number})
witness = Witness({number})
told = {"nothing": witness.saw(number)}
os.kill(os.getpid(), number)
told["one"] = witness.saw(number)
os.killpg(0, number)
told["group"] = witness.saw(number)
told["group, asked again"] = witness.saw(number)
(child,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
os.kill(int(child), signal.SIGKILL)
os.waitpid(int(child), 0)
told["gone"] = witness.saw(number)
os.fork = lambda: (_ for _ in ()).throw(BlockingIOError())
told["never there"] = Witness({number}).saw(number)
print(json.dumps(told))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="its process is found in /proc")
def test_the_witness_tells_a_group_from_one_process():
    done = subprocess.run(
        [sys.executable, "-c", QUESTIONS], capture_output=True, text=True, check=True, start_new_session=True
    )
    assert json.loads(done.stdout) == {
        "nothing": False,
        "one": False,
        "group": True,
        "group, asked again": False,
        "gone": None,
        "never there": None,
    }
