"""Laws that a table of cases is held to, and small things that train."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import pytest

from mpx.engine import reused
from mpx.engine.devices import DEVICES
from mpx.engine.reroutes import products

SCALES = tuple(2.0**k for k in (0, 8, 16, 24))
# Roundings to half on the way of a gradient in the cases, times the unit roundoff, with room for sums that cancel.
TOLERANCE = {"float16": 2.0**-8, "bfloat16": 2.0**-5}

Cases = Mapping[str, Callable[[], Iterable]]


def copies(cases: Cases):
    return {name: [tensor.detach().clone() for tensor in function()] for name, function in cases.items()}


@pytest.fixture
def far_from_float32(at_level):
    """Return a function: which tensors that cases return at a level are off from those without a session."""

    def compare(cases: Cases, level: str, half: str) -> list[str]:
        true = copies(cases)
        with at_level(level, f"dtype={half}", "loss_scale=1024"):
            found = copies(cases)
        wrong = []
        for name in cases:
            for place, (ours, plain) in enumerate(zip(found[name], true[name], strict=True)):
                off = ((ours - plain).abs().max() / plain.abs().max()).item()
                if ours.dtype != plain.dtype or not off <= TOLERANCE[half]:
                    wrong.append(f"{name}[{place}]: {ours.dtype}, off by {off:.2g}")
        return wrong

    return compare


@pytest.fixture
def different_by_scale(at_level):
    """Return a function: the tensors of cases that are not the same to the last bit at every loss scale.

    In BF16, which has the range of FP32: nothing over- or underflows, and powers of two are exact.
    """

    def compare(cases: Cases, level: str) -> list[str]:
        found = {}
        for scale in SCALES:
            mode = "none" if scale == 1 else "static"
            settings = (f"loss_scale.mode={mode}", f"loss_scale.init={scale:.0f}")
            with at_level(level, "dtype=bfloat16", *settings):
                found[scale] = copies(cases)
        return [
            f"{name}[{place}] at {scale:g}"
            for scale in SCALES
            for name in cases
            for place, (ours, first) in enumerate(zip(found[scale][name], found[1.0][name], strict=True))
            if not ours.equal(first)
        ]

    return compare


@pytest.fixture(params=["torch's", "ours"])
def kernels(request, monkeypatch):
    """Say whose kernels cast a weight: on a CPU without half instructions they are ours."""
    capable = {"avx2"} if request.param == "ours" else {"avx2", "avx512_fp16", "avx512_bw"}
    monkeypatch.setattr(products, "FEW", 0)
    monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], capabilities=lambda: frozenset(capable)))


@pytest.fixture
def all_are_large(monkeypatch):
    """Small weights are kept as well."""
    monkeypatch.setattr(reused, "LARGE", 0)


@pytest.fixture
def at_half(at_level, all_are_large):
    """Return a context manager: a level with a half type, and a scale that nothing here overflows at."""
    return lambda level, half: at_level(
        level, f"dtype={half}", *(["loss_scale=64"] if half == "float16" else [])
    )
