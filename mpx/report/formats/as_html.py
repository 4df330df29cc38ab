"""The report as one HTML page."""

from __future__ import annotations

from mpx.record.model import RunRecord
from mpx.record.parts import Finding
from mpx.report.charts import charts
from mpx.report.formats.html_page import charted, document, folded, footer, header, section
from mpx.report.formats.options import Options
from mpx.report.formats.rows import ROWS, Style
from mpx.report.formats.tables import TABLES
from mpx.report.headline import ALL_CLEAR, SEVERITY_WORDS, all_clear, headline
from mpx.report.markup import Markup, tag, with_code

__all__ = ["as_html"]


def as_html(record: RunRecord, options: Options) -> str:
    """Return the page."""
    return document(
        " · ".join(["mpx", *headline(record)]),
        _header(record),
        tag("main", _findings(record), _facts(record), charted(charts(record)), _tables(record)),
        _footer(record, options),
    )


def _header(record: RunRecord) -> Markup:
    level, *facts = headline(record)
    gravest = record.findings[0].severity if record.findings else "info"
    return header("mpx", level, facts, state="ok" if all_clear(record) else gravest)


def _findings(record: RunRecord) -> Markup:
    items = [_finding(finding) for finding in record.findings]
    if all_clear(record):
        items.append(tag("li", tag("b", "ok", class_="word"), tag("p", ALL_CLEAR), class_="is-ok"))
    if not items:
        return Markup()
    return section("findings", "What it means", tag("ul", *items, class_="findings"))


def _finding(finding: Finding) -> Markup:
    parts = [tag("p", with_code(finding.text))]
    if finding.hint:
        parts.append(tag("p", tag("b", "Try: "), with_code(finding.hint), class_="hint"))
    if finding.evidence:
        parts.append(tag("p", tag("b", "Evidence: "), with_code(finding.evidence), class_="evidence"))
    word = tag("b", SEVERITY_WORDS.get(finding.severity, finding.severity), class_="word")
    return tag("li", word, tag("div", *parts), class_=f"is-{finding.severity}")


def _facts(record: RunRecord) -> Markup:
    rows = [row for make in ROWS for row in make(record, Style(unicode=True, histories=False))]
    pairs = [
        tag("div", tag("dt", row.label), tag("dd", with_code(" · ".join(row.parts))), class_="fact")
        for row in rows
    ]
    return section("facts", "What happened", tag("dl", *pairs)) if pairs else Markup()


def _tables(record: RunRecord) -> Markup:
    made = [folded(title, rows) for make in TABLES for title, rows in make(record)]
    return section("tables", "In full", *made) if made else Markup()


def _footer(record: RunRecord, options: Options) -> Markup:
    device = record.device
    versions = (("mpx", record.mpx), ("torch", record.torch), ("Python", record.python))
    return footer(
        {
            "command": " ".join(record.command),
            "started": record.started,
            "host": record.host,
            "device": (device.name or device.type) if device else None,
            "versions": ", ".join(f"{name} {version}" for name, version in versions if version),
            "record": str(options.run_path) if options.run_path else None,
        }
    )
