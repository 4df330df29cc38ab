"""The collector of cycles rests while torch is imported, and what a script makes is finalized as under plain python."""

import json

import pytest

IMPORTS = """
import gc, json
full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
{before}
thresholds = gc.get_threshold()
{imports}
during = len(full)
class Loop:
    def __init__(self): self.me = self
    def __del__(self): finalized.append(1)
finalized = []
Loop()
gc.collect()
print(json.dumps({{
    "full": during, "frozen": gc.get_freeze_count() > 1000, "thresholds": list(thresholds) == list(gc.get_threshold()),
    "enabled": gc.isenabled(), "finalized": len(finalized),
}}))
"""
AT_THE_TOP = "import torch"
IN_A_FUNCTION = "def load():\n    import torch\nload()"
BESIDE_A_THREAD = """
import threading
goes_on = threading.Event()
other = threading.Thread(target=goes_on.wait)
other.start()
import torch
goes_on.set()
other.join()
"""


@pytest.fixture
def told(shared_shell):
    def told(imports, before=""):
        script = shared_shell.script("imports.py", IMPORTS.format(before=before, imports=imports))
        outcome = shared_shell.mpx("-qq", script)
        assert outcome.returncode == 0, outcome.text
        return json.loads(outcome.stdout)

    return told


def test_torch_is_imported_without_a_full_collection_and_frozen(told):
    expected = {"full": 0, "frozen": True, "thresholds": True, "enabled": True, "finalized": 1}
    assert told(AT_THE_TOP) == expected


@pytest.mark.parametrize("imports", [IN_A_FUNCTION, BESIDE_A_THREAD])
def test_nothing_is_frozen_where_more_than_modules_may_be_there(told, imports):
    expected = {"full": 0, "frozen": False, "thresholds": True, "enabled": True, "finalized": 1}
    assert told(imports) == expected


def test_a_collector_that_the_script_turned_off_stays_off(told):
    assert not told(AT_THE_TOP, "gc.disable()")["enabled"]
    assert not told(AT_THE_TOP, "gc.set_threshold(0)")["full"]


def test_what_the_script_froze_stays_frozen(told):
    assert told(IN_A_FUNCTION, "gc.freeze()")["frozen"]


KEEPS_A_FILE = """
import gc, sys
class Tee:
    def __init__(self, path):
        self.file = open(path, "w")
        self.write = self.written  # a cycle: nothing but the collector frees it
    def written(self, text):
        self.file.write(text)
tee = Tee("tee.txt")
{then}
tee.write("to the end")
"""


@pytest.mark.parametrize(
    ("then", "text"),
    [
        ("import torch", "to the end"),
        ("import torch; gc.freeze()", ""),  # by the script, and so under plain python
    ],
)
def test_an_object_from_before_torch_is_finalized_at_the_end_as_under_plain_python(shell, then, text):
    script = shell.script("keeps.py", KEEPS_A_FILE.format(then=then))
    for run in (shell.python, lambda script: shell.mpx("-qq", script)):
        outcome = run(script)
        assert outcome.returncode == 0, outcome.text
        assert (shell.cwd / "tee.txt").read_text() == text


def test_an_import_that_fails_leaves_the_collector_as_it_was(shell):
    shell.script("torch/__init__.py", "raise ImportError('no torch here')\n")
    text = """
import gc, json
before = gc.get_threshold()
try:
    import torch
except ImportError as error:
    print(json.dumps([str(error), gc.get_threshold() == before, gc.get_freeze_count()]))
"""
    outcome = shell.mpx("-qq", shell.script("fails.py", text))
    assert json.loads(outcome.stdout) == ["no torch here", True, 0], outcome.text
