"""`python -m mpx.engine.check_ops NAME...`: ends with 2 and says why if the installed torch lacks an op.

The command asks in a process of its own, before anything of a run begins: it never imports torch itself.
"""

from __future__ import annotations

import sys

from mpx.errors import PresetError, render

__all__ = ["main"]


def main(names: list[str]) -> int:
    """Return the exit status for these names; every unknown one is told on stderr."""
    refusals = [refusal for name in names if (refusal := _refusal(name)) is not None]
    for refusal in refusals:
        sys.stderr.write(render(refusal) + "\n")
    return PresetError.exit_code if refusals else 0


def _refusal(name: str) -> PresetError | None:
    from mpx.engine.oprules import resolve_op

    try:
        resolve_op(name)
    except PresetError as error:
        return error
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
