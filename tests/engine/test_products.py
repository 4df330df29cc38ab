"""Matrix products without half instructions: which are left to the half kernel, and how gradients lie in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mpx.engine.devices import DEVICES
from mpx.engine.reroutes import products

from .reroute_cases import HALF, MADE_OF_PRODUCTS, PRODUCTS, UNABLE, run, substituted

ALL_SMALL, NONE_SMALL = 1000, 0  # multiply-adds


@pytest.fixture
def session(at_level, monkeypatch):
    """Return a context manager: a session on such a CPU, where products of fewer than `few` multiply-adds are small."""

    def enter(few: int, level: str = "O1"):
        monkeypatch.setattr(products, "FEW", few)
        monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], capabilities=lambda: UNABLE))
        return at_level(level, "loss_scale=1")

    return enter


def region(recorded: Any) -> Any:
    return recorded.session.region.autocast("cpu")


@pytest.mark.parametrize("own", ["torch's kernel", "torch before 2.9"])
@pytest.mark.parametrize("name", [name for name in PRODUCTS if name not in MADE_OF_PRODUCTS])
def test_a_small_one_is_the_half_kernels(name, own, session, monkeypatch):
    case = PRODUCTS[name]
    if own == "torch before 2.9":  # has no way to call its kernel below a rule
        monkeypatch.delattr(torch.library, "get_kernel", raising=False)
    with session(ALL_SMALL) as recorded:
        for dtype in (HALF, torch.float32):  # weights of O2 and of O1
            out, grads = run(case, dtype, region(recorded))
            plain, plain_grads = run(case, HALF)
            assert torch.equal(out, plain)
            assert all(torch.equal(a, b.to(dtype)) for a, b in zip(grads, plain_grads, strict=True))
        assert not substituted(recorded, case)


@pytest.mark.parametrize("function", [torch.mm, torch.bmm, torch.matmul, F.linear])
@pytest.mark.parametrize("transposed", [(), (0,), (1,), (0, 1)])
def test_a_gradient_lies_in_memory_as_its_operand(function, transposed, session):
    """It will be added to one that does: across the order of memory that takes longer than the product."""
    batch = (2,) if function is torch.bmm else ()
    shapes = [(3, 5), (4, 5) if function is F.linear else (5, 4)]
    operands = [
        torch.randn(*batch, *reversed(shape)).half().mT
        if i in transposed
        else torch.randn(*batch, *shape).half()
        for i, shape in enumerate(shapes)
    ]
    wanted = operands[1:] if function is F.linear else operands  # an input is added to nothing
    for operand in wanted:
        operand.requires_grad_()
    with session(NONE_SMALL) as recorded, region(recorded):
        out = function(*operands)
    grads = torch.autograd.grad(out, wanted, torch.ones_like(out))
    assert [grad.stride() for grad in grads] == [operand.stride() for operand in wanted]


def test_a_vector_in_place_of_a_linear_weight_is_left_to_the_half_kernel(session):
    x, weight = torch.randn(7, 5).half(), torch.randn(5).half()
    plain = F.linear(x, weight)
    with session(NONE_SMALL) as recorded, region(recorded):
        assert torch.equal(F.linear(x, weight), plain)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", [torch.nn.LSTMCell, torch.nn.GRUCell, torch.nn.RNNCell])
def test_a_cell_keeps_what_its_products_keep_and_no_float32_weight(kind, level, session):
    """Computed in FP32 from end to end, it kept its weights in FP32 once a step."""
    kept = []
    with session(NONE_SMALL, level) as recorded:
        cell, x = kind(8, 8), torch.randn(4, 8, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            found = cell(x)
        (found[0] if kind is torch.nn.LSTMCell else found).sum().backward()
        assert [one["id"] for one in recorded.session.summary()["substitutions"]] == ["op:linear"]
    assert {tensor.dtype for tensor in kept if tensor.numel() > x.numel()} == {HALF}
    assert x.grad.ne(0).all()
