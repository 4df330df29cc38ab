"""The torch half of mpx: what happens inside the process that trains."""

from mpx.engine.start import start

__all__ = ["start"]
