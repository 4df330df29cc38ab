"""What `mpx run` is to start: a script, a module or a command, told from the words on the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from mpx.errors import LaunchError, UsageError
from mpx.values import frozen

__all__ = ["KINDS", "NOT_EXECUTABLE", "NOT_FOUND", "Kind", "Target", "detect"]

Kind = Literal["script", "module", "command"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# A shell's answers for a program that is not there, and for one that cannot be executed.
NOT_FOUND = 127
NOT_EXECUTABLE = 126


@frozen
class Target:
    """What is to run: `argv` starts it as its user would, `name` is for folders and reports."""

    kind: Kind
    argv: tuple[str, ...]
    name: str


def detect(args: Sequence[str], *, module: bool, after_dashes: bool, as_kind: Kind | None) -> Target:
    """Return the target that `args` name; its own arguments follow untouched.

    Args:
        args: The target and its arguments, at least one word.
        module: `-m` was given.
        after_dashes: `--` stood before `args`: what is no script is a command then.
        as_kind: `--as`, which settles the kind.
    """
    if module and as_kind not in (None, "module"):
        raise UsageError(
            f"`-m` contradicts `--as {as_kind}`. Expected one of the two",
            hint=f"leave out `-m` to run a {as_kind}",
        )
    word, settled = args[0], as_kind is not None
    kind: Kind = as_kind or ("module" if module else _kind_of(word, after_dashes=after_dashes))
    if kind == "module":
        return Target("module", (sys.executable, "-m", *args), word)
    if kind == "script":
        _require_script(word, settled=settled)
        return Target("script", (sys.executable, *args), _script_name(word))
    return Target("command", (_require_program(word), *args[1:]), Path(word).name)


def _kind_of(word: str, *, after_dashes: bool) -> Kind:
    if not after_dashes:
        return "script"
    path = Path(word)
    if path.is_dir():
        # A folder that python could not run does not hide the program of that name.
        return "script" if (path / "__main__.py").is_file() else "command"
    return "script" if path.is_file() and (path.suffix == ".py" or _is_zip(path)) else "command"


def _is_zip(path: Path) -> bool:
    import zipfile

    return zipfile.is_zipfile(path)


def _script_name(word: str) -> str:
    if word == "-":
        return "stdin"
    path = Path(word).resolve()
    return path.parent.name if path.name == "__main__.py" else path.stem


def _require_script(word: str, *, settled: bool) -> None:
    """Refuse what cannot be a script. What is wrong inside one, python itself tells best."""
    path = Path(word)
    if word == "-" or path.is_dir():
        return
    if not path.exists():
        raise LaunchError(
            f"cannot find the script `{word}`. Expected a Python file, or a folder or zip with `__main__.py`",
            hint=_other_spelling(word),
            exit_code=NOT_FOUND,
        )
    if not os.access(path, os.R_OK):
        raise LaunchError(f"cannot read the script `{word}`: permission denied", exit_code=NOT_EXECUTABLE)
    reason = None if settled or path.suffix == ".py" else _foreign(path)
    if reason is not None:
        raise LaunchError(
            f"`{word}` is not a Python script: {reason}. Expected a Python file, or `--` before a command",
            hint=f"`mpx run -- {_as_program(word)}` runs it as a command",
            exit_code=NOT_EXECUTABLE,
        )


def _require_program(word: str) -> str:
    """Return the path of the program that a shell would start for `word`."""
    found = _which(word)
    if found is not None:
        return found
    path = Path(word)
    if os.sep in word and path.is_dir():
        raise LaunchError(f"`{word}` is a folder without `__main__.py`", exit_code=NOT_EXECUTABLE)
    if os.sep in word and path.exists():
        raise LaunchError(
            f"`{word}` is not executable",
            hint=f"`chmod +x {word}`, or name its interpreter: `mpx run -- bash {word}`",
            exit_code=NOT_EXECUTABLE,
        )
    raise LaunchError(
        f"cannot find the command `{word}`. Expected a program on PATH, or a Python file, folder or zip",
        hint=_other_spelling(word),
        exit_code=NOT_FOUND,
    )


def _which(word: str) -> str | None:
    import shutil

    return shutil.which(word)


def _foreign(path: Path) -> str | None:
    """Return why the file cannot be Python, or None; a file without a word about itself may be."""
    with path.open("rb") as file:
        head = file.readline(256)
    if head.startswith(b"#!") and b"py" not in head:
        return f"it begins with `{head.decode(errors='replace').strip()}`"
    if head.startswith(b"\x7fELF"):
        return "it is a compiled program"
    return None


def _as_program(word: str) -> str:
    return word if os.sep in word else os.path.join(os.curdir, word)


def _other_spelling(word: str) -> str | None:
    """Return what the user may have meant instead, as a command, or None."""
    path = Path(word)
    if path.exists():
        return f"it is a file of this folder: `mpx run -- {_as_program(word)}`"
    as_file = Path(*word.split("."))
    if os.sep not in word and (as_file.with_suffix(".py").is_file() or (as_file / "__main__.py").is_file()):
        return f"did you mean the module, `mpx run -m {word}`?"
    if os.sep not in word and _which(word):
        return f"`{word}` is a program: `mpx run -- {word}` runs commands"
    try:
        names = os.listdir(path.parent)
    except OSError:
        return f"there is no folder `{path.parent}`"
    import difflib

    nearest = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean `{path.with_name(nearest[0])}`?" if nearest else None


def isolation(target: Target) -> str | None:
    """Return why the target's interpreter will not follow mpx, or None; sees only what stands in `target.argv`."""
    if not Path(target.argv[0]).name.startswith(("python", "pypy")):
        return None
    for word in target.argv[1:]:
        if not word.startswith("-") or word.startswith(("-c", "-m")):
            break
        if not word.startswith(("--", "-X", "-W")) and set(word) & set("EIS"):
            return f"`python {word}` shuts out PYTHONPATH or site, so mpx cannot follow it"
    return None
