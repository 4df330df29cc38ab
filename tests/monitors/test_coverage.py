"""The share of the matrix work that was done in half equals what can be worked out by hand."""

import pytest
import torch
from torch import nn

from mpx.monitors import coverage

BATCH, SIZE = 6, 8


class Wide(nn.Linear):
    """A class that the preset can name."""


class Model(nn.Module):
    """A convolution, attention and two products, one of which may stay in FP32."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.heads = nn.Linear(SIZE, 3 * SIZE)
        self.wide = Wide(SIZE, 4 * SIZE)

    def forward(self, x):  # (B, T = 4, C = 8) after the convolution
        x = self.conv(x.unsqueeze(1))
        query, key, value = self.heads(x).unsqueeze(1).chunk(3, dim=-1)
        x = nn.functional.scaled_dot_product_attention(query, key, value).squeeze(1)
        return self.wide(x)


# two operations for each multiplication and addition
CONVOLUTION = 2 * BATCH * SIZE * 4 * 1 * 3
HEADS = 2 * BATCH * 4 * SIZE * 3 * SIZE
ATTENTION = 2 * (2 * BATCH * 4 * 4 * SIZE)
WIDE = 2 * BATCH * 4 * SIZE * 4 * SIZE
TOTAL = CONVOLUTION + HEADS + ATTENTION + WIDE


def measured(recorded, calls=3):
    model = Model()
    for _ in range(calls):
        model(torch.randn(BATCH, SIZE)).sum().backward()
    return recorded.summary.get("coverage")


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_all_of_it_is_half_by_default(at_level, level, half):
    with at_level(level, f"dtype={half}") as recorded:
        found = measured(recorded)
    assert found["half_flops_share"] == 1.0
    assert sum(row["flops"] for row in found["by_op"]) == TOTAL
    assert {row["dtype"] for row in found["by_op"]} == {half}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_module_in_float32_takes_its_share_away(at_level, level):
    with at_level(level, "fp32_modules=Wide") as recorded:
        found = measured(recorded)
    assert found["half_flops_share"] == pytest.approx(1 - WIDE / TOTAL)


def test_the_first_calls_are_not_sampled_and_later_ones_add_nothing(at_level):
    with at_level("O1") as recorded:
        assert measured(recorded, calls=2) is None
        found = measured(recorded, calls=1)
        assert measured(recorded, calls=5) == found


def test_a_call_without_gradients_is_not_sampled(at_level):
    with at_level("O1") as recorded, torch.no_grad():
        model = Model()
        for _ in range(4):
            model(torch.randn(BATCH, SIZE))
        assert recorded.summary["coverage"] is None


def test_a_formula_that_fails_costs_the_coverage_and_not_the_run(at_level, monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise TypeError("no such shape")

    monkeypatch.setitem(coverage.FORMULAS, torch.ops.aten.addmm, broken)
    with at_level("O1") as recorded:
        assert measured(recorded, calls=4) is None
        assert "coverage" not in recorded.summary
        (fault,) = recorded.of("fault")
    assert fault["where"] == "Coverage"
    assert "no such shape" in fault["text"]
    assert capsys.readouterr().err.count("mpx: ") == 1


def test_of_compiled_code_nothing_is_counted_and_that_is_said(at_level):
    def double(x):
        return x * 2

    with at_level("O1") as recorded:
        torch.compile(double, backend="eager", dynamic=False)(torch.ones(2))
        assert measured(recorded) == {"missing": "torch.compile"}
    torch._dynamo.reset()
