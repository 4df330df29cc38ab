"""The region opens around the outermost call of a module with FP32 state, and nowhere else; what leaves it is FP32."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from mpx.engine.devices import DEVICES, describe, device_of
from mpx.errors import DeviceError

HALF = torch.float16
LEVELS = pytest.mark.parametrize("level", ["O1", "O2", "O3"])


class Wide(NamedTuple):
    half: Tensor
    listed: list[Tensor]


class Returns(nn.Module):
    """Returns its half activation in some structure."""

    def __init__(self, shape) -> None:
        super().__init__()
        self.linear, self.shape = nn.Linear(4, 4), shape

    def forward(self, x: Tensor):
        h = self.linear(x)
        self.inside = h.dtype
        return self.shape(h)


def kinds(value) -> set[torch.dtype]:
    if isinstance(value, Tensor):
        return {value.dtype}
    return set().union(*(kinds(part) for part in (value.values() if isinstance(value, dict) else value)))


@LEVELS
@pytest.mark.parametrize(
    "shape",
    [
        lambda h: h,
        lambda h: (h, [h, {"a": h}]),
        lambda h: Wide(h, [h]),
        lambda h: OrderedDict(logits=h),
        lambda h: h.max(-1, keepdim=True).values,
    ],
    ids=["tensor", "nested", "named tuple", "OrderedDict", "reduced"],
)
def test_what_leaves_the_region_is_float32_in_the_structure_of_the_script(level, shape, at_level):
    with at_level(level):
        model = Returns(shape)
        out = model(torch.randn(2, 4))
        assert model.inside is HALF
        assert type(out) is type(shape(torch.zeros(2, 4)))
        assert kinds(out) == {torch.float32}


@LEVELS
def test_what_stays_inside_is_half(level, at_level):
    seen = []
    with at_level(level):
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        # those of one module are given FP32
        with nn.modules.module.register_module_forward_hook(
            lambda _, args, out: seen.append((args[0].dtype, out.dtype))
        ):
            model(torch.randn(2, 4))
    # inner modules first; the hook of the outermost runs before its result leaves
    assert seen == [(torch.float32, HALF), (HALF, HALF), (HALF, HALF), (HALF, HALF), (torch.float32, HALF)]


@LEVELS
def test_losses_activations_and_the_script_s_own_arithmetic_are_float32(level, at_level):
    x, y = torch.randn(4, 4), torch.rand(4, 4)
    expected = [
        x @ y,
        x.softmax(-1),
        F.mse_loss(x, y),
        nn.BCELoss()(y, y),
        nn.Softmax(-1)(x),
        nn.Flatten()(x),
    ]
    with at_level(level):
        found = [
            x @ y,
            x.softmax(-1),
            F.mse_loss(x, y),
            nn.BCELoss()(y, y),
            nn.Softmax(-1)(x),
            nn.Flatten()(x),
        ]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@LEVELS
def test_a_module_with_nothing_but_a_float32_buffer_opens_the_region(level, at_level):
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            h = x @ self.table
            self.inside = h.dtype
            return h

    with at_level(level):
        model = Table()
        assert model(torch.randn(2, 4)).dtype is torch.float32
        assert model.inside is HALF


def test_modules_on_the_meta_device_and_of_integers_open_none(at_level):
    with at_level("O1") as recorded:
        with torch.device("meta"):
            meta = nn.Linear(4, 4)
        assert meta(torch.empty(2, 4, device="meta")).dtype is torch.float32
        counter = nn.Module()
        counter.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        counter.forward = lambda x: x @ x
        x = torch.randn(3, 3)
        assert torch.equal(counter(x), x @ x)
        assert recorded.summary["forwards"] == 0


@LEVELS
def test_autocast_is_as_before_after_a_call_and_after_one_that_failed(level, at_level):
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise KeyError("of the script")

    with at_level(level):
        before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        nn.Sequential(nn.Linear(4, 4))(torch.randn(2, 4))
        with pytest.raises(KeyError, match="of the script"):
            nn.Sequential(Fails(4, 4))(torch.randn(2, 4))
        assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == before
        x = torch.randn(3, 3)
        assert torch.equal(x @ x, torch.mm(x, x))


def test_another_thread_has_a_region_of_its_own(at_level):
    """A metric computed in a thread while the model runs is no part of the model's call."""
    x, results = torch.randn(8, 8), {}

    def metric() -> None:
        results["metric"] = x @ x
        results["model"] = nn.Linear(8, 8)(x).dtype

    class Waits(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=metric)
            thread.start()
            thread.join()
            return super().forward(x)

    with at_level("O1"):
        Waits(8, 8)(x)
    assert torch.equal(results["metric"], x @ x)
    assert results["model"] is torch.float32


