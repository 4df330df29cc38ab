"""What the numbers do: large losses and sums, masks, small eps, ids as floats, running sums, linear algebra."""

from __future__ import annotations

import torch
from catalogue import Figures, batch, fit, net, pattern
from torch import Tensor, nn
from torch.nn import functional as F

FAMILY = "Numbers"


def trained(model: nn.Module, *, lr: float = 0.1) -> float:
    """Train a classifier and return its loss."""
    return fit(model, torch.optim.SGD(model.parameters(), lr=lr))


class Around(nn.Module):
    """A classifier with something in its middle."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 16), middle, nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class Function(nn.Module):
    """A module made from a function."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[operator]


@pattern(FAMILY)
def summed_loss() -> Figures:
    """Sums the loss over batch and elements, far above 65504."""
    model = nn.Linear(64, 64)
    x = torch.randn(256, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loss = torch.zeros(())
    for _ in range(10):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), 10 * x, reduction="sum")
        loss.backward()
        optimizer.step()
    return {"loss": loss.item()}


@pattern(FAMILY)
def sums_of_many() -> Figures:
    """Sums, norms and squares of large activations inside the model."""

    def middle(h: Tensor) -> Tensor:
        big = 200.0 * h
        return h * big.pow(2).sum().sqrt() / (1 + big.norm()) + 0 * big.square().cumsum(0)[-1:].log1p()

    return {"loss": trained(Around(Function(middle)))}


@pattern(FAMILY)
def attention_masks() -> Figures:
    """Masks attention with -1e9, -inf, `finfo.min` and `full_like`, in place and not."""

    def middle(h: Tensor) -> Tensor:
        h = h.view(8, 8, 16)
        scores = h @ h.transpose(1, 2) / 4
        hidden = torch.ones(8, 8, dtype=torch.bool).triu(1)
        total = h
        for fill in (
            lambda s: s.masked_fill(hidden, -1e9),
            lambda s: s.masked_fill(hidden, float("-inf")),
            lambda s: s.clone().masked_fill_(hidden, -1e30),
            lambda s: torch.where(hidden, torch.finfo(torch.float32).min, s),
            lambda s: torch.where(hidden, torch.full_like(s, -1e9), s),
            lambda s: s + hidden * -1e9,
        ):
            total = total + fill(scores).softmax(-1).to(h.dtype) @ h
        return total.reshape(64, 16)

    return {"loss": trained(Around(Function(middle)), lr=0.02)}


@pattern(FAMILY)
def small_eps() -> Figures:
    """Divides by norms with eps of 1e-8 and 1e-12, takes logarithms of small probabilities."""

    def middle(h: Tensor) -> Tensor:
        return (
            F.normalize(h, dim=-1, eps=1e-12)
            + h / (h.norm(dim=-1, keepdim=True) + 1e-8)
            + (h.sigmoid() + 1e-8).log()
        )

    return {"loss": trained(Around(Function(middle)))}


@pattern(FAMILY)
def numbers_as_inputs() -> Figures:
    """Feeds time steps and positions in the thousands as floats."""

    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", 1.0 / 100 ** (torch.arange(8) / 8))
            self.head = nn.Linear(16, 4)

        def forward(self, t: Tensor) -> Tensor:
            angles = t[:, None] * self.frequencies
            return self.head(torch.cat([angles.sin(), angles.cos()], -1))

    model, t = Timed(), torch.arange(1000.0, 3000.0, 31.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    y = (t.long() // 31) % 4
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(t), y).backward()
        optimizer.step()
    return {"loss": F.cross_entropy(model(t), y).item()}


@pattern(FAMILY)
def probabilities_and_bce() -> Figures:
    """Computes binary cross entropy of probabilities, inside the model and outside."""

    class Judge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net(outputs=1)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            p = self.body(x).sigmoid()[:, 0]
            return p, F.binary_cross_entropy(p, y)

    model, (x, y) = Judge(), batch(outputs=2)
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(())
    for _ in range(15):
        optimizer.zero_grad()
        p, inside = model(x, y.float())
        loss = inside + nn.BCELoss()(p, y.float())
        loss.backward()
        optimizer.step()
    return {"loss": loss.item()}


@pattern(FAMILY)
def writes_by_index() -> Figures:
    """Writes half results into FP32 buffers: by index, mask, scatter and index_add."""

    def middle(h: Tensor) -> Tensor:
        rows = torch.arange(0, 64, 2)
        out = torch.zeros(64, 16)
        out[rows] = h[rows]
        out[torch.arange(64) % 4 == 1] = h[torch.arange(64) % 4 == 1]
        out = out.index_add(0, rows, h[rows]).scatter_add(1, torch.zeros(64, 16, dtype=torch.long), h)
        out.index_add_(0, rows, h[rows])
        return out.lerp(h, 0.5) + torch.dot(h[0], torch.ones(16))

    return {"loss": trained(Around(Function(middle)), lr=0.01)}


@pattern(FAMILY)
def linear_algebra() -> Figures:
    """Uses decompositions, solves, determinants and distances inside the model."""

    def middle(h: Tensor) -> Tensor:
        gram = h.t() @ h / 64 + torch.eye(16)
        whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(gram), h.t(), upper=False).t()
        return whitened + torch.cdist(h, h[:16]) + 0.1 * torch.logdet(gram) + torch.linalg.inv(gram).trace()

    return {"loss": trained(Around(Function(middle)), lr=1e-4)}


