"""The hook that waits for torch: it acts before the script can bind a name, and leaves nothing behind.

A package `torch` of two lines stands in for the real one: the hook knows it by its name alone.
"""

import json

import pytest

TORCH = """
import warnings
def linear(): return "plain"
warnings.warn("from the body of torch", stacklevel=2)
"""
# What `mpx run` does in a process, with another thing to do after the import.
FOLLOW = """
import sys
from mpx.launch.torch_import import TorchFinder
calls = []
def on_import():
    calls.append([f for f in sys.meta_path if isinstance(f, TorchFinder)])
    sys.modules["torch"].linear = lambda: "ours"
sys.meta_path.insert(0, TorchFinder(on_import))
"""


@pytest.fixture
def fake_torch(shell):
    shell.script("torch/__init__.py", TORCH)
    return shell


def told(shell, text, **options):
    outcome = shell.python(shell.script("asks.py", FOLLOW + text), **options)
    assert outcome.returncode == 0, outcome.text
    return json.loads(outcome.stdout)


def test_acts_before_the_script_binds_a_name_and_once(fake_torch):
    text = (
        "from torch import linear\nimport torch, json\nprint(json.dumps([linear(), torch.linear(), calls]))\n"
    )
    assert told(fake_torch, text) == ["ours", "ours", [[]]]


def test_leaves_torch_as_the_import_system_makes_it(fake_torch):
    text = """
import inspect, json, torch
spec = torch.__spec__
print(json.dumps([
    type(spec.loader).__name__, sorted(vars(spec.loader)), spec.loader is torch.__loader__,
    any(isinstance(f, TorchFinder) for f in sys.meta_path), inspect.getsource(torch).strip(),
]))
"""
    assert told(fake_torch, text) == ["SourceFileLoader", ["name", "path"], True, False, TORCH.strip()]


def test_to_look_for_torch_is_not_to_import_it(fake_torch):
    text = """
import importlib.util, json
found = [importlib.util.find_spec("torch").name for _ in range(2)]
before = len(calls)
import torch
print(json.dumps([found, before, len(calls)]))
"""
    assert told(fake_torch, text) == [["torch", "torch"], 0, 1]


def test_asks_the_finders_behind_it_also_when_they_ask_back(fake_torch):
    """As the hooks of some tracing tools do."""
    text = """
import importlib.util, json
class Asks:
    asking = False
    def find_spec(self, name, path=None, target=None):
        if name != "torch" or Asks.asking:
            return None
        Asks.asking = True
        return importlib.util.find_spec(name)
sys.meta_path.insert(1, Asks())
import torch
print(json.dumps([Asks.asking, len(calls)]))
"""
    assert told(fake_torch, text) == [True, 1]


def test_works_with_a_loader_that_another_tool_has_wrapped(fake_torch):
    text = """
import importlib.machinery, json
seen = []
class Wraps:
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            seen.append("theirs")
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(1, Wraps())
import torch
print(json.dumps([seen, len(calls), torch.__loader__.exec_module.__qualname__]))
"""
    assert told(fake_torch, text) == [["theirs"], 1, "Wraps.find_spec.<locals>.exec_module"]


def test_an_import_that_failed_can_be_repeated(shell):
    shell.script("torch/__init__.py", "import sys\nif not sys.path.pop():\n    raise OSError('no driver')\n")
    text = """
import json
sys.path += ["kept", ""]
try:
    import torch
except OSError:
    before = len(calls)
import torch
print(json.dumps([before, len(calls)]))
"""
    assert told(shell, text) == [0, 1]


@pytest.mark.parametrize(
    "error", ["OSError('no driver')", "ImportError('no library')", "KeyboardInterrupt()"]
)
def test_the_traceback_of_a_failed_import_is_as_under_python(shell, error):
    shell.script("torch/__init__.py", f"def load():\n    raise {error}\nload()\n")
    script = shell.script("trains.py", "def main():\n    import torch\nmain()\n")
    plain = shell.python(script)
    ours = shell.mpx("-qq", "-O", "O0", script)
    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr)


def test_a_warning_in_the_body_of_torch_points_to_the_script(fake_torch):
    text = "import torch\nprint(1)\n"
    plain = fake_torch.python(fake_torch.script("asks.py", "\n" * FOLLOW.count("\n") + text))
    ours = fake_torch.python(fake_torch.script("asks.py", FOLLOW + text))
    assert ours.stderr == plain.stderr
    assert b"asks.py" in ours.stderr
