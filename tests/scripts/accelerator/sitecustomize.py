"""Makes the CPU of a process look like a device that the host does not wait for; leaves `fetched` where it fetched."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

NAME = "mpx.engine.devices"


def _patch(devices):
    def fetch(numbers):
        Path("fetched").touch()
        copy = numbers.clone()
        return copy.tolist

    devices.DEVICES["cpu"] = dataclasses.replace(devices.DEVICES["cpu"], fetch=fetch)


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _patch(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
