"""A comparison as one HTML page: the verdict with its reason, the table, and the curves."""

from __future__ import annotations

from mpx.report.compare.charts import comparison_charts
from mpx.report.compare.levels import Comparison, Issue
from mpx.report.compare.words import noise_in_words, rows_of
from mpx.report.formats.html_page import charted, document, footer, header, section, table
from mpx.report.formats.options import Options
from mpx.report.headline import SEVERITY_WORDS
from mpx.report.markup import Markup, tag, with_code
from mpx.report.wording import count

__all__ = ["page"]


def page(comparison: Comparison, options: Options) -> str:
    """Return the page."""
    levels = comparison.levels
    title, state = "no verdict", "error"
    if comparison.verdict is not None:
        staying = comparison.verdict == comparison.baseline
        title, state = f"{'stay on' if staying else 'take'} {comparison.verdict}", "info" if staying else "ok"
    facts = [
        f"{', '.join(result.level for result in levels)}",
        count(sum(result.runs for result in levels), "run"),
        f"baseline {comparison.baseline}",
    ]
    return document(
        " · ".join(["mpx compare", title, *facts]),
        header("mpx compare", title, facts, state=state),
        tag("main", _verdict(comparison, state), _levels(comparison), charted(comparison_charts(comparison))),
        footer({"records": str(options.run_path) if options.run_path else None}),
    )


def _verdict(comparison: Comparison, state: str) -> Markup:
    first = tag(
        "li",
        tag("b", "verdict", class_="word"),
        tag("div", tag("p", with_code(comparison.reason))),
        class_=f"is-{state}",
    )
    items = [_issue(issue) for issue in comparison.issues]
    return section("verdict", "What it means", tag("ul", first, *items, class_="findings"))


def _issue(issue: Issue) -> Markup:
    word = tag("b", SEVERITY_WORDS.get(issue.severity, issue.severity), class_="word")
    text = tag("p", with_code(f"`{issue.level}`: {issue.id}: {issue.text}"))
    return tag("li", word, tag("div", text), class_=f"is-{issue.severity}")


def _levels(comparison: Comparison) -> Markup:
    noise = noise_in_words(comparison)
    turned = list(
        zip(*rows_of(comparison), strict=True)
    )  # a column a level: there are fewer of them than measures
    parts = [tag("div", table("levels", turned), class_="wide")]
    if noise is not None:
        parts.append(tag("p", with_code(noise), class_="evidence"))
    return section("levels", "The levels", *parts)