@pattern(FAMILY)
def spectra() -> Figures:
    """Uses FFT and complex tensors inside the model."""

    def middle(h: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(h)
        return torch.fft.irfft(spectrum * torch.polar(torch.ones(9), torch.linspace(0, 1, 9)), n=16)

    return {"loss": trained(Around(Function(middle)))}


@pattern(FAMILY)
def running_sums() -> Figures:
    """Adds up losses and counts in tensors over many steps."""
    model, (x, y) = net(), batch()
    total, count = torch.zeros(()), 0
    with torch.no_grad():
        for _ in range(300):
            total += F.cross_entropy(model(x), y) * len(x)
            count += len(x)
    return {"mean": (total / count).item(), "total": total.item()}


@pattern(FAMILY)
def recurrent_state() -> Figures:
    """Carries an FP32 state through LSTM, GRU and their cells, step by step."""
    lstm, gru, cell = nn.LSTM(8, 16), nn.GRU(16, 16), nn.GRUCell(16, 16)
    head = nn.Linear(16, 4)
    parameters = [p for m in (lstm, gru, cell, head) for p in m.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.3)
    x, y = torch.randn(12, 6, 8), torch.randint(0, 4, (6,))
    loss = torch.zeros(())
    state, hidden = (torch.zeros(1, 6, 16), torch.zeros(1, 6, 16)), torch.zeros(6, 16)
    for _ in range(10):
        out, state = lstm(x, state)
        out, _ = gru(out, torch.zeros(1, 6, 16))
        for t in range(0, 12, 4):
            hidden = cell(out[t], hidden)
        loss = F.cross_entropy(head(hidden), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state, hidden = (state[0].detach(), state[1].detach()), hidden.detach()
    return {"loss": loss.item()}


@pattern(FAMILY)
def distributions() -> Figures:
    """Builds distributions from outputs and trains on their log-probabilities (policy gradients)."""
    policy, (x, y) = net(), batch()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    for _ in range(15):
        optimizer.zero_grad()
        choice = torch.distributions.Categorical(logits=policy(x))
        (-choice.log_prob(y) - 0.01 * choice.entropy()).mean().backward()
        optimizer.step()
    return {"loss": F.cross_entropy(policy(x), y).item()}


@pattern(FAMILY)
def convolutions() -> Figures:
    """Trains convolutions of every kind with BatchNorm, GroupNorm, pooling and interpolation."""

    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Sequential(
                nn.Conv2d(1, 8, 3, padding="same"), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
            )
            self.deep = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.GroupNorm(2, 8), nn.SiLU())
            self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
            self.line = nn.Conv1d(16, 8, 3, dilation=2)
            self.head = nn.Linear(8 * 4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(self.deep(self.down(x.view(-1, 1, 8, 8))))
            h = F.interpolate(h, size=(4, 8), mode="bilinear", align_corners=False)
            return self.head(self.line(h.flatten(1, 2)).flatten(1))

    model = Vision()
    x, y = torch.randn(32, 64), torch.randint(0, 4, (32,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(10):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    return {"loss": F.cross_entropy(model(x), y).item()}
