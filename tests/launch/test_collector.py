"""The collector of cycles rests while torch is imported, and is as the script left it afterwards."""

import json

import pytest

IMPORTS = """
import gc, json, socket
full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
class Loop:
    def __init__(self): self.me = self
    def __del__(self): finalized.append(1)
finalized = []
before = Loop()
{before}
thresholds = gc.get_threshold()
import torch
during = len(full)
del before
Loop()
gc.collect()
print(json.dumps({{
    "full": during, "frozen": gc.get_freeze_count() > 0, "thresholds": list(thresholds) == list(gc.get_threshold()),
    "enabled": gc.isenabled(), "finalized": len(finalized),
}}))
"""
AS_IT_WAS = {"full": 0, "frozen": False, "thresholds": True, "enabled": True, "finalized": 2}


@pytest.mark.parametrize(
    ("before", "differs"),
    [
        ("", {}),
        ("gc.set_threshold(300, 5, 7)", {}),
        ("gc.set_threshold(0)", {}),
        ("gc.disable()", {"enabled": False}),
        ("gc.freeze()", {"frozen": True, "finalized": 1}),  # it froze one of its own objects
    ],
)
def test_torch_is_imported_without_a_full_collection(shell, before, differs):
    script = shell.script("imports.py", IMPORTS.format(before=before))
    outcome = shell.mpx("-qq", script)
    assert outcome.returncode == 0, outcome.text
    assert json.loads(outcome.stdout) == AS_IT_WAS | differs


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
