"""The `mpx` command: one file a subcommand, imported when it is called. torch never is."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from typing import Any, NoReturn

import click

from mpx import __version__
from mpx.errors import MpxError, UsageError, render

__all__ = ["cli", "main"]

COLLECT_EVERY = 100_000  # more objects than a command makes to start

# Command `x` is `mpx.cli.x:x`. The lines stand here so that help imports no command.
_COMMANDS = {
    "run": "Run a script, a module or a command in mixed precision.",
    "presets": "List, show and check presets.",
    "report": "Show the report of a run again.",
    "compare": "Run a script at several levels, and say which to take.",
    "diff": "Compare two runs.",
    "watch": "Watch a run while it goes on.",
    "runs": "List, show and delete runs.",
    "export": "Write the series of a run for other tools.",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"mpx.cli.{cmd_name}"), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-"):
            import difflib

            nearest = difflib.get_close_matches(name, _COMMANDS, n=1)
            raise UsageError(
                f"there is no command `{name}`. Expected one of: {', '.join(_COMMANDS)}",
                hint=f"did you mean `mpx {nearest[0]}`?" if nearest else f"`mpx run {name}` runs a script",
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MpxError as error:
            click.echo(render(error), err=True)
            ctx.exit(error.exit_code)


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start here:  mpx run --opt-level O1 train.py",
)
@click.version_option(__version__, prog_name="mpx", message="%(prog)s %(version)s")
def cli() -> None:
    """Run an unmodified PyTorch training script in mixed precision, and say what the precision did."""


def main() -> NoReturn:
    """Run the command line and exit."""
    # Most commands have ended before there is garbage worth looking for, and looking takes a tenth of their time. Those
    # that stay (a run, `mpx watch`) still look, but rarely.
    gc.set_threshold(COLLECT_EVERY)
    try:
        cli(prog_name="mpx")
    except Exception:  # noqa: BLE001 - what gets here is a fault of mpx, and its exit code says so
        import traceback

        traceback.print_exc()
        click.echo("error: this is a fault of mpx, please report it with the lines above", err=True)
    sys.exit(os.EX_SOFTWARE)
