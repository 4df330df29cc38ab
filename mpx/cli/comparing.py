"""What `compare` and `diff` share: what counts as a difference, and how a comparison is shown."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from mpx.errors import RecordError
from mpx.record.shards import write_atomically
from mpx.report import Options
from mpx.report.compare import COMPARISONS, Comparison, Settings, Trial, compare, show

__all__ = ["comparison_options", "settings_from_options", "write_comparison"]

_Command = TypeVar("_Command", bound=Callable[..., Any])
_FILES = {"json": "compare.json", "markdown": "compare.md", "html": "compare.html"}


def _share(text: str) -> float:
    """Return `5%` or `0.05` as a fraction."""
    try:
        number = float(text.strip().removesuffix("%")) * (0.01 if text.strip().endswith("%") else 1.0)
    except ValueError:
        number = -1.0
    if not 0.0 <= number <= 1.0:
        raise click.BadParameter(f"`{text}` is no share. Expected for example `5%` or `0.05`")
    return number


def comparison_options(command: _Command) -> _Command:
    """Add the options that say what counts as a difference, and the format."""
    options = [
        click.option(
            "--tolerance",
            type=_share,
            metavar="SHARE",
            default="5%",
            show_default=True,
            help="How far above the baseline's the loss may end.",
        ),
        click.option(
            "--metric-tolerance",
            type=_share,
            metavar="SHARE",
            default="1%",
            show_default=True,
            help="How much worse than the baseline's the metric may be.",
        ),
        click.option(
            "--metric-goal",
            type=click.Choice(["higher", "lower"]),
            default="higher",
            show_default=True,
            help="Which metric is the better one.",
        ),
        click.option(
            "--format",
            "format_name",
            type=click.Choice(list(COMPARISONS)),
            default="terminal",
            show_default=True,
            help="What to write on stdout.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def settings_from_options(options: Mapping[str, Any]) -> Settings:
    """Return what the options of `comparison_options` say."""
    return Settings(
        tolerance=options["tolerance"],
        metric_tolerance=options["metric_tolerance"],
        higher_is_better=options["metric_goal"] == "higher",
    )


def write_comparison(
    trials: Sequence[Trial], settings: Settings, folder: Path | None, format_name: str
) -> Comparison:
    """Compare, write it on stdout, and into `folder` as JSON, Markdown and HTML.

    Raises:
        RecordError: There is nothing to compare, or the folder cannot be written.
    """
    if not trials:
        raise RecordError("no run left a record, so there is nothing to compare")
    result = compare(trials, settings)
    options = Options.for_stream(sys.stdout, os.environ)
    text = show(result, options, format_name=format_name)
    click.echo(text if format_name == "terminal" else text.encode(), nl=False)
    if folder is not None:
        try:
            as_file = Options(unicode=True, run_path=folder)
            for name, file_name in _FILES.items():
                write_atomically(folder / file_name, show(result, as_file, format_name=name))
        except OSError as error:
            raise RecordError(f"cannot write `{folder}`: {error.strerror or error}") from None
        click.echo(f"mpx: records, output and the comparison are in `{folder}`", err=True)
    return result
