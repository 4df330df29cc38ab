"""HTML and SVG as text: what is not markup is escaped, wherever it came from."""

from __future__ import annotations

from html import escape

from mpx.report.wording import pieces, printable

__all__ = ["Markup", "tag", "with_code"]

_VOID = frozenset({"meta", "link", "br", "path", "line", "rect", "polyline"})
_INLINE = frozenset({"code", "span", "b", "a", "title", "desc", "text", "th", "td", "summary", "dt"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """Return an element. `class_`, `stroke_width` are the attributes `class`, `stroke-width`; None is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    end = "" if name in _INLINE else "\n"
    if name in _VOID and not children:
        close = "/>" if name not in ("meta", "link", "br") else ">"
        return Markup(f"<{name}{written}{close}{end}")
    inside = "".join(child if isinstance(child, Markup) else escape(printable(child)) for child in children)
    return Markup(f"<{name}{written}>{inside}</{name}>{end}")


def with_code(text: str) -> Markup:
    """Return a sentence with what stands between backticks as code."""
    parts = (
        tag("code", piece) if is_code else Markup(escape(printable(piece))) for piece, is_code in pieces(text)
    )
    return Markup("".join(parts))


def _value(value: str | float) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return escape(printable(str(value)))
