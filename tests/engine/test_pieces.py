"""What is computed in FP32 between large half tensors is computed in pieces."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from mpx.engine.devices import DEVICES
from mpx.engine.reroutes import matrix_product, pieces, rooms
from mpx.engine.reroutes.matrix_product import product

from .reroute_cases import HALF, UNABLE

ULP = 2.0**-10  # of float16, relative
SMALL, LEAST = 2**10, 4  # numbers, and rows or columns, of a piece in these tests


class Sizes(TorchDispatchMode):
    """Remembers the numbers of the largest FP32 tensor that an op returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.dtype is torch.float32:
            self.largest = max(self.largest, found.numel())
        return found


CALLS = {
    "linear": F.linear,
    "linear of rows": lambda x, w: F.linear(x.flatten(0, -2), w),
    "matmul": lambda x, w: x @ w.t(),
    "mm": lambda x, w: torch.mm(x.flatten(0, -2), w.t()),
    "addmm": lambda x, w: torch.addmm(w[:, 0], x.flatten(0, -2), w.t()),
    "few rows": lambda x, w: F.linear(w[:2], x.flatten(0, -2)),
    "few rows, bias": lambda x, w: F.linear(w[:2], x.flatten(0, -2), x[..., 0].flatten()),
    "matrix of many columns": lambda x, w: w[:2] @ x.flatten(0, -2).t().contiguous(),
    "bmm": lambda x, w: torch.bmm(x, x.mT),
    "attention": lambda x, w: F.scaled_dot_product_attention(*[x.view(64, 2, 8, 16)] * 3),
}


@pytest.fixture
def region(at_level, monkeypatch):
    """Open a region on a CPU without half instructions, where pieces are small."""
    monkeypatch.setattr(pieces, "PIECE", SMALL)
    monkeypatch.setattr(matrix_product, "LEAST", LEAST)
    monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], capabilities=lambda: UNABLE))
    with at_level("O1", "loss_scale=1") as recorded, recorded.session.region.autocast("cpu"):
        yield


def operands() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(64, 16, 16).to(HALF), torch.randn(24, 16).to(HALF)
    return x.requires_grad_(), weight.requires_grad_()


@pytest.mark.parametrize("name", CALLS)
def test_no_float32_tensor_is_larger_than_two_pieces(name, region):
    x, weight = operands()
    with Sizes() as sizes:
        out = CALLS[name](x, weight)
        out.backward(torch.ones_like(out))
    assert 0 < sizes.largest <= 2 * SMALL < x.numel()


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_those_of_the_whole_up_to_their_last_rounding(name, region, monkeypatch):
    """And they lie in memory alike: what views a result, or adds to a gradient, finds it as it is without pieces."""

    def run() -> list[Tensor]:
        x, weight = operands()
        out = CALLS[name](x, weight)
        out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(HALF))
        return [t for t in (out, x.grad, weight.grad) if t is not None]

    cut = run()
    monkeypatch.setattr(pieces, "PIECE", 2**40)
    whole = run()
    assert len(cut) == len(whole)
    for one, other in zip(cut, whole, strict=True):
        assert one.stride() == other.stride()
        # sums of 1,024 products of numbers around 1, which may cancel: FP32 is off by 1e-4 in any order
        torch.testing.assert_close(one, other, rtol=ULP, atol=1e-4)


def test_the_gradient_of_a_weight_is_summed_in_float32_over_the_pieces(region):
    """In half, a sum of ones stops at 2,048."""
    x, weight = torch.ones(4096, 4).to(HALF), torch.ones(16, 4).to(HALF).requires_grad_()
    bias = torch.ones(16).to(HALF).requires_grad_()
    F.linear(x, weight, bias).backward(torch.ones(4096, 16).to(HALF))
    assert weight.grad.eq(4096).all()
    assert bias.grad.eq(4096).all()


# ------------------------------------------------------------------ FP32 matrices of pieces are written into kept rooms

MATRICES = [name for name in CALLS if name not in ("bmm", "attention")]


