"""Who owns the weights: tied, averaged, clipped, copied, replaced, made half or double by the script."""

from __future__ import annotations

import copy
import io
import pickle

import torch
from catalogue import Figures, batch, fit, net, pattern
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

FAMILY = "Weights that the script touches"


class Tied(nn.Module):
    """A language model whose input and output embedding are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(20, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids))))


@pattern(FAMILY)
def tied_weights() -> Figures:
    """Ties input and output embeddings."""
    model, ids = Tied(), torch.randint(0, 20, (64,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(15):
        optimizer.zero_grad()
        F.cross_entropy(model(ids), (ids + 1) % 20).backward()
        optimizer.step()
    same = float(model.head.weight is model.embed.weight)
    return {
        "loss": F.cross_entropy(model(ids), (ids + 1) % 20).item(),
        "tied": same,
        "parameters": len(list(model.parameters())),
    }


@pattern(FAMILY)
def averages_in_a_copy() -> Figures:
    """Keeps an exponential moving average in a `deepcopy` and evaluates it."""
    model, (x, y) = net(), batch()
    average = copy.deepcopy(model).requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)
    moved = sum((a - b).norm().item() for a, b in zip(average.parameters(), model.parameters(), strict=True))
    return {"distance": moved, "loss": F.cross_entropy(average(x), y).item()}


@pattern(FAMILY)
def stochastic_weight_averaging() -> Figures:
    """Averages weights with `AveragedModel`, SWALR and `update_bn`."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averaged, schedule = AveragedModel(model), SWALR(optimizer, swa_lr=0.05)
    x, y = batch()
    for _ in range(15):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        averaged.update_parameters(model)
        schedule.step()
    update_bn([x], averaged)
    averaged.eval()
    return {"loss": F.cross_entropy(averaged(x), y).item()}


@pattern(FAMILY)
def clamps_weights() -> Figures:
    """Clamps weights through `.data` after each step (WGAN)."""
    model, (x, y) = net(), batch()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    for _ in range(15):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for p in model.parameters():
            p.data.clamp_(-0.2, 0.2)
    largest = max(p.abs().max().item() for p in model.parameters())
    return {"loss": F.cross_entropy(model(x), y).item(), "largest": largest}


@pattern(FAMILY)
def assigns_data() -> Figures:
    """Assigns `param.data = tensor`, also after the optimizer was made."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(model, optimizer, steps=5)
    for p in model.parameters():
        p.data = p.data * 0.5
    return {"loss": fit(model, optimizer, steps=10)}


@pattern(FAMILY)
def swaps_in_averages() -> Figures:
    """Stores weights, evaluates others in their place, restores them."""
    model, (x, y) = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeros = [torch.zeros_like(p) for p in model.parameters()]
    others = 0.0
    for _ in range(5):
        fit(model, optimizer, steps=3)
        kept = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p, zero in zip(model.parameters(), zeros, strict=True):
                p.copy_(zero)
            others += F.cross_entropy(model(x), y).item()
            for p, weight in zip(model.parameters(), kept, strict=True):
                p.copy_(weight)
    return {"zeros": others, "loss": F.cross_entropy(model(x), y).item()}


@pattern(FAMILY)
def loads_in_mid_run() -> Figures:
    """Loads a state dict into model and optimizer in mid run."""
    model, (x, y) = net(), batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    fit(model, optimizer, steps=5)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    fit(model, optimizer, steps=10)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    early = F.cross_entropy(model(x), y).item()
    return {"early": early, "loss": fit(model, optimizer, steps=5)}


@pattern(FAMILY)
def pickles_the_model() -> Figures:
    """Pickles the whole model with `torch.save` and `pickle` while it trains."""
    model, (x, y) = net(), batch()
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=5)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    saved, pickled = torch.load(buffer, weights_only=False), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        return {
            "saved": F.cross_entropy(saved(x), y).item(),
            "pickled": F.cross_entropy(pickled(x), y).item(),
        }


@pattern(FAMILY)
def weight_norm() -> Figures:
    """Uses weight norm by parametrization."""
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 32)), nn.Tanh(), nn.Linear(32, 4))
    return {"loss": fit(model, torch.optim.SGD(model.parameters(), lr=0.2))}


@pattern(FAMILY)
def weight_norm_of_old() -> Figures:
    """Uses the older weight norm, which sets `weight` in a forward pre-hook."""
    with __import__("warnings").catch_warnings():
        __import__("warnings").simplefilter("ignore", FutureWarning)
        first = nn.utils.weight_norm(nn.Linear(8, 32))
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(32, 4))
    return {"loss": fit(model, torch.optim.SGD(model.parameters(), lr=0.2))}


@pattern(FAMILY)
def spectral_norm() -> Figures:
    """Uses spectral norm in both of its spellings."""
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(8, 32)), nn.ReLU(), nn.utils.spectral_norm(nn.Linear(32, 4))
    )
    return {"loss": fit(model, torch.optim.SGD(model.parameters(), lr=0.5))}


@pattern(FAMILY)
def pruning_masks() -> Figures:
    """Prunes weights with masks and trains on."""
    model = net()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    loss = fit(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return {"loss": loss, "zeros": float((model[0].weight == 0).sum())}


@pattern(FAMILY)
def lazy_modules() -> Figures:
    """Uses lazy modules, whose parameters exist after the first call only."""
    model = nn.Sequential(nn.LazyLinear(32), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(4))
    model(batch()[0])
    return {"loss": fit(model, torch.optim.SGD(model.parameters(), lr=0.1))}


@pattern(FAMILY)
def lazy_modules_after_the_optimizer() -> Figures:
    """Gives an optimizer lazy parameters before the first call."""
    model = nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"loss": fit(model, optimizer)}


@pattern(FAMILY, not_at_o3="no: weights are half to the script as well")
def parameters_in_a_list() -> Figures:
    """Keeps parameters in a plain list, without any module."""
    weights = [nn.Parameter(torch.randn(32, 8) / 3), nn.Parameter(torch.randn(4, 32) / 6)]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    return {"loss": fit(lambda x: F.linear(F.relu(F.linear(x, weights[0])), weights[1]), optimizer)}


@pattern(FAMILY)
def replaces_a_parameter() -> Figures:
    """Replaces a layer and its optimizer in mid run (a new head, resized embeddings)."""
    model = net()
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=5)
    model[5] = nn.Linear(32, 4)
    return {"loss": fit(model, torch.optim.SGD(model.parameters(), lr=0.1))}


class Codebook(nn.Module):
    """A running mean that its forward writes, as vector quantisation and DINO's centre do."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("centre", torch.zeros(16))
        self.step = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encode(x)
        if self.training:
            with torch.no_grad():
                self.centre.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
                self.step += 1e-3
        return self.decode(torch.relu(hidden - self.centre))


