"""The options that choose and change a preset: declared once, for every command that takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from mpx.presets import Override, Resolved

__all__ = ["override_options", "policy_options", "resolve_from_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])

# Option name -> key of the preset. An option that was not given changes nothing.
_REPLACING: Mapping[str, str] = {
    "dtype": "dtype",
    "loss_scale": "loss_scale",
    "keep_batchnorm_fp32": "keep_batchnorm_fp32",
    "master_weights": "master_weights",
    "script_amp": "script_amp",
    "apex": "apex",
    "on_collapse": "collapse.action",
    "max_steps": "max_steps",
}
_ADDING: Mapping[str, str] = {
    "fp32_op": "ops.user_float32",
    "half_op": "ops.user_half",
    "fp32_module": "fp32_modules",
    "fail_on": "gates",
    "abort_on": "abort_on",
}


def override_options(command: _Command) -> _Command:
    """Add the options that change single values of a preset."""
    for option in reversed(_override_options()):
        command = option(command)
    return command


def policy_options(command: _Command) -> _Command:
    """Add `--opt-level` and the options that change single values of a preset."""
    return _level_option()(override_options(command))


def resolve_from_options(options: Mapping[str, Any], cwd: Path, *, asked_by: str = "--opt-level") -> Resolved:
    """Return the policy that the values of `policy_options` ask for; others in the mapping are ignored."""
    from mpx.presets import resolve

    return resolve(options.get("opt_level"), overrides=_overrides(options), cwd=cwd, asked_by=asked_by)


def _overrides(options: Mapping[str, Any]) -> list[Override]:
    from mpx.presets import Override, parse_set

    overrides = []
    for name, key in _REPLACING.items():
        value = options.get(name)
        if value is not None:
            overrides.append(Override(key, value, "=", _spelling(name, value)))
    for name, key in _ADDING.items():
        entries: Sequence[str] = options.get(name) or ()
        if entries:
            overrides.append(Override(key, list(entries), "+=", _spelling(name, entries)))
    overrides += [parse_set(text) for text in options.get("settings") or ()]
    return overrides


def _spelling(name: str, value: Any) -> str:
    """Return the option as it was typed, for messages and origins."""
    option = name.replace("_", "-")
    return f"--no-{option}" if value is False else f"--{option}"


def _level_option() -> Callable[[_Command], _Command]:
    return click.option(
        "-O",
        "--opt-level",
        metavar="LEVEL|FILE",
        shell_complete=_complete_level,
        help="A preset of `mpx presets list`, or a YAML file. Default: the project's, else O1.",
    )


def _override_options() -> list[Callable[[Any], Any]]:
    return [
        click.option("--dtype", metavar="TYPE", help="The half type: float16 or bfloat16."),
        click.option(
            "--loss-scale", metavar="SCALE", help="`dynamic`, or a number for a static scale; 1 is none."
        ),
        click.option(
            "--keep-batchnorm-fp32/--no-keep-batchnorm-fp32",
            default=None,
            help="Whether BatchNorm stays FP32 in a half model (O2, O3).",
        ),
        click.option(
            "--master-weights/--no-master-weights",
            default=None,
            help="Whether FP32 master weights are kept for a half model (O2, O3).",
        ),
        click.option(
            "--fp32-op", metavar="OP", multiple=True, help="Compute this operation in FP32; repeatable."
        ),
        click.option(
            "--half-op", metavar="OP", multiple=True, help="Compute this operation in half; repeatable."
        ),
        click.option(
            "--fp32-module",
            metavar="CLASS|GLOB",
            multiple=True,
            help="Keep modules of this class or path (`*.lm_head`) in FP32; repeatable.",
        ),
        click.option(
            "--script-amp",
            metavar="takeover|keep",
            help="What becomes of the script's own autocast and GradScaler.",
        ),
        click.option(
            "--apex",
            metavar="auto|on|off",
            help="Whether a script that imports `apex` gets mpx's stand-in; auto: where it is missing.",
        ),
        click.option(
            "--on-collapse", metavar="warn|stop", help="What happens when step after step is skipped."
        ),
        click.option(
            "--fail-on",
            metavar="EXPR",
            multiple=True,
            help="Exit with 96 when the target succeeds and this is true: `overflow_rate>5%`, or a name alone if there "
            "must be none; repeatable.",
        ),
        click.option(
            "--abort-on",
            metavar="EXPR",
            multiple=True,
            help="End the target with 96 as soon as this is true; repeatable.",
        ),
        click.option(
            "--max-steps",
            metavar="N",
            help="End the target, as if it had succeeded, after N optimizer steps; 0: never.",
        ),
        click.option(
            "--set",
            "settings",
            metavar="KEY=VALUE",
            multiple=True,
            help="Set any value of the preset, or add to a list with KEY+=VALUE; repeatable.",
        ),
    ]


def _complete_level(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    del ctx, param
    from click.shell_completion import CompletionItem

    from mpx.presets import list_presets

    levels = [CompletionItem(info.name, help=info.description) for info in list_presets()]
    files = [CompletionItem(incomplete, type="file")]
    return [item for item in levels if item.value.startswith(incomplete)] or files
