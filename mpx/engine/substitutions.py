"""What mpx replaced, could not do, or did otherwise: told once each, with how often."""

from __future__ import annotations

from typing import Any

__all__ = ["Substitutions"]

MOST = 100  # different ones; a name that changes with every call must not grow the record


class Substitutions:
    """Counts by id."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Any]] = {}  # id -> [text, count]

    def tell(self, name: str, text: str) -> None:
        """Count one more use of the substitution `name`."""
        row = self._rows.get(name)
        if row is not None:
            row[1] += 1
        elif len(self._rows) < MOST:
            self._rows[name] = [text, 1]

    def told(self, *names: str) -> bool:
        """Whether any of these was told."""
        return any(name in self._rows for name in names)

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the record's `substitutions`."""
        return [{"id": name, "text": text, "count": count} for name, (text, count) in self._rows.items()]
