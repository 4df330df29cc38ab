"""What people read when a preset is wrong, word for word: `tests/golden/presets/errors/`.

`MPX_GOLD=1 pytest tests/presets/test_golden_errors.py` writes the texts anew; read the diff before committing it.
"""

import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from mpx.errors import PresetError, render
from mpx.presets import resolve
from mpx.presets.files import preset_names
from mpx.presets.shipped import op_groups

GOLDEN = Path(__file__).parents[1] / "golden" / "presets" / "errors"
CASES = sorted(path.stem for path in GOLDEN.glob("*.yaml"))


def without_registries(text):
    """Take out the lists that grow with a new preset or group: no golden text has to change for one."""
    presets = ", ".join(f"`{name}`" for name in preset_names())
    groups = ", ".join(f"`@{group}`" for group in op_groups())
    return text.replace(presets, "<presets>").replace(groups, "<groups>")


@pytest.mark.parametrize("case", CASES)
def test_the_error_reads_as_recorded(case, here):
    shutil.copytree(GOLDEN, here, dirs_exist_ok=True)
    with pytest.raises(PresetError) as caught:
        resolve(f"./{case}.yaml", cwd=here)
    text = without_registries(render(caught.value)).replace(str(here), "<here>") + "\n"
    expected = GOLDEN / f"{case}.txt"
    if os.environ.get("MPX_GOLD"):
        expected.write_text(text, encoding="utf-8")
    assert text == expected.read_text("utf-8")


def test_there_is_no_text_without_its_case():
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == CASES


def test_every_text_keeps_the_form(here):
    """`file:line:column  key: …` first, then the line and a caret under the column."""
    for case in CASES:
        lines = (GOLDEN / f"{case}.txt").read_text("utf-8").splitlines()
        assert lines[0].startswith("error: ")
        for above, line in pairwise(lines):
            if line.strip() == "^":
                head = lines[lines.index(above) - 1].removeprefix("error: ")
                name, _, column = head.split("  ")[0].split(":")
                assert (GOLDEN / name).is_file()
                assert line.index("^") == 4 + int(column) - 1
