"""From a reference, a project file and overrides to one complete policy that knows where each value is from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpx.errors import PresetError, Problem
from mpx.presets.files import PresetFile, built_in, load_chain, locate, preset_file
from mpx.presets.groups import groups_of
from mpx.presets.overrides import Override, override_layer
from mpx.presets.policy import Policy, field_specs
from mpx.presets.project import PROJECT_FILES, find_project, read_project
from mpx.presets.rules import Refusal, judge
from mpx.presets.settings import EXTENDS, UNKNOWN_KEY, Layer, Setting
from mpx.presets.shipped import preset_names, unlisted
from mpx.presets.spelling import show_policy, show_value
from mpx.presets.tree import Place
from mpx.values import frozen

__all__ = ["PresetInfo", "Resolved", "list_presets", "resolve", "show", "validate"]

# What a run without any choice gets: Apex's recommendation for mixed precision.
DEFAULT_PRESET = "O1"
_CHOICE = "--opt-level"
# What makes a level that level: a project file that changes one under a level from the command line is told.
_LEVEL_KEYS = ("dtype", "cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights")
_MISSING_SHOWN = 6


@frozen
class Resolved:
    """A policy and how it came about.

    `origin` has every key of `policy.flat()`. That of `name` is where the preset was chosen: `--opt-level`, the line
    of the project file, or `default`.
    """

    policy: Policy
    origin: Mapping[str, str]
    warnings: tuple[str, ...]
    unlisted_ops: tuple[str, ...]
    project_file: Path | None

    @property
    def op_groups(self) -> dict[str, Mapping[str, Any]]:
        """What the groups of operations hold that the policy refers to."""
        return groups_of(self.policy)


@frozen
class PresetInfo:
    """A built-in preset, as a list shows it."""

    name: str
    description: str
    path: Path


@dataclass
class _Stack:
    """Layers from the lowest to the highest, and how the preset was chosen."""

    layers: list[Layer]
    problems: list[Problem]
    chain: list[Layer]
    choice: str
    project: Layer | None = None


@dataclass
class _Merged:
    """The value of one field, the layer that had the last word, and everyone who had a part in it."""

    value: Any
    rank: int
    place: Place
    origins: list[str] = field(default_factory=list)


def resolve(
    preset: str | None, *, overrides: Sequence[Override] = (), cwd: Path, asked_by: str = _CHOICE
) -> Resolved:
    """Return the policy for a run that starts in `cwd`; raise one `PresetError` with everything that is wrong.

    From weak to strong: built-in preset, `extends` chain, project file, the preset file named by `preset`,
    `overrides`. A preset named here replaces the one that the project file extends. `asked_by` is what messages and
    origins call the place where `preset` was named.
    """
    project = find_project(cwd)
    if preset is None:
        stack = _project_stack(project.layer, project.path, cwd)
    else:
        stack = _chosen_stack(preset, project.layer, cwd, asked_by)
    stack.layers.append(override_layer(overrides))
    policy, origin, warnings = _assemble(stack)
    names = (name for key, value in policy.flat().items() if key.startswith("ops.") for name in value)
    return Resolved(
        policy=policy,
        origin=origin,
        warnings=(*project.notices, *warnings),
        unlisted_ops=tuple(unlisted(names)),
        project_file=project.path,
    )


def show(resolved: Resolved, *, origin: bool = False) -> str:
    """Return the resolved preset as YAML; with `origin`, each line says where its value is from."""
    return show_policy(resolved.policy, resolved.origin if origin else None)


def list_presets() -> list[PresetInfo]:
    """Return the built-in presets in order of their names."""
    infos = []
    for name in preset_names():
        file = built_in(name)
        layers, _ = load_chain(file, file.path.parent)
        description = layers[-1].sets("description")
        infos.append(PresetInfo(name, description.value if description else "", file.path))
    return infos


def validate(path: Path, *, cwd: Path | None = None) -> list[Problem]:
    """Return what is wrong with a preset file or a project file, taken alone."""
    cwd = cwd or Path.cwd()
    path = cwd / path
    try:
        if path.name in PROJECT_FILES:
            stack = _project_stack(read_project(path, cwd), path, cwd)
        else:
            chain, problems = load_chain(preset_file(path, cwd), cwd)
            stack = _Stack(list(chain), problems, chain, _CHOICE)
        _assemble(stack)
    except PresetError as error:
        return list(error.problems)
    return []


def _chosen_stack(preset: str, project: Layer | None, cwd: Path, asked_by: str) -> _Stack:
    start = locate(preset, base=cwd, cwd=cwd, place=Place.option(asked_by), key="")
    chain, problems = load_chain(start, cwd)
    layers = list(chain)
    if project is not None:
        # The project's name is that of its own choice, which is replaced here.
        project.settings = [item for item in project.settings if item.key not in ("name", "description")]
        # What a project sets stands above a level, and below a file that was asked for by its path.
        layers.insert(len(layers) if start.built_in else len(layers) - 1, project)
    return _Stack(layers, problems, chain, asked_by, project)


def _project_stack(project: Layer | None, path: Path | None, cwd: Path) -> _Stack:
    problems: list[Problem] = []
    choice, start = "default", built_in(DEFAULT_PRESET)
    if project is not None and path is not None and project.extends is not None:
        choice = project.extends.place.origin
        followed, problems = _project_choice(project.extends, path, cwd)
        start = followed or start
    chain, chain_problems = load_chain(start, cwd)
    layers = list(chain) if project is None else [*chain, project]
    return _Stack(layers, [*problems, *chain_problems], chain, choice)


def _project_choice(extends: Setting, path: Path, cwd: Path) -> tuple[PresetFile | None, list[Problem]]:
    try:
        return locate(extends.value, base=path.parent, cwd=cwd, place=extends.place, key=EXTENDS), []
    except PresetError as error:
        return None, list(error.problems)


def _assemble(stack: _Stack) -> tuple[Policy, dict[str, str], list[str]]:
    merged = _merge(stack)
    broken = {key for layer in stack.layers for key in layer.broken}
    problems = [problem for layer in stack.layers for problem in layer.problems] + stack.problems
    missing = [key for key in field_specs() if key not in merged and key not in broken]
    if missing:
        problems.append(_incomplete(stack.layers[0], missing))
    values = {key: item.value for key, item in merged.items() if key not in broken}
    _resolve_mode(values, merged)
    warnings = list(_project_over_level(stack, merged))
    for judgement in judge(values):
        if isinstance(judgement, Refusal):
            problems.append(_refuse(judgement, merged))
        else:
            warnings.append(judgement.text)
    if problems:
        raise PresetError.of(sorted(problems, key=_order(stack.layers)), _hint(problems))
    origin = {key: " + ".join(dict.fromkeys(merged[key].origins)) for key in field_specs()}
    return Policy.from_flat(values), origin, warnings


def _merge(stack: _Stack) -> dict[str, _Merged]:
    merged: dict[str, _Merged] = {}
    for rank, layer in enumerate(stack.layers):
        for setting in layer.settings:
            below = merged.get(setting.key)
            item = _Merged(setting.value, rank, setting.place, [setting.place.origin])
            if setting.append and below is not None:
                item.value = below.value + setting.value
                item.origins = [*(below.origins if below.value else []), *item.origins]
            elif setting.append:
                continue  # there is nothing to add to; the field is reported as missing
            elif setting.key == "name" and layer in stack.chain:
                item.origins = [stack.choice]
            merged[setting.key] = item
    return merged


def _resolve_mode(values: dict[str, Any], merged: Mapping[str, _Merged]) -> None:
    """Replace a loss scale of `auto` by what the other values make of it."""
    if values.get("loss_scale.mode") != "auto":
        return
    reads = ("dtype", "cast_model_type", "patch_torch_functions")
    if not all(key in values for key in reads):
        del values["loss_scale.mode"]
        return
    in_fp32 = values["cast_model_type"] == "float32" or (
        values["cast_model_type"] == "none" and not values["patch_torch_functions"]
    )
    needed = values["dtype"] == "float16" and not in_fp32
    values["loss_scale.mode"] = "dynamic" if needed else "none"
    merged["loss_scale.mode"].origins = [f"derived from {'cast_model_type' if in_fp32 else 'dtype'}"]


def _refuse(refusal: Refusal, merged: Mapping[str, _Merged]) -> Problem:
    """Return the problem at the place that had the last word: what it built on was all right before."""
    key = max(refusal.keys, key=lambda name: merged[name].rank)
    return merged[key].place.problem(key, refusal.what, suggestion=refusal.way_out)


def _project_over_level(stack: _Stack, merged: Mapping[str, _Merged]) -> Iterator[str]:
    if stack.project is None:
        return
    rank = next(index for index, layer in enumerate(stack.layers) if layer is stack.project)
    level = next((item.value for layer in stack.chain[::-1] if (item := layer.sets("name"))), "the preset")
    for setting in stack.project.settings:
        below = [item for layer in stack.layers[:rank] if (item := layer.sets(setting.key))]
        if setting.key not in _LEVEL_KEYS or merged[setting.key].rank != rank or not below:
            continue
        if below[-1].value != setting.value:
            value, old = show_value(setting.value), show_value(below[-1].value)
            yield f"`{setting.place.origin}` sets `{setting.key}` to `{value}`, where `{level}` has `{old}`"


def _incomplete(root: Layer, missing: Sequence[str]) -> Problem:
    shown = ", ".join(f"`{key}`" for key in missing[:_MISSING_SHOWN])
    more = f" and {len(missing) - _MISSING_SHOWN} more" if len(missing) > _MISSING_SHOWN else ""
    what = f"the preset extends nothing and leaves {len(missing)} of {len(field_specs())} keys open: {shown}{more}"
    return root.start.problem("", what, suggestion=f"add a line `extends: {DEFAULT_PRESET}`")


def _order(layers: Sequence[Layer]) -> Callable[[Problem], tuple[int, int, int]]:
    """Return the sort key that lists problems as one reads: file by file, line by line, options last."""
    displays = [layer.display for layer in layers]

    def order(problem: Problem) -> tuple[int, int, int]:
        match = re.fullmatch(r"(.*?)(?::(\d+):(\d+))?", problem.where, re.DOTALL)
        if match is None or match[1] not in displays:
            return len(displays), 0, 0
        return displays.index(match[1]), int(match[2] or 0), int(match[3] or 0)

    return order


def _hint(problems: Sequence[Problem]) -> str | None:
    if any(problem.what == UNKNOWN_KEY for problem in problems):
        return f"`mpx presets show {DEFAULT_PRESET}` prints every key with its value"
    return None