class Prepared(Dataset):
    """Data that a module prepares in a worker process: a random projection."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.project = nn.Linear(4, 4)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            return self.project(torch.full((4,), 1.0 + index))


def test_modules_in_a_worker_that_prepares_data_compute_in_float32(at_level):
    data = Prepared()
    expected = torch.stack([data[0], data[1]])
    with at_level("O1") as recorded:
        assert not torch.equal(torch.stack([data[0], data[1]]), expected)  # in the script's own process: half
        told = lambda worker: recorded.session.forked()  # noqa: E731 - what a run does after each fork
        (batch,) = DataLoader(data, batch_size=2, num_workers=1, worker_init_fn=told)
    assert torch.equal(batch, expected)


@LEVELS
def test_the_same_random_numbers_are_drawn_as_in_float32(level, at_level):
    def masks_and_state(model: nn.Module) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        out = model(torch.ones(4, 64))
        return out == 0, torch.rand(2)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Dropout(0.2))
    mask, after = masks_and_state(model)
    with at_level(level):
        ours = masks_and_state(model)
    assert torch.equal(ours[0], mask)
    assert torch.equal(ours[1], after)


def test_inputs_that_count_things_are_not_rounded(at_level):
    """Time steps, ids, pixels: a batch is cast at the op that works on it, not at the door."""

    class Steps(nn.Linear):
        def forward(self, t: Tensor) -> Tensor:
            self.seen = t
            return super().forward(t / 4000)

    for level in ("O1", "O2", "O3"):
        with at_level(level, "dtype=bfloat16"):
            model = Steps(1, 1)
            t = torch.tensor([[999.0], [2049.0]])
            model(t)
            assert model.seen is t


# ------------------------------------------------------------------ devices


def test_a_device_without_a_row_is_refused_with_a_way_out():
    with pytest.raises(
        DeviceError, match=r"no rules for device type `meta`\. Expected one of: cpu, cuda"
    ) as refusal:
        device_of(torch.empty(1, device="meta"))
    assert refusal.value.exit_code == 3
    assert "--opt-level O0" in refusal.value.hint


def test_a_gpu_that_emulates_bfloat16_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    DEVICES["cuda"].require(torch.float16)
    with pytest.raises(
        DeviceError, match=r"`Tesla T4` cannot compute in `bfloat16`.*Received 7\.5"
    ) as refusal:
        DEVICES["cuda"].require(torch.bfloat16)
    assert refusal.value.hint == "use `--dtype float16`"


def test_a_device_is_asked_once_at_its_first_use_and_its_refusal_reaches_the_script(at_level, monkeypatch):
    asked = []

    def require(half: torch.dtype) -> None:
        asked.append(half)
        raise DeviceError("not this one")

    monkeypatch.setitem(
        DEVICES, "cpu", DEVICES["cpu"].__class__(**{**vars(DEVICES["cpu"]), "require": require})
    )
    with at_level("O1"):
        assert asked == []
        with pytest.raises(DeviceError, match="not this one"):
            nn.Linear(2, 2)(torch.ones(1, 2))
    assert asked == [HALF]


def test_the_record_knows_the_device_without_starting_it():
    described = describe()
    assert described["type"] in DEVICES
    assert described["name"]
    assert set(described["capabilities"]) <= {"amx_bf16", "amx_fp16", "avx512_bf16", "avx512_fp16"}
    assert DEVICES["cpu"].peak_bytes() > 2**20
