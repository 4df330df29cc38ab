"""The sizes of gradients: counted exactly, from few passes, without touching anything or waiting for a device."""

import math
import threading

import pytest
import torch
from torch import nn

from mpx.monitors import Exponents, Pass, Seen
from mpx.monitors.exponents import ELEMENTS, HIGHEST, LOWEST


def a_pass(number: int = 1, scale: float = 1.0, kind: str | None = None) -> Pass:
    return Pass(number, number - 1, Seen("t.py:1", scale, loss_finite=True), kind)


def watching(*gradients: torch.Tensor, half: torch.dtype = torch.float16) -> Exponents:
    """Return a monitor that knows an optimizer whose parameters have these gradients."""
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    monitor = Exponents(half, fetch=lambda counts, then: then(counts.tolist()))
    monitor.kept = optimizer  # the monitor itself holds none alive
    monitor.asked_to_step(optimizer)
    return monitor


def seen(monitor: Exponents, **one) -> dict:
    monitor.passed(a_pass(**one))
    return monitor.snapshot()["gradients"]


def test_each_gradient_counts_in_the_power_of_two_that_it_reaches():
    found = seen(watching(torch.tensor([1.0, -1.5, 1.99, 2.0, 0.25, -0.3])))
    assert found["exponents"] == {"min": -2, "max": 1, "counts": [2, 0, 3, 1]}
    assert found["passes"] == 1


def test_what_is_zero_or_no_number_is_kept_apart():
    found = seen(watching(torch.tensor([0.0, 0.0, 1.0, math.nan, math.inf, -math.inf])))
    assert found["exponents"]["counts"] == [1]
    assert found["zeros"] == pytest.approx(2 / 3)


def test_what_is_out_of_all_bounds_counts_in_the_outermost_bin():
    found = seen(watching(torch.tensor([1e-38, 1e38])))
    assert (found["exponents"]["min"], found["exponents"]["max"]) == (LOWEST, HIGHEST)
    assert sum(found["exponents"]["counts"]) == 2


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_the_share_that_underflows_is_the_share_that_the_type_makes_zero(half, scale):
    generator = torch.Generator().manual_seed(0)
    gradient = torch.exp2(torch.empty(1000).uniform_(-40, 0, generator=generator))
    found = seen(watching(gradient, half=half), scale=scale)
    for name, factor in (("unscaled", 1.0), ("scaled", scale)):
        lost = ((gradient * factor).to(half) == 0).float().mean().item()
        assert found["underflow"][name] == pytest.approx(lost, abs=1e-6)
    assert found["scale"] == scale


def test_every_number_is_counted_where_its_bits_say():
    """Each power of two and its neighbours, down to the least number that there is, at scales with and without ties."""
    powers = torch.tensor([math.ldexp(1.0, exponent) for exponent in range(-149, 128)])
    inf = torch.tensor(math.inf)
    gradient = torch.cat([powers, torch.nextafter(powers, inf), torch.nextafter(powers, -inf), -powers])
    gradient = gradient[gradient != 0]
    monitor = watching(gradient)
    scales = [2.0**-14, 1.0, 3.0, 65536.0]
    for number, scale in enumerate(scales):
        monitor.passed(a_pass(1 + 100 * number, scale))
    found = monitor.snapshot()["gradients"]
    reached = (torch.frexp(gradient).exponent - 1).clamp(LOWEST, HIGHEST)
    assert found["exponents"]["counts"] == [
        len(scales) * int((reached == exponent).sum()) for exponent in range(LOWEST, HIGHEST + 1)
    ]
    lost = [(gradient.abs().double() * scale <= 2.0**-25).double().mean().item() for scale in scales]
    assert found["underflow"]["scaled"] == pytest.approx(sum(lost) / len(scales), rel=1e-12)


def test_a_large_gradient_is_seen_in_part_and_in_every_column():
    """A power of two as width and as distance between samples would show a few columns over and over."""
    gradient = torch.zeros(1024, 1024)
    gradient[:, 1::2] = 1.0
    found = seen(watching(gradient))
    (ones,) = found["exponents"]["counts"]
    assert found["zeros"] == pytest.approx(0.5, abs=0.01)
    assert ones <= ELEMENTS


def test_gradients_of_every_kind_are_counted_or_passed_over():
    half = torch.tensor([0.5], dtype=torch.float16)
    double = torch.tensor([0.5], dtype=torch.float64)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([0.5]), (3,), check_invariants=True)
    found = seen(watching(half, double, sparse, torch.zeros(0)))
    assert found["exponents"] == {"min": -1, "max": -1, "counts": [2]}


@pytest.mark.parametrize("kind", ["backward_inf", "forward_inf", "loss_nan"])
def test_a_pass_that_went_wrong_is_no_sample(kind):
    assert seen(watching(torch.ones(3)), kind=kind) is None


def test_gradients_that_another_thread_trains_with_are_left_alone():
    """Its engine replaces them without Python's lock: to look at them ends in a segmentation fault."""
    monitor = watching(torch.tensor([1.0, 2.0]))
    other = nn.Parameter(torch.zeros(3))
    other.grad = torch.full((3,), 64.0)
    theirs = torch.optim.SGD([other], lr=0.1)
    thread = threading.Thread(target=monitor.asked_to_step, args=(theirs,))
    thread.start()
    thread.join()
    assert seen(monitor)["exponents"] == {"min": 0, "max": 1, "counts": [1, 1]}


def test_nothing_is_touched():
    gradient = torch.randn(100, 7).t()
    before, state = gradient.clone(), torch.random.get_rng_state()
    monitor = watching(gradient)
    seen(monitor)
    (parameter,) = monitor.kept.param_groups[0]["params"]
    assert parameter.grad is gradient
    assert torch.equal(gradient, before)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_samples_become_rare_as_a_run_goes_on(monkeypatch):
    monitor = watching(torch.ones(1))
    sampled = []
    monkeypatch.setattr(monitor, "_sample", lambda: sampled.append(1) or [])
    for number in range(1, 100_001):
        monitor.passed(a_pass(number))
    assert 100 < len(sampled) < 32 * math.log2(100_000)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_run_at_any_level_tells_how_large_its_gradients_are(at_level, level):
    with at_level(level) as recorded:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
        found = recorded.summary["gradients"]
    assert found["half"] == "float16"
    assert sum(found["exponents"]["counts"]) > 0


@pytest.mark.gpu
def test_no_pass_waits_for_the_device():
    monitor = watching(torch.randn(300, 300, device="cuda"), torch.randn(5, device="cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        monitor.passed(a_pass(1, 8.0))
        monitor.passed(a_pass(100, 8.0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = monitor.snapshot()["gradients"]
    assert found["passes"] == 2
    assert sum(found["exponents"]["counts"]) > 0
