"""What a record means and how it is shown. Never imports torch."""

from mpx.report.checks import findings, with_findings
from mpx.report.formats import FORMATS, Options, render

__all__ = ["FORMATS", "Options", "findings", "render", "with_findings"]
