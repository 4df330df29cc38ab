"""The stand-in in this process: new for each session, as it is for each run."""

import importlib
import sys
from contextlib import contextmanager

import pytest


@pytest.fixture
def apex_at(at_level):
    """Return a context manager: `with apex_at("O1") as (apex, recorded):`, where `apex.amp` is the stand-in's."""

    class Apex:
        def __getattr__(self, name):
            return importlib.import_module(f"mpx.apex.{name}")

    @contextmanager
    def enter(*preset):
        def forget():
            for name in [name for name in sys.modules if name.startswith("mpx.apex.")]:
                del sys.modules[name]

        forget()
        with at_level(*preset) as recorded:
            yield Apex(), recorded
        forget()

    return enter