@pattern(FAMILY, note="such buffers and parameters stay FP32")
def writes_state_in_forward() -> Figures:
    """Writes buffers and a parameter inside the forward pass."""
    model = Codebook()
    loss = fit(model, torch.optim.SGD(model.encode.parameters(), lr=0.1))
    return {"loss": loss, "centre": model.centre.norm().item(), "counter": model.step.item()}


@pattern(FAMILY)
def double_weights() -> Figures:
    """Trains a model in double precision."""
    model = net().double()
    return {"loss": fit(lambda x: model(x.double()), torch.optim.SGD(model.parameters(), lr=0.1))}


@pattern(FAMILY)
def complex_weights() -> Figures:
    """Has complex parameters and an FFT (Fourier layers)."""
    spectrum = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    class Fourier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spectrum, self.head = spectrum, nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.spectrum, n=8))

    model = Fourier()
    return {
        "loss": fit(model, torch.optim.SGD(model.parameters(), lr=0.1)),
        "size": spectrum.abs().sum().item(),
    }


@pattern(FAMILY, float16=0.02, note="left alone: it is the script's own half precision")
def model_made_half_by_the_script() -> Figures:
    """Makes the model BF16 itself."""
    model = net().bfloat16()
    return {"loss": fit(lambda x: model(x.bfloat16()).float(), torch.optim.SGD(model.parameters(), lr=0.1))}


class Symmetric(nn.Module):
    """Makes a matrix symmetric."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


class Rotation(nn.Module):
    """Makes a matrix orthogonal, by an exponential."""

    def forward(self, weight: Tensor) -> Tensor:
        return torch.matrix_exp(weight - weight.T)


@pattern(FAMILY, not_at_o3="no: weights are half to the script as well")
def own_parametrizations() -> Figures:
    """Registers parametrizations of its own, caches them for a step, and removes one."""
    model, (x, y) = net(), batch()
    model[2], model[4] = nn.Linear(32, 32), nn.Linear(32, 32)
    parametrize.register_parametrization(model[2], "weight", Symmetric())
    parametrize.register_parametrization(model[4], "weight", Rotation())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(10):
        with parametrize.cached():
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
    turned = model[4].weight @ model[4].weight.T
    skew = (model[2].weight - model[2].weight.T).norm().item()
    parametrize.remove_parametrizations(model[2], "weight")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return {"skew": skew, "norm": turned.norm().item(), "loss": fit(model, optimizer, steps=5)}
