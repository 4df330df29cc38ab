"""What mpx ships as data: the built-in presets and the groups of operations that presets refer to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import mpx
from mpx.errors import PresetError
from mpx.presets.tree import Listing, Scalar, Table, Tree
from mpx.presets.values import InvalidValueError, nearest
from mpx.presets.yaml_file import read_yaml

__all__ = ["check_op_entry", "configs_dir", "op_groups", "preset_names", "shipped_ops", "unlisted"]

# `aten::softmax.int`, `aten::softmax`, `softmax`, `softmax.int`, `torch.nn.functional.softmax`
_OP_NAME = re.compile(r"(?:[A-Za-z_]\w*::)?[A-Za-z_]\w*(?:\.\w+)*")


def configs_dir() -> Path:
    """Return the folder with the presets and op lists: package data in a wheel, beside the package in a checkout."""
    package = Path(mpx.__file__).resolve().parent
    packaged = package / "configs"
    return packaged if packaged.is_dir() else package.parent / "configs"


def preset_names() -> list[str]:
    """Return the names of the built-in presets, in order."""
    return sorted(path.stem for path in configs_dir().glob("*.yaml"))


def op_groups() -> list[str]:
    """Return the names of the groups, without the `@`."""
    return sorted(path.stem for path in (configs_dir() / "ops").glob("*.yaml"))


@cache
def shipped_ops() -> frozenset[str]:
    """Return every operation of every group, as `aten::softmax.int`."""
    return frozenset(op for group in op_groups() for op in _read_group(group))


def check_op_entry(entry: str) -> InvalidValueError | None:
    """Return what is wrong with an entry of an op list, or None."""
    if entry.startswith("@"):
        groups = op_groups()
        if entry[1:] in groups:
            return None
        guess = nearest(entry[1:], groups)
        expected = "one of " + ", ".join(f"`@{group}`" for group in groups)
        return InvalidValueError(
            "there is no such group", expected, f"did you mean `@{guess}`?" if guess else None
        )
    expected = "an operation such as `aten::softmax.int`, `softmax` or `torch.softmax`, or a `@group`"
    if _OP_NAME.fullmatch(entry) is None:
        return InvalidValueError("this is not the name of an operation", expected)
    if entry in op_groups() and unlisted([entry]):
        return InvalidValueError("this is a group, not an operation", expected, f"did you mean `@{entry}`?")
    return None


def unlisted(entries: Iterable[str]) -> list[str]:
    """Return the entries that name an operation that no shipped group has; torch must be asked about them."""
    names = [entry for entry in dict.fromkeys(entries) if not entry.startswith("@")]
    if not names:
        return []
    known = shipped_ops()
    known |= {op.rpartition(".")[0] for op in known if "." in op}
    known |= {op.rpartition("::")[2] for op in known}
    return [name for name in names if _without_torch_path(name) not in known]


def _without_torch_path(name: str) -> str:
    return name.rpartition(".")[2] if name.startswith("torch.") else name


def _read_group(group: str) -> list[str]:
    path = configs_dir() / "ops" / f"{group}.yaml"
    display = f"configs/ops/{group}.yaml"
    table, problems = read_yaml(path, display, shipped=True)
    ops = next((tree for name, _, tree in table.pairs if name == "ops"), None)
    if ops is None or isinstance(ops, Scalar):
        problems.append(
            table.place.problem("ops", "the group has no operations", expected="a mapping or a list")
        )
    if problems or ops is None:
        raise PresetError.of(problems)
    return _names(ops)


def _names(ops: Tree) -> list[str]:
    if isinstance(ops, Table):
        return [name for name, _, _ in ops.pairs]
    return [item.text for item in ops.items if isinstance(item, Scalar)] if isinstance(ops, Listing) else []
