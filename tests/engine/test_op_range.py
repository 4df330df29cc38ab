"""Nothing overflows in float16 that FP32 can hold, where a level has a choice; what cannot be helped is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Applied(nn.Module):
    """Applies an op to its input in half, whatever the level: as behind a matrix product."""

    def __init__(self, op: Callable[[Tensor], Any], dtype: torch.dtype) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))
        self.op, self.dtype = op, dtype

    def forward(self, x: Tensor) -> Any:
        return self.op(x.to(self.dtype))


def apply(op: Callable[[Tensor], Any], x: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    return Applied(op, dtype)(x)


BIG = torch.tensor([300.0, -400.0, 1200.0])  # squares to 1,440,000
ONES = torch.ones(100_000)
FAR = torch.tensor([0.0, 4.0]).repeat(50_000, 1)  # a loss of 4.02 each
ROWS = torch.zeros(50_000, dtype=torch.int64)
# Each op with its input and what FP32 gives. All are infinite in float16, or refused there.
HELD: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, float]] = {
    "sum": (lambda h: h.sum(), ONES, 100_000),
    "sum over a dimension": (lambda h: h.sum(0), ONES, 100_000),
    "np.sum spelling": (lambda h: torch.sum(h, dim=0, keepdim=True), ONES, 100_000),
    "nansum": (lambda h: h.nansum(), ONES, 100_000),
    "cumsum": (lambda h: h.cumsum(0)[-1], ONES, 100_000),
    "300 ** 2": (lambda h: (h**2)[0], BIG, 90_000),
    "pow": (lambda h: h.pow(2)[0], BIG, 90_000),
    "square": (lambda h: h.square()[0], BIG, 90_000),
    "2 ** x": (lambda h: 2**h, torch.tensor(17.0), 131_072),
    "exp": (lambda h: h.exp(), torch.tensor(12.0), 162_754.79),
    "expm1": (lambda h: h.expm1(), torch.tensor(12.0), 162_753.79),
    "softplus": (lambda h: F.softplus(h, beta=1e-5), torch.tensor(12.0), 69_320.72),
    "reciprocal": (lambda h: h.reciprocal(), torch.tensor(2.0**-20), 2.0**20),
    "prod": (lambda h: h.prod(), BIG, -1.44e8),
    "cumprod": (lambda h: h.cumprod(0)[1], BIG, -120_000),
    "norm": (lambda h: h.norm(), BIG.repeat(4) * 40, 104_000),
    "linalg.norm": (torch.linalg.norm, BIG.repeat(4) * 40, 104_000),
    "p-norm": (lambda h: h.norm(p=1), BIG * 40, 76_000),
    "norm, scaled": (lambda h: h.norm() * 40, BIG * 40, 2_080_000),
    "var": (lambda h: h.var(), BIG, 643_333.33),
    "mse_loss": (lambda h: F.mse_loss(h, torch.zeros_like(h)), BIG, 563_333.33),
    "mse_loss, summed": (lambda h: F.mse_loss(h, h * 0, reduction="sum"), BIG, 1_690_000),
    "l1_loss, summed": (lambda h: F.l1_loss(h, h * 0, reduction="sum"), ONES, 100_000),
    "cross_entropy, summed": (lambda h: F.cross_entropy(h, ROWS, reduction="sum"), FAR, 200_907.5),
    "cdist": (lambda h: torch.cdist(h, h * 0), torch.full((1, 2), 60_000.0), 84_852.8),
    "histc counts past 2048": (lambda h: h.histc(bins=1, min=0, max=2), ONES, 100_000),
    "masked_fill(-1e9)": (lambda h: h.masked_fill(h > 0, -1e9)[0], ONES, -1e9),
    "masked_fill(tensor)": (lambda h: h.masked_fill(h > 0, torch.tensor(-1e9))[0], ONES, -1e9),
    "where": (lambda h: torch.where(h > 0, -1e9, h)[0], ONES, -1e9),
    "full_like": (lambda h: torch.full_like(h, 1e6)[0], ONES, 1e6),
    "new_full": (lambda h: h.new_full((1,), 1e6), ONES, 1e6),
    "pad": (lambda h: F.pad(h, (1, 0), value=-1e6)[0], ONES, -1e6),
    "index_fill": (lambda h: h.index_fill(0, torch.tensor([0]), 1e6)[0], ONES, 1e6),
    "scatter": (lambda h: h.scatter(0, torch.tensor([0]), 1e6)[0], ONES, 1e6),
    "threshold": (lambda h: F.threshold(h, 2.0, 1e6)[0], ONES, 1e6),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_what_float32_can_hold_is_held_at_level_1(name, at_level):
    op, x, value = HELD[name]
    with at_level("O1"):
        out = apply(op, x)
    assert out.item() == pytest.approx(value, rel=2e-3)


@pytest.mark.parametrize("name", HELD)
def test_plain_float16_would_have_lost_each_of_them(name):
    op, x, value = HELD[name]
    try:
        out = op(x.half())
    except RuntimeError:
        return  # torch refuses the number
    assert out.item() != pytest.approx(value, rel=2e-3)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_mask_of_minus_a_billion_works_in_every_spelling_and_is_told(level, at_level):
    scores, mask = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[False, False, True]])
    expected = torch.tensor([[1.0, 2.0]]).softmax(-1)

    def in_place(h: Tensor) -> Tensor:
        return (h + 0).masked_fill_(mask, -1e9).softmax(-1)

    def by_fill(h: Tensor) -> Tensor:
        return torch.where(mask, h.clone().fill_(-1e9), h).softmax(-1)

    for spelling in (in_place, by_fill, lambda h: h.masked_fill(mask, -1e9).softmax(-1)):
        with at_level(level) as recorded:
            out = apply(spelling, scores)
            texts = [row["text"] for row in recorded.summary["substitutions"]]
        torch.testing.assert_close(out[:, :2], expected, rtol=1e-3, atol=0)
        assert out[0, 2] == 0
        assert any("beyond the range of float16" in text for text in texts)


def test_a_row_that_is_masked_all_over_is_even_and_not_nan(at_level):
    mask = torch.ones(1, 4, dtype=torch.bool)
    for fill in (Tensor.masked_fill, lambda h, mask, number: (h + 0).masked_fill_(mask, number)):
        with at_level("O1"):
            out = apply(lambda h, fill=fill: fill(h, mask, -1e9).softmax(-1), torch.rand(1, 4))
        assert out.tolist() == [[0.25] * 4]


def test_the_smallest_float32_number_fits_bfloat16_as_well(at_level):
    lowest = torch.finfo(torch.float32).min  # beyond bfloat16's own by a rounding
    with at_level("O1", "dtype=bfloat16"):
        out = apply(lambda h: h.masked_fill(h > 0, lowest), torch.tensor([1.0, -1.0]), torch.bfloat16)
    assert out.tolist() == [lowest, -1.0]


@pytest.mark.parametrize("bound", [1e9, float("inf"), 10.0])
def test_a_bound_beyond_the_range_does_not_change_the_type(bound, at_level):
    seen = []
    with at_level("O1"):
        out = apply(lambda h: seen.append(h.clamp(-bound, bound)) or seen[0], torch.tensor([-20.0, 5.0]))
    assert seen[0].dtype is torch.float16
    assert out.tolist() == [-min(bound, 20.0), 5.0]


def test_numbers_that_fit_leave_the_type_and_tell_nothing(at_level):
    seen = []

    def op(h: Tensor) -> Tensor:
        seen.extend(
            [h.masked_fill(h > 0, -1e4), h.masked_fill(h > 0, float("-inf")), torch.where(h > 0, h, 7)]
        )
        return h

    with at_level("O1") as recorded:
        apply(op, torch.ones(3))
        assert not recorded.summary["substitutions"]
    assert {h.dtype for h in seen} == {torch.float16}


def test_a_type_that_the_script_names_is_the_type_it_gets(at_level):
    seen = []

    def op(h: Tensor) -> Tensor:
        seen.append(h.softmax(-1, dtype=torch.float16))
        seen.append(torch.full_like(h, 1.0, dtype=torch.float64))
        return h

    with at_level("O1"):
        apply(op, torch.ones(3))
    assert [h.dtype for h in seen] == [torch.float16, torch.float64]


def test_doubles_and_integers_are_nobodys_business(at_level):
    seen = []

    def op(h: Tensor) -> Tensor:
        wide = h.double()
        seen.extend([wide @ wide, wide.exp(), wide.sum(), torch.cat([wide, wide]), h.long().sum()])
        return h

    with at_level("O1"):
        apply(op, torch.ones(3))
    assert [h.dtype for h in seen] == [torch.float64] * 4 + [torch.int64]


def test_gradients_of_a_fallback_op_are_those_of_float32(at_level):
    x = torch.tensor([300.0, 2.0, -40.0], requires_grad=True)
    with at_level("O1", "loss_scale.init=1"):
        apply(lambda h: (h**2).sum() / 1000, x).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach() / 1000, rtol=1e-3, atol=0)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("spelling", [lambda a, h: a @ h, torch.mm, torch.spmm, torch.sparse.mm])
def test_a_graph_s_sparse_matrix_multiplies_in_every_layout(spelling, level, at_level):
    """A compressed one has no half kernel on the CPU; a dense one beside it is half as ever."""
    dense = torch.eye(4) + torch.eye(4).roll(1, 0)
    for layout, told in ((dense.to_sparse(), False), (dense.to_sparse_csr(), True)):
        with at_level(level, "loss_scale=1") as recorded:
            x = torch.ones(4, 4, requires_grad=True)
            out = apply(lambda h, layout=layout: spelling(layout, h), x)
            out.sum().backward()
            texts = [row["text"] for row in recorded.summary["substitutions"]]
            types = []
            apply(lambda h, types=types: types.append((h @ h).dtype) or h, torch.ones(4, 4))
        assert torch.equal(out, torch.full((4, 4), 2.0))
        assert torch.equal(x.grad, torch.full((4, 4), 2.0))
        assert any("in FP32" in text for text in texts) or not told
        assert types == [torch.float16]
