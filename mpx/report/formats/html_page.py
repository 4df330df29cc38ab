"""What every page of ours is made of: one HTML file, readable without a script, by a screen reader and on paper.

Nothing in it is loaded from elsewhere: its content security policy forbids that.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from mpx.report.charts import Chart, draw, legend
from mpx.report.formats.tables import numeric_columns
from mpx.report.markup import Markup, tag, with_code

__all__ = ["charted", "document", "folded", "footer", "header", "section", "table"]

_PAGE = Path(__file__).parent / "page"


def document(title: str, *parts: str) -> str:
    """Return the page around its header, its sections and its footer."""
    style, script = _part("style.css"), _part("script.js")
    policy = f"default-src 'none'; style-src {_hashed(style)}; script-src {_hashed(script)}; img-src data:"
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
    body = tag("body", *parts, tag("script", Markup(script)))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}"


def header(of: str, name: str, facts: Sequence[str], *, state: str) -> Markup:
    """Return what a page says first: `name`, as the answer of `of`. `state` colours it: ok, info, warning or error."""
    spans = [tag("li", fact) for fact in facts]
    title = tag("h1", f"{of} ", tag("b", name))
    return tag("header", title, tag("ul", *spans, class_="facts"), class_=f"is-{state}")


def footer(facts: Mapping[str, str | None]) -> Markup:
    """Return where a page is from: what is known of `facts`."""
    pairs = [tag("div", tag("dt", name), tag("dd", text)) for name, text in facts.items() if text]
    return tag("footer", tag("dl", *pairs))


def section(name: str, title: str, *parts: str) -> Markup:
    """Return a part of a page under its title; `name` is unique on the page."""
    return tag("section", tag("h2", title, id=f"about-{name}"), *parts, aria_labelledby=f"about-{name}")


def charted(drawn: Sequence[Chart]) -> Markup:
    """Return the section of the charts; nothing without any."""
    return section("charts", "Over time", *(_figure(chart) for chart in drawn)) if drawn else Markup()


def folded(title: str, rows: Sequence[Sequence[str]]) -> Markup:
    """Return a table that opens on demand."""
    return tag("details", tag("summary", title), table(title, rows))


def table(title: str, rows: Sequence[Sequence[str]]) -> Markup:
    """Return a table; the first row names the columns."""
    numeric = numeric_columns([tuple(row) for row in rows])
    head, *rest = rows
    styles = ["number" if right else None for right in numeric]
    names = [tag("th", cell, scope="col", class_=style) for cell, style in zip(head, styles, strict=True)]
    lines = [
        tag("tr", *(tag("td", cell, class_=style) for cell, style in zip(row, styles, strict=True)))
        for row in rest
    ]
    whole = tag("table", tag("thead", tag("tr", *names)), tag("tbody", *lines))
    return tag("div", whole, class_="table", tabindex="0", role="region", aria_label=title)


def _figure(chart: Chart) -> Markup:
    words = [with_code(chart.summary), *([Markup(" "), chart.note] if chart.note else [])]
    return tag(
        "figure",
        tag("figcaption", tag("h3", chart.title), tag("p", *words)),
        legend(chart.plot),
        tag("div", draw(chart), class_="plot"),
        folded(f"Values: {chart.title[0].lower()}{chart.title[1:]}", chart.table),
        id=chart.id,
    )


@cache
def _part(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _hashed(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
