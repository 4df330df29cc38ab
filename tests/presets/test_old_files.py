"""Preset files of every schema that there was: `tests/golden/presets/v<schema>/`. Files are added, never changed."""

import json
from pathlib import Path

import pytest

from mpx.presets import resolve
from mpx.presets.policy import FIRST_SCHEMA, SCHEMA

GOLDEN = Path(__file__).parents[1] / "golden" / "presets"
FILES = sorted(GOLDEN.glob("v*/*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_an_old_file_still_means_what_it_meant(path, here):
    flat = resolve(str(path), cwd=here).policy.flat()
    expected = json.loads(path.with_suffix(".json").read_text("utf-8"))
    values = {key: list(flat[key]) if isinstance(flat[key], tuple) else flat[key] for key in expected}
    assert values == expected


def test_every_schema_has_its_files():
    folders = {path.parent.name for path in FILES}
    assert folders == {f"v{number}" for number in range(FIRST_SCHEMA, SCHEMA + 1)}
