"""The intercept table: installed whole or not at all, and undone, row by row."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from mpx.engine import intercepts
from mpx.engine.intercepts import TABLE, AfterImport, Intercept

LEVELS = ("O0", "O1", "O2", "O3", "O1-bf16", "O2-bf16")


def import_late_modules() -> None:
    """Import what late rows wait for: they are then replaced at once."""
    for row in TABLE:
        import_module(row.module)


def attribute(row: Intercept) -> Any:
    """Return what stands at a row's place now."""
    owner: Any = sys.modules[row.module]
    for part in row.path.split("."):
        owner = getattr(owner, part)
    return owner


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.module}.{row.path}")
def test_a_session_replaces_each_row_and_puts_it_back(at_level: Any, row: Intercept) -> None:
    import_late_modules()
    before = attribute(row)
    with at_level("O1"):
        during = attribute(row)
    # shown the original, dynamo holds what is there without a session anyway
    assert during != before or row.path == "unpatched_nn_module_call"
    assert attribute(row) == before  # a class method is bound anew each time


@pytest.mark.parametrize("failing", range(len(TABLE)), ids=lambda i: TABLE[i].path)
def test_a_row_that_fails_to_install_leaves_torch_as_it_was(
    at_level: Any, fingerprint: Any, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    def fail(session: Any, original: Any) -> Any:
        raise RuntimeError("this row fails")

    import_late_modules()
    before = fingerprint()
    rows = tuple(replace(row, build=fail) if i == failing else row for i, row in enumerate(TABLE))
    with monkeypatch.context() as patch:
        patch.setattr(intercepts, "TABLE", rows)
        with pytest.raises(RuntimeError, match="this row fails"), at_level("O1"):
            pytest.fail("the session started")
    assert fingerprint() == before


@pytest.mark.parametrize("level", LEVELS)
def test_a_session_closed_by_an_exception_of_the_script_leaves_torch_as_it_was(
    at_level: Any, fingerprint: Any, level: str
) -> None:
    def script() -> None:
        model = torch.nn.Linear(4, 2)
        torch.optim.NAdam(model.parameters())  # a class that torch wraps during the session
        model(torch.ones(1, 4)).sum().backward()
        raise ZeroDivisionError

    before = fingerprint()
    with pytest.raises(ZeroDivisionError), at_level(level):
        script()
    assert fingerprint() == before


def test_optimizers_made_before_during_and_after_a_session_step_alike(at_level: Any) -> None:
    def moved(optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter) -> float:
        weight.grad = torch.ones(1)
        before = weight.item()
        optimizer.step()
        return before - weight.item()

    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    early = torch.optim.SGD([weights[0]], lr=0.5)
    with at_level("O1") as recorded:
        during = torch.optim.SGD([weights[1]], lr=0.5)
        assert moved(early, weights[0]) == moved(during, weights[1]) == 0.5
        assert recorded.summary["steps"]["applied"] == 2
    assert moved(during, weights[1]) == moved(torch.optim.SGD([weights[2]], lr=0.5), weights[2]) == 0.5


def test_to_look_for_a_late_module_is_not_to_import_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "straggler.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    finders = [
        AfterImport("straggler", lambda: seen.append(sys.modules["straggler"].VALUE)) for _ in range(2)
    ]
    for finder in finders:
        sys.meta_path.insert(0, finder)
    assert find_spec("straggler") is not None
    assert find_spec("straggler") is not None
    import straggler  # noqa: F401

    assert seen == [1, 1]
    assert not [finder for finder in finders if finder in sys.meta_path]
    del sys.modules["straggler"]


def test_a_late_row_waits_for_its_module_and_leaves_no_trace_on_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "latecomer.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    finder = AfterImport("latecomer", lambda: seen.append(sys.modules["latecomer"].VALUE))
    sys.meta_path.insert(0, finder)
    import latecomer

    assert seen == [1]
    assert finder not in sys.meta_path
    assert "exec_module" not in vars(latecomer.__spec__.loader)
    del sys.modules["latecomer"]
