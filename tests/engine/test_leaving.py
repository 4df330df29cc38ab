"""What a script does with tensors outside the model: clipping that raises, arrays of NumPy."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

LEVELS = ("O1", "O2")
SCALE = "loss_scale.init=1024"


def clip(parameters):
    return torch.nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)


def clip_by_home(parameters):
    return torch.nn.utils.clip_grad.clip_grad_norm_(iter(parameters), 1.0, error_if_nonfinite=True)


def clip_imported_before(parameters):
    return clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)


def norm_alone(parameters):
    return torch.nn.utils.get_total_norm([p.grad for p in parameters], error_if_nonfinite=True)


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model):
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    return F.cross_entropy(model(x), x[:, :4].argmax(1))


def overflow(model):
    """Let the next pass overflow, as one whose scale is too large."""
    model[0].weight.register_hook(lambda grad: grad * torch.inf)
    loss_of(model).backward()


@pytest.mark.parametrize("take_norm", [clip, clip_by_home, clip_imported_before, norm_alone])
@pytest.mark.parametrize("level", LEVELS)
def test_clipping_does_not_raise_at_an_overflow_whose_step_is_skipped(at_level, level, take_norm):
    with at_level(level, SCALE) as recorded:
        model, optimizer = network()
        before = [p.detach().clone() for p in model.parameters()]
        overflow(model)
        assert not torch.isfinite(take_norm(list(model.parameters())))
        optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))
        assert recorded.summary["steps"]["skipped"] == 1
        assert recorded.substituted("clip-error")


@pytest.mark.parametrize("level", LEVELS)
def test_it_does_where_it_would_in_float32(at_level, level):
    with at_level(level, SCALE) as recorded:
        model, _ = network()
        (loss_of(model) * torch.nan).backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            clip(model.parameters())

        model, _ = network()
        overflow(model)
        model[2].weight.grad.fill_(torch.nan)  # the script's own
        with pytest.raises(RuntimeError, match="non-finite"):
            clip(model.parameters())

        model, _ = network()
        loss_of(model).backward()
        model[2].weight.grad.fill_(1e30)  # finite, but for the sum of squares
        with pytest.raises(RuntimeError, match="non-finite"):
            clip(model.parameters())
        assert not recorded.substituted("clip-error")


@pytest.mark.parametrize("settings", [("O0",), ("O1", "dtype=bfloat16"), ("O1", "skip_nonfinite=never")])
def test_and_where_no_step_is_skipped(at_level, settings):
    with at_level(*settings):
        model, _ = network()
        overflow(model)
        with pytest.raises(RuntimeError, match="non-finite"):
            clip(model.parameters())


class Remembers(nn.Module):
    """Keeps its activations in a list of the script's, as many do for plots."""

    def __init__(self, kept):
        super().__init__()
        self.first, self.keep = nn.Linear(8, 8), kept.append

    def forward(self, x):
        self.keep(self.first(x))
        return x


@pytest.mark.parametrize("level", [*LEVELS, "O3"])
def test_numpy_takes_what_is_bfloat16_by_our_doing(at_level, level):
    with at_level(level, "dtype=bfloat16") as recorded:
        kept = []
        Remembers(kept)(torch.ones(2, 8))
        hidden = kept[0].detach()
        assert hidden.dtype is torch.bfloat16
        for array in (hidden.numpy(), np.asarray(hidden), np.array([hidden[0], hidden[1]])):
            assert array.dtype == np.float32
            assert array.tolist() == hidden.tolist()
        assert recorded.substituted("numpy")
        with pytest.raises(RuntimeError, match="requires grad"):
            kept[0].numpy()


def test_numpy_is_told_nothing_else(at_level):
    with at_level("O0"), pytest.raises(TypeError, match="BFloat16"):
        torch.ones(2).bfloat16().numpy()
    with at_level("O1", "dtype=float16"):
        assert torch.ones(2).half().numpy().dtype == np.float16  # the script's own
        shared = torch.ones(2)
        shared.numpy()[0] = 5.0
        assert shared.tolist() == [5.0, 1.0]
