"""Everything mpx refuses, as exceptions that know their exit code.

A message reads *what is wrong. Expected …. Received ….* in lower case; the hint is a command or an edit that
leads out. This module imports nothing but the standard library, so every other module may use it.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpx.values import frozen

__all__ = [
    "DeviceError",
    "LaunchError",
    "MpxError",
    "PresetError",
    "Problem",
    "RecordError",
    "UsageError",
    "render",
]


class MpxError(Exception):
    """A user's mistake, or a machine that cannot do what was asked: shown without a traceback."""

    exit_code: int = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(MpxError):
    """The command line cannot be understood."""

    exit_code = 2


class DeviceError(MpxError):
    """The device cannot do what the preset asks for."""

    exit_code = 3


class RecordError(MpxError):
    """A run directory cannot be written, found or read."""

    exit_code = 2


class LaunchError(MpxError):
    """The target cannot be started; the exit code is the one a shell would give."""

    def __init__(self, message: str, hint: str | None = None, *, exit_code: int = 2) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


@frozen
class Problem:
    """One mistake at one place: of a preset file, or of the command line.

    `where` is `file:line:column`, or the option that carries the mistake. `source` and `column` (from 1) are set
    for files and let the text show the line with a caret below the mistake.
    """

    where: str
    key: str
    what: str
    expected: str | None = None
    received: str | None = None
    suggestion: str | None = None
    source: str | None = None
    column: int | None = None

    def __str__(self) -> str:
        head = f"{self.where}  {self.key}: {self.what}" if self.key else f"{self.where}  {self.what}"
        sentences = [head]
        if self.expected is not None:
            sentences.append(f"Expected {self.expected}")
        if self.received is not None:
            sentences.append(f"Received {self.received}")
        text = ". ".join(sentences)
        if self.suggestion is not None:
            text += f"; {self.suggestion}"
        if self.source is not None and self.column is not None:
            # A tab takes as much room in the caret's line as in the source line.
            indent = "".join("\t" if char == "\t" else " " for char in self.source[: self.column - 1])
            text += f"\n    {self.source}\n    {indent}^"
        return text


class PresetError(MpxError):
    """A preset, a project file or an override cannot be used; holds every problem that was found, not the first."""

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None, *, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message, hint)
        self.problems = tuple(problems)

    @classmethod
    def of(cls, problems: Sequence[Problem], hint: str | None = None) -> PresetError:
        """Return one error whose message lists all `problems`."""
        if len(problems) == 1:
            return cls(str(problems[0]), hint, problems=problems)
        listed = "\n".join(str(problem) for problem in problems)
        return cls(f"{len(problems)} problems\n{listed}", hint, problems=problems)


def render(error: MpxError) -> str:
    """Return the plain text that a user sees on stderr, without a final newline."""
    text = f"error: {error.message}"
    return f"{text}\n\nhint: {error.hint}" if error.hint else text
