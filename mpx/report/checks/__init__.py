"""What a record means, in sentences that say whether it is normal. A module here enters its checks on import."""

from mpx.report.checks import apex, ending, instrumentation, limits, ranks, scale, values, weights
from mpx.report.checks.registry import CHECKS, SEVERITIES, check, findings, with_findings

__all__ = [
    "CHECKS",
    "SEVERITIES",
    "apex",
    "check",
    "ending",
    "findings",
    "instrumentation",
    "limits",
    "ranks",
    "scale",
    "values",
    "weights",
    "with_findings",
]
