"""Numbers as words: every number of a report has its unit, and reads the same everywhere."""

from __future__ import annotations

import math

__all__ = [
    "amount",
    "bytes_",
    "code",
    "count",
    "loss",
    "milliseconds",
    "percent",
    "pieces",
    "plural",
    "printable",
    "scale",
    "seconds",
    "setting",
    "share",
    "times",
]

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def amount(number: int) -> str:
    """Return `1,200`."""
    return f"{number:,}"


def count(number: int, noun: str) -> str:
    """Return `1 step` or `1,200 steps`."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Return `steps`, `passes`, `entries`."""
    if noun.endswith("ss"):
        return noun + "es"
    return noun[:-1] + "ies" if noun.endswith("ry") else noun + "s"


def times(number: int) -> str:
    """Return `once` or `1,200 times`."""
    return "once" if number == 1 else f"{number:,} times"


def share(part: int, whole: int, noun: str) -> str:
    """Return `3 of 1,200 steps (0.25 %)`; `noun` in the singular."""
    text = f"{part:,} of {count(whole, noun)}"
    return f"{text} ({percent(part / whole)})" if whole else text


def percent(fraction: float) -> str:
    """Return `0.25 %` for 0.0025: three digits that count, and neither 0 nor 100 for what is only near them."""
    value = 100 * fraction
    if value in (0, 100):
        return f"{value:.0f} %"
    if value < 0.01:
        return "less than 0.01 %"
    if value > 99.9:
        return "more than 99.9 %"
    return f"{value:.2f} %" if value < 1 else f"{value:.1f} %"


def seconds(value: float) -> str:
    """Return `0.42 s`, `45.2 s`, `3 min 12 s` or `2 h 05 min`."""
    if value < 10:
        return f"{value:.2f} s"
    if value < 59.95 or not math.isfinite(value):
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def milliseconds(value: float) -> str:
    """Return `24.1 ms`, with three digits that count; from 1 s on in seconds."""
    if value >= 1000:
        return seconds(value / 1000)
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def bytes_(value: int) -> str:
    """Return `412 MiB`."""
    power = min(len(_BYTES) - 1, max(0, (value.bit_length() - 1) // 10))
    number = value / 1024**power
    return f"{number:.0f} {_BYTES[power]}" if number >= 100 or power == 0 else f"{number:.3g} {_BYTES[power]}"


def scale(value: float) -> str:
    """Return a loss scale: `65536`, and as a power of two where the digits would say less: `2^-14`."""
    if not math.isfinite(value) or value <= 0:
        return str(value)
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5 and not 0 <= exponent - 1 <= 24:
        return f"2^{exponent - 1}"
    return f"{value:.0f}" if value.is_integer() else f"{value:g}"


def setting(value: float) -> str:
    """Return a power of two as `--set` takes it, exactly: `8192`, `2**-14`."""
    return scale(value).replace("^", "**")


def loss(value: float) -> str:
    """Return the value of a loss with five digits that count."""
    return f"{value:.5g}"


def code(text: str) -> str:
    """Return `text` between backticks, fit for a line: without line breaks or control characters."""
    return f"`{printable(text)}`"


def printable(text: str) -> str:
    """Return `text` with what would move the cursor or colour a terminal made visible."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def pieces(text: str) -> list[tuple[str, bool]]:
    """Return `text` cut at its backticks: each piece with whether it is code; a backtick without a partner is text."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        parts[-2:] = [f"{parts[-2]}`{parts[-1]}"]
    return [(part, index % 2 == 1) for index, part in enumerate(parts) if part]
