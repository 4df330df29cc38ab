"""Recurrent networks that a CPU runs step by step cast their weights once a call or piece of it, not at each step."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from mpx.engine.devices import DEVICES

STEPS = 12
KINDS = [(nn.GRU, {}), (nn.RNN, {}), (nn.RNN, {"nonlinearity": "relu"})]
WAYS = {
    "plain": {},
    "layers": {"num_layers": 2},
    "both ways": {"bidirectional": True},
    "no bias": {"bias": False},
}
CASES = [
    pytest.param(
        kind, own | way, packed, id=f"{kind.__name__}-{'-'.join(own.values())}-{name}-{packed or 'padded'}"
    )
    for (kind, own), (name, way), packed in product(KINDS, WAYS.items(), ["", "packed"])
]


@pytest.fixture
def able(monkeypatch):
    """A CPU that has instructions for both half types, whatever this one has."""
    monkeypatch.setitem(
        DEVICES, "cpu", replace(DEVICES["cpu"], capabilities=lambda: {"avx2", "avx512_bw", "avx512_fp16"})
    )


def model_of(kind, options):
    torch.manual_seed(0)
    return kind(6, 16, **{"batch_first": True} | options)


def inputs(packed, steps):
    x = torch.randn(3, steps, 6, generator=torch.Generator().manual_seed(1))
    return nn.utils.rnn.pack_padded_sequence(x, [steps, 7, 2], batch_first=True) if packed else x


def trained(model, packed="", region=None, *, steps=STEPS):
    """Return outputs and gradients in FP64, which holds all of their numbers."""
    x = inputs(packed, steps).to(model.weight_ih_l0.dtype)
    x = x if model.batch_first else x.transpose(0, 1)
    torch.manual_seed(2)
    with region or nullcontext():
        out, state = model(x)
    out = out.data if packed else out
    wide = torch.promote_types(out.dtype, torch.float32)
    (out.to(wide).square().sum() + state.to(wide).sum()).backward()
    return [value.detach().double() for value in (out, state, *(p.grad for p in model.parameters()))]


@pytest.mark.parametrize(("kind", "options", "packed"), CASES)
def test_it_computes_what_autocast_by_hand_does(kind, options, packed, able, at_level):
    """To the bit: `torch.autocast` keeps its casts, and so casts once as well."""
    by_hand = trained(model_of(kind, options), packed, torch.autocast("cpu", dtype=torch.bfloat16))
    with at_level("O1-bf16"):
        found = trained(model_of(kind, options), packed)
    assert all(torch.equal(a, b) for a, b in zip(found, by_hand, strict=True))


LONG = 500


@pytest.mark.parametrize(
    ("options", "packed"),
    [({"num_layers": 2, "dropout": 0.5}, ""), ({"bidirectional": True}, ""), ({}, "packed")],
    ids=["dropout", "both ways", "packed"],
)
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_what_cannot_be_cut_into_pieces_casts_at_each_step(kind, options, packed, able, at_level):
    """To the bit, and with the numbers that dropout would draw."""
    region = torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
    by_hand = trained(model_of(kind, options), packed, region, steps=LONG)
    with at_level("O1-bf16"):
        found = trained(model_of(kind, options), packed, steps=LONG)
    assert all(torch.equal(a, b) for a, b in zip(found, by_hand, strict=True))


@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2}, {"batch_first": False}], ids=["one", "two", "time first"]
)
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_gradients_of_many_steps_are_not_added_in_half(kind, options, able, at_level):
    """Pieces have gradients of their own, added in FP32; results are those of a single call, up to their last bit."""
    exact = trained(model_of(kind, options).double(), steps=LONG)
    region = torch.autocast("cpu", dtype=torch.bfloat16)
    by_hand = trained(model_of(kind, options), region=region, steps=LONG)
    with at_level("O1-bf16"):
        found = trained(model_of(kind, options), steps=LONG)
    for value, other in zip(
        found[:2], by_hand[:2], strict=True
    ):  # oneDNN may cut a product of fewer rows otherwise
        torch.testing.assert_close(value, other, rtol=2**-7, atol=2**-7)

    def error(gradients):
        return max(((a - b).norm() / b.norm()).item() for a, b in zip(gradients[2:], exact[2:], strict=True))

    assert error(found) < error(by_hand) / 2


@pytest.mark.parametrize("batch_first", [True, False])
def test_results_of_pieces_lie_in_memory_as_those_of_a_call(batch_first, able, at_level):
    model = model_of(nn.GRU, {"batch_first": batch_first})
    x = torch.randn(3, LONG, 6)
    plain, _ = model(x if batch_first else x.transpose(0, 1))
    with at_level("O1-bf16"):
        found, _ = model(x if batch_first else x.transpose(0, 1))
    assert (found.shape, found.stride()) == (plain.shape, plain.stride())


@pytest.mark.parametrize("level", ["O1", "O2", "O1-bf16", "O2-bf16"])
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_the_number_of_casts_that_are_kept_does_not_grow_with_the_steps(kind, level, able, at_level):
    weights = {}
    with at_level(level):
        model = model_of(kind, {})
        size = model.weight_hh_l0.numel()

        def note(saved):
            storage = saved.untyped_storage()
            if saved.element_size() == 2 and saved.numel() == size:
                weights[storage.data_ptr()] = storage
            return saved

        with saved_tensors_hooks(note, lambda saved: saved):
            model(inputs("", STEPS))
    assert len(weights) == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_the_state_of_a_cell_is_as_the_script_gave_it(level, half, at_level):
    """In BF16 a sum of thousandths stops at a half; `torch.autocast` leaves the state of a cell alone on a CPU, too."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(4, 4)

        def forward(self, x):
            hidden = state = torch.zeros(2, 4)
            for _ in range(2000):
                hidden, state = self.cell(x, (hidden, state))
            return state

    model = Counts()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.cell.bias_ih[:8] = 20  # the gates of input and state are open
        model.cell.bias_ih[8:12] = 0.001
        with at_level(level, f"dtype={half}"):
            found = model(torch.ones(2, 4))
    torch.testing.assert_close(found, torch.full((2, 4), 2.0), rtol=2**-8, atol=0)  # 0.001 is rounded to half
