"""`script_amp: keep`: the script's own mixed precision computes what it would without us, and is observed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

KEEP = "script_amp=keep"


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 8, generator=generator), torch.randint(4, (6,), generator=generator)


class Script:
    """Trains with `torch.autocast` and `GradScaler`; for its softmax and sum the lists of torch and ours differ."""

    def __init__(self, *, fused=False):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Softmax(dim=1), nn.Linear(16, 4))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3)
        self.losses, self.skipped, self.grads = [], [], []

    def train(self, steps, accumulation=1):
        for step in steps:
            self.optimizer.zero_grad()
            for micro in range(accumulation):
                x, y = batch(10 * step + micro)
                with torch.autocast("cpu", dtype=torch.float16):
                    out = self.model(x)
                    loss = F.cross_entropy(out, y) + out.square().sum() / 64
                (self.scaler.scale(loss) / accumulation).backward()
                self.losses.append(loss.item() / accumulation)
            self.grads.append(self.model[0].weight.grad.clone())
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.skipped.append(self.scaler.get_scale() < before)
        return self

    def tensors(self):
        return [*self.model.state_dict().values(), *self.grads]


def same(first, second):
    return all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_it_is_the_script_to_the_last_bit_and_its_steps_are_counted(at_level, level, fused):
    plain = Script(fused=fused).train(range(8))
    with at_level(level, KEEP) as recorded:
        kept = Script(fused=fused).train(range(8))
        summary = recorded.summary
    assert kept.losses == plain.losses
    assert same(kept.tensors(), plain.tensors())
    assert 0 < sum(plain.skipped) < 8
    assert summary["steps"] == {
        "attempted": 8,
        "applied": 8 - sum(plain.skipped),
        "skipped": sum(plain.skipped),
    }
    assert (summary["forwards"], summary["backwards"]) == (8, 8)
    assert recorded.substituted("script-amp-kept")
    assert summary["saw_script_amp"]
    assert summary["scalers"] == []


def test_the_losses_recorded_are_true(at_level):
    with at_level("O1", KEEP) as recorded:
        kept = Script().train(range(3), accumulation=2)
        (curve,) = recorded.summary["losses"]
    assert curve["value"] == pytest.approx(kept.losses, rel=1e-6)


def test_a_loss_of_the_script_that_is_nan_is_counted(at_level):
    with at_level("O1", KEEP) as recorded:
        script = Script()
        with torch.no_grad():
            script.model[3].bias[0] = torch.nan
        script.train(range(2))
        assert recorded.summary["overflow_counts"]["loss_nan"] == 2
        assert recorded.summary["nonfinite_losses"] == 2


def test_bfloat16_regions_without_a_scaler_are_kept_as_well(at_level):
    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Softmax(dim=1), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(4):
            x, y = batch(step)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    plain = train()
    with at_level("O1", KEEP) as recorded:
        assert train() == plain
        assert recorded.summary["steps"]["applied"] == 4


def test_a_script_without_amp_gets_the_level(at_level):
    with at_level("O1", KEEP) as recorded:
        nn.Linear(8, 4)(batch(0)[0]).sum().backward()
        assert len(recorded.summary["scalers"]) == 1
        assert not recorded.summary["saw_script_amp"]
