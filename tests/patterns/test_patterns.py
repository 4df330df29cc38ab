"""Every way of writing a script in the catalogue trains at each level as it does in FP32."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import calls  # noqa: F401 - fills the catalogue
import dtypes  # noqa: F401
import fields  # noqa: F401
import functions  # noqa: F401
import gradients  # noqa: F401
import middles  # noqa: F401
import pytest
import ranges  # noqa: F401
import steps  # noqa: F401
import torch
import weights  # noqa: F401
from catalogue import PATTERNS, Figures, Pattern

TABLE = Path(__file__).parents[2] / "docs" / "compatibility.md"
LEVELS = [(level, dtype) for level in ("O1", "O2") for dtype in ("float16", "bfloat16")]


def figures_of(one: Pattern) -> Figures:
    """Run a pattern from its seed, with threads and determinism fixed."""
    torch.manual_seed(0)
    return one.run()


@cache
def plain(name: str) -> Figures:
    """Return a pattern's figures in FP32."""
    return figures_of(next(one for one in PATTERNS if one.name == name))


# dynamo ignores this warning itself, unless warnings are errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("level", "dtype"), LEVELS, ids=lambda value: value)
@pytest.mark.parametrize("one", PATTERNS, ids=lambda one: one.name)
def test_a_pattern_trains_as_in_float32(
    at_level: Callable[..., Any], one: Pattern, level: str, dtype: str
) -> None:
    reference = plain(one.name)
    # a scale at which these small models do not overflow: what a search for the range costs is tested elsewhere
    scale = ["loss_scale.init=1024"] if dtype == "float16" else []
    with at_level(level, f"dtype={dtype}", *scale):
        found = figures_of(one)
    for name, expected in reference.items():
        assert math.isclose(found[name], expected, rel_tol=one.tolerance[dtype], abs_tol=1e-3), name


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("one", [one for one in PATTERNS if not one.not_at_o3], ids=lambda one: one.name)
def test_a_pattern_trains_at_o3_but_for_the_rounding_of_its_weights(
    at_level: Callable[..., Any], one: Pattern
) -> None:
    reference = plain(one.name)
    with at_level("O3", "dtype=bfloat16"):
        found = figures_of(one)
    for name, expected in reference.items():
        assert math.isclose(found[name], expected, rel_tol=0.3, abs_tol=0.05), name


@pytest.mark.parametrize("one", PATTERNS, ids=lambda one: one.name)
def test_a_pattern_at_o0_is_bit_for_bit_plain(at_level: Callable[..., Any], one: Pattern) -> None:
    reference = plain(one.name)
    with at_level("O0"):
        found = figures_of(one)
    if (
        one.name == "amp_by_hand"
    ):  # at O0 the script's own mixed precision is off: compared with FP32 elsewhere
        assert all(math.isfinite(value) for value in found.values())
    else:
        assert found == reference


def table() -> str:
    """Return the page on compatibility, made from the catalogue."""
    lines = [
        "# Compatibility",
        "",
        "The ways of writing a training script that mpx is tested with. Each row is a small script that trains in FP32",
        "and at O1 and O2, in float16 and bfloat16, and whose losses, norms and weights must agree within the rounding",
        "of the half type; at O0 they are equal bit for bit. At O3, in bfloat16, figures must be near, as weights are",
        "rounded at each step. The row's test is `pytest tests/patterns -k NAME`.",
        "",
        "This page is written by the tests: `MPX_UPDATE_GOLDEN=1 pytest tests/patterns -k table`.",
    ]
    for family in dict.fromkeys(one.family for one in PATTERNS):
        lines += ["", f"## {family}", "", "| the script | O1, O2 | O3 | test |", "|---|---|---|---|"]
        for one in (one for one in PATTERNS if one.family == family):
            note, o3 = (f"works: {one.note}" if one.note else "works"), one.not_at_o3 or "trains"
            lines.append(f"| {one.title} | {note} | {o3} | `{one.name}` |")
    return "\n".join(lines) + "\n"


def test_the_table_of_compatibility_is_up_to_date() -> None:
    if os.environ.get("MPX_UPDATE_GOLDEN"):
        TABLE.write_text(table(), encoding="utf-8")
    assert TABLE.read_text(encoding="utf-8") == table()
