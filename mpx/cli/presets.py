"""`mpx presets`: list, show, describe and check presets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mpx.cli.policy_options import override_options, resolve_from_options

__all__ = ["presets"]

_INVALID = 2


@click.group()
def presets() -> None:
    """List, show and check presets."""


@presets.command("list")
def list_command() -> None:
    """List the built-in presets."""
    from mpx.presets import list_presets

    infos = list_presets()
    width = max(len(info.name) for info in infos)
    for info in infos:
        click.echo(f"{info.name:<{width}}  {info.description}")


@presets.command("show")
@click.argument("preset", metavar="[NAME|FILE]", required=False)
@click.option("--origin", is_flag=True, help="Say beside each value where it is from.")
@override_options
def show_command(preset: str | None, *, origin: bool, **options: Any) -> None:
    """Print the preset that a run would use, complete, as YAML that a run can use."""
    from mpx.presets import show

    options["opt_level"] = preset
    resolved = resolve_from_options(options, Path.cwd(), asked_by="the command line")
    if resolved.project_file is not None:
        click.echo(f"mpx: with the project file {resolved.project_file}", err=True)
    for warning in resolved.warnings:
        click.echo(f"mpx: warning: {warning}", err=True)
    click.echo(show(resolved, origin=origin), nl=False)


@presets.command("schema")
def schema_command() -> None:
    r"""Print the JSON schema of preset files, with which an editor completes and checks them.

    Editors that use the YAML language server take it from a first line of the preset:

    \b
      # yaml-language-server: $schema=mpx.schema.json
    """
    from mpx.presets.schema import preset_schema_text

    click.echo(preset_schema_text(), nl=False)


@presets.command("validate")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
def validate_command(files: tuple[Path, ...]) -> None:
    """Check preset files and project files, and tell everything that is wrong."""
    from mpx.presets import validate

    valid = True
    for file in files:
        problems = validate(file)
        for problem in problems:
            click.echo(str(problem))
        if not problems:
            click.echo(f"{file}: ok")
        valid = valid and not problems
    if not valid:
        raise click.exceptions.Exit(_INVALID)
