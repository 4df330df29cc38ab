"""An op that writes into a tensor given as `out` computes in the type of that tensor, wherever its inputs come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Op = Callable[[Tensor, Tensor, Tensor], Tensor]  # of an activation, a weight and a bias


def empty(*shape: int) -> Tensor:
    return torch.empty(shape)


ROWS = torch.zeros(4, 8, dtype=torch.int64)
OPS: dict[str, Op] = {
    "mm": lambda h, w, b: torch.mm(h, w, out=empty(4, 8)),
    "matmul": lambda h, w, b: torch.matmul(h, w, out=empty(4, 8)),
    "bmm": lambda h, w, b: torch.bmm(h[None], w[None], out=empty(1, 4, 8)),
    "addmm": lambda h, w, b: torch.addmm(b, h, w, out=empty(4, 8)),
    "baddbmm": lambda h, w, b: torch.baddbmm(b, h[None], w[None], out=empty(1, 4, 8)),
    "mv": lambda h, w, b: torch.mv(h, b, out=empty(4)),
    "dot": lambda h, w, b: torch.dot(h[0], b, out=empty()),
    "tensordot": lambda h, w, b: torch.tensordot(h, w, dims=1, out=empty(4, 8)),
    "multi_dot": lambda h, w, b: torch.linalg.multi_dot([h, w, w], out=empty(4, 8)),
    "FP32 by weights": lambda h, w, b: torch.mm(torch.ones(4, 8), w, out=empty(4, 8)),
    "softmax": lambda h, w, b: torch.softmax(h, 1, out=empty(4, 8)),
    "norm": lambda h, w, b: torch.norm(h, 2, 1, out=empty(4)),
    "topk": lambda h, w, b: torch.topk(h, 2, out=(empty(4, 2), ROWS[:, :2].clone()))[0],
    "gather": lambda h, w, b: torch.gather(h, 0, ROWS, out=empty(4, 8)),
    "index_select": lambda h, w, b: torch.index_select(h, 1, ROWS[0], out=empty(4, 8)),
    "scatter_add": lambda h, w, b: torch.scatter_add(torch.zeros(4, 8), 0, ROWS, h, out=empty(4, 8)),
    "lerp": lambda h, w, b: torch.lerp(h, torch.ones(4, 8), 0.5, out=empty(4, 8)),
}


class Probe(nn.Module):
    def __init__(self, op: Op) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        with torch.no_grad():  # ops that are given `out` have no gradient
            self.found = self.op(h, self.linear.weight, self.linear.bias)
        self.ran_in = self.found.dtype
        return h


def found_by(op: Op) -> Probe:
    probe = Probe(op)
    torch.manual_seed(1)
    probe(torch.randn(4, 8))
    return probe


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_result_has_the_type_of_the_given_tensor(level: str, at_level: Any) -> None:
    plain = {name: found_by(op) for name, op in OPS.items()}
    with at_level(level):
        found = {name: found_by(op) for name, op in OPS.items()}
    for name, probe in found.items():
        assert probe.ran_in is torch.float32, name
        torch.testing.assert_close(probe.found, plain[name].found, rtol=5e-3, atol=5e-3, msg=name)


def test_the_arithmetic_is_that_of_the_given_type(at_level: Any) -> None:
    far, total = torch.full((8, 1), 60000.0), empty(4, 1)
    with at_level("O2"):
        found_by(lambda h, w, b: torch.mm(h.sign().abs(), far.to(h.dtype), out=total))
    assert total.tolist() == [[480000.0]] * 4  # beyond the range of half


def test_what_the_script_gives_in_half_or_in_doubles_stays_so(at_level: Any) -> None:
    with at_level("O2"):
        half = found_by(lambda h, w, b: torch.mm(h, w, out=torch.empty_like(h)))
        with pytest.raises(RuntimeError, match="dtype"):
            found_by(lambda h, w, b: torch.mm(h, w, out=torch.empty(4, 8, dtype=torch.float64)))
    assert half.ran_in is torch.float16


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("addmm_", [(3, 4), (3, 5), (5, 4)]),
        ("addmv_", [(3,), (3, 5), (5,)]),
        ("addr_", [(3, 4), (3,), (4,)]),
        ("addbmm_", [(3, 4), (2, 3, 5), (2, 5, 4)]),
        ("baddbmm_", [(2, 3, 4), (2, 3, 5), (2, 5, 4)]),
    ],
)
def test_a_product_added_in_place_takes_the_type_of_what_it_is_added_to(name, shapes, level, at_level):
    """A half result beside FP32 weights, which torch refuses."""
    torch.manual_seed(0)
    numbers = [torch.randn(shape).bfloat16() for shape in shapes]
    exact = getattr(numbers[0].float(), name)(*(n.float() for n in numbers[1:]))
    with at_level(level, "dtype=bfloat16") as recorded, recorded.session.region.autocast("cpu"):
        found = getattr(numbers[0].clone(), name)(*(n.float() for n in numbers[1:]))
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), exact, rtol=2**-7, atol=2**-6)  # sums that cancel
