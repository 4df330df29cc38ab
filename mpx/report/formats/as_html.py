"""The report as one HTML page: no network, readable without a script, by a screen reader and on paper."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from mpx.record.model import RunRecord
from mpx.record.parts import Finding
from mpx.report.charts import Chart, charts, draw, legend
from mpx.report.formats.options import Options
from mpx.report.formats.rows import ROWS, Style
from mpx.report.formats.tables import TABLES, numeric_columns
from mpx.report.headline import ALL_CLEAR, SEVERITY_WORDS, all_clear, headline
from mpx.report.markup import Markup, tag, with_code

__all__ = ["as_html"]

_PAGE = Path(__file__).parent / "page"


def as_html(record: RunRecord, options: Options) -> str:
    """Return the page. Nothing in it is loaded from elsewhere: its content security policy forbids that."""
    style, script = _part("style.css"), _part("script.js")
    policy = f"default-src 'none'; style-src {_hashed(style)}; script-src {_hashed(script)}; img-src data:"
    title = " · ".join(["mpx", *headline(record)])
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        Markup("\n"),
        tag("style", Markup(style)),
    )
    drawn = charts(record)
    body = tag(
        "body",
        _header(record),
        tag("main", _findings(record), _facts(record), _charts(drawn), _tables(record)),
        _footer(record, options),
        tag("script", Markup(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}"


def _header(record: RunRecord) -> Markup:
    level, *facts = headline(record)
    gravest = record.findings[0].severity if record.findings else "info"
    state = "ok" if all_clear(record) else gravest
    spans = [tag("li", fact) for fact in facts]
    return tag(
        "header", tag("h1", "mpx ", tag("b", level)), tag("ul", *spans, class_="facts"), class_=f"is-{state}"
    )


def _findings(record: RunRecord) -> Markup:
    items = [_finding(finding) for finding in record.findings]
    if all_clear(record):
        items.append(tag("li", tag("b", "ok", class_="word"), tag("p", ALL_CLEAR), class_="is-ok"))
    if not items:
        return Markup()
    return _section("findings", "What it means", tag("ul", *items, class_="findings"))


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
    return _section("facts", "What happened", tag("dl", *pairs)) if pairs else Markup()


def _charts(drawn: Sequence[Chart]) -> Markup:
    return _section("charts", "Over time", *(_figure(chart) for chart in drawn)) if drawn else Markup()


def _figure(chart: Chart) -> Markup:
    words = [with_code(chart.summary), *([Markup(" "), chart.note] if chart.note else [])]
    return tag(
        "figure",
        tag("figcaption", tag("h3", chart.title), tag("p", *words)),
        legend(chart.plot),
        tag("div", draw(chart), class_="plot"),
        _folded(f"Values: {chart.title.lower()}", chart.table),
        id=chart.id,
    )


def _tables(record: RunRecord) -> Markup:
    made = [_folded(title, rows) for make in TABLES for title, rows in make(record)]
    return _section("tables", "In full", *made) if made else Markup()


def _footer(record: RunRecord, options: Options) -> Markup:
    device = record.device
    facts = {
        "command": " ".join(record.command),
        "started": record.started,
        "host": record.host,
        "device": (device.name or device.type) if device else None,
        "versions": ", ".join(
            f"{name} {version}"
            for name, version in (("mpx", record.mpx), ("torch", record.torch), ("Python", record.python))
            if version
        ),
        "record": str(options.run_path) if options.run_path else None,
    }
    pairs = [tag("div", tag("dt", name), tag("dd", text)) for name, text in facts.items() if text]
    return tag("footer", tag("dl", *pairs))


def _section(name: str, title: str, *parts: str) -> Markup:
    return tag("section", tag("h2", title, id=f"about-{name}"), *parts, aria_labelledby=f"about-{name}")


def _folded(title: str, rows: Sequence[tuple[str, ...]]) -> Markup:
    numeric = numeric_columns(rows)
    head, *rest = rows
    styles = ["number" if right else None for right in numeric]
    names = [tag("th", cell, scope="col", class_=style) for cell, style in zip(head, styles, strict=True)]
    lines = [
        tag("tr", *(tag("td", cell, class_=style) for cell, style in zip(row, styles, strict=True)))
        for row in rest
    ]
    table = tag("table", tag("thead", tag("tr", *names)), tag("tbody", *lines))
    return tag(
        "details",
        tag("summary", title),
        tag("div", table, class_="table", tabindex="0", role="region", aria_label=title),
    )


@cache
def _part(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _hashed(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
