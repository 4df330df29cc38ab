"""Gates: what a run may do and still pass, as expressions that are read and checked before a script starts."""

from mpx.gates.expression import Gate, GateError, parse_gate
from mpx.gates.measures import MEASURES, Kind, Measure

__all__ = ["MEASURES", "Gate", "GateError", "Kind", "Measure", "parse_gate"]