@pytest.fixture
def rooms_of_a_test(monkeypatch):
    """Nobody has asked for a room before."""
    monkeypatch.setattr(rooms, "_here", rooms._Here())
    return rooms._here


def allocated(run: Callable[[], object]) -> int:
    """Return how many bytes of tensors `run` takes from the heap, given back or not."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    return sum(max(0, event.self_cpu_memory_usage) for event in profiled.events())


@pytest.mark.parametrize("name", MATRICES)
def test_a_product_takes_no_float32_matrix_from_the_heap(name, region, rooms_of_a_test):
    x, weight = operands()
    grad = torch.ones_like(CALLS[name](x, weight))

    def run() -> None:
        CALLS[name](x, weight).backward(grad)

    run()
    # half: the result, once more where it is transposed, and gradients, which are cut and added to those of before;
    # the FP32 faces of all operands and results, of three products, would be four times as much
    half = 2 * (2 * grad.numel() + 2 * x.numel() + 2 * weight.numel())
    assert allocated(run) < 1.5 * half
    kept = sum(there.numel() for there in rooms_of_a_test.rooms.values())
    assert 0 < kept <= len(rooms_of_a_test.rooms) * 2 * SMALL
    assert set(rooms_of_a_test.rooms) == {"a", "b", "grad", "result", "sum"}


def test_a_room_is_no_larger_than_two_pieces(region, rooms_of_a_test):
    x, weight = torch.ones(4096, 64, dtype=HALF), torch.ones(512, 64, dtype=HALF)  # a weight of 32 pieces
    F.linear(x.requires_grad_(), weight.requires_grad_()).sum().backward()
    assert x.grad.eq(512).all()
    assert rooms_of_a_test.rooms
    assert all(there.numel() <= 2 * SMALL for there in rooms_of_a_test.rooms.values())


@pytest.mark.parametrize("name", MATRICES)
def test_rooms_that_inference_asked_for_first_serve_a_training_step(name, region, rooms_of_a_test):
    x, weight = operands()
    with torch.inference_mode():
        CALLS[name](x.detach(), weight.detach())
    assert rooms_of_a_test.rooms
    out = CALLS[name](x, weight)
    out.backward(torch.ones_like(out))
    assert x.grad.isfinite().all()


def test_each_thread_has_its_own_rooms(region, rooms_of_a_test):
    x, weight = operands()
    of_threads: list[set[int]] = []

    def run() -> None:
        product(None, x.detach().flatten(0, -2), weight.detach(), is_weight=True)
        of_threads.append({there.data_ptr() for there in rooms._here.rooms.values()})

    run()
    other = Thread(target=run)
    other.start()
    other.join()
    assert of_threads[0]
    assert len(of_threads[0]) == len(of_threads[1])
    assert of_threads[0].isdisjoint(of_threads[1])


def test_a_signal_in_the_middle_of_a_product_may_train(region, rooms_of_a_test, monkeypatch):
    """Its handler runs between two pieces, as Python lets it between any two instructions."""
    x, weight = operands()
    true = F.linear(x, weight)
    other, ones = torch.ones_like(x).requires_grad_(), torch.ones_like(weight).requires_grad_()
    out = F.linear(other, ones)

    def handle(number: int, frame: object) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        out.backward(torch.ones_like(out))

    def times_in(*args: Any, **kwargs: Any) -> Tensor:
        os.kill(os.getpid(), signal.SIGUSR1)
        return rooms.times_in(*args, **kwargs)

    monkeypatch.setattr(matrix_product, "times_in", times_in)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        found = F.linear(x, weight)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert other.grad.eq(24).all()
    assert found.equal(true)


@pytest.mark.parametrize("name", MATRICES)
def test_a_batch_of_gradients_is_the_gradients_one_by_one(name, region, rooms_of_a_test):
    x, weight = operands()
    out = CALLS[name](x, weight)
    grads = torch.stack([torch.ones_like(out), torch.linspace(-1, 1, out.numel()).view(out.shape).to(HALF)])
    batch = torch.autograd.grad(out, (x, weight), grads, is_grads_batched=True, retain_graph=True)
    for place, grad in enumerate(grads):
        alone = torch.autograd.grad(out, (x, weight), grad, retain_graph=True)
        for found, one in zip(batch, alone, strict=True):
            torch.testing.assert_close(found[place], one, rtol=ULP, atol=1e-3)


class Keeps(TorchDispatchMode):
    """Keeps what each op returns, and what it was then."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and func._schema.name == "aten::mm":
            self.seen.append((found, found.clone()))
        return found


def test_a_mode_of_the_script_may_keep_what_it_sees(region, rooms_of_a_test):
    x, weight = operands()
    F.linear(x, weight)  # the rooms are there
    with Keeps() as keeps:
        F.linear(x, weight)
    assert len(keeps.seen) > 2
    assert all(kept.equal(then) for kept, then in keeps.seen)


class Names(TorchDispatchMode):
    """Remembers which ops ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MATRICES)
def test_a_mode_of_the_script_sees_the_ops_of_a_plain_product(name, region, rooms_of_a_test):
    """One that counts, replaces or quantizes `mm` does not know `mm.out`."""
    x, weight = operands()
    with Names() as names:
        out = CALLS[name](x, weight)
        out.backward(torch.ones_like(out))
    assert names.seen & {"aten.mm.default", "aten.addmm.default"}
    assert not [op for op in names.seen if op.endswith(".out")]


def test_a_product_that_a_script_has_replaced_is_asked_as_it_was(region, monkeypatch):
    own = torch.mm

    def product_of_two(a: Tensor, b: Tensor) -> Tensor:
        return own(a, b)

    monkeypatch.setattr(torch, "mm", product_of_two)
    x, weight = operands()
    F.linear(x, weight).sum().backward()
    assert x.grad.isfinite().all()


# ------------------------------------------------------------------ attention


def test_attention_with_a_mask_of_each_sequence_is_cut_with_it(region):
    x, _ = operands()
    heads = x.detach().view(64, 2, 8, 16)
    mask = (torch.rand(64, 1, 8, 8) < 0.7) | torch.eye(8, dtype=torch.bool)
    found = F.scaled_dot_product_attention(heads, heads, heads, mask)
    alone = [
        F.scaled_dot_product_attention(*[h[None]] * 3, m[None]) for h, m in zip(heads, mask, strict=True)
    ]
    torch.testing.assert_close(found, torch.cat(alone), rtol=ULP, atol=1e-4)


@pytest.mark.parametrize("shape", [(512, 16), (4, 512, 16)])
def test_attention_is_cut_along_the_batch_and_never_along_a_sequence(shape, region):
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape).to(HALF) for _ in range(3))
    found = F.scaled_dot_product_attention(q, k, v)
    exact = torch.softmax(q.double() @ k.double().mT / 4, -1) @ v.double()
    torch.testing.assert_close(found.double(), exact, rtol=ULP, atol=1e-4)


@pytest.mark.parametrize(
    "shapes", [((4096, 1), (1, 1)), ((4096, 8), (1, 8)), ((1, 8), (4096, 8)), ((4096, 1, 8), (3, 8))]
)
def test_strides_are_torch_s_also_of_dimensions_of_one(shapes, region):
    x, weight = (torch.randn(shape).to(HALF).requires_grad_() for shape in shapes)
    out = F.linear(x, weight)
    out.sum().backward()
    assert out.stride() == F.linear(x.float(), weight.float()).stride()
    assert x.grad.stride() == torch.empty(shapes[0]).stride()
    assert weight.grad.stride() == torch.empty(shapes[1]).stride()


@pytest.mark.parametrize("piece", [SMALL, 2**40])
@pytest.mark.parametrize("name", CALLS)
def test_a_result_may_be_written_in_place(name, piece, region, monkeypatch):
    """As `nn.ReLU(inplace=True)` does: autograd refuses that of views which a Function returns."""
    monkeypatch.setattr(pieces, "PIECE", piece)
    x, weight = operands()
    out = CALLS[name](x, weight)
    out.relu_().sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.ne(0).any()
