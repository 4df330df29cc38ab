"""Fields of work, each with the habits of its scripts: speech, graphs, experts, equations, flows, control, contrast."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from catalogue import Figures, batch, fit, net, pattern
from torch import Tensor, nn
from torch.nn import functional as F

FAMILY = "Fields of work"


@pattern(FAMILY)
def speech() -> Figures:
    """Trains a recurrent model of speech features with CTC, on log spectra taken outside the model."""

    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.gru, self.head = nn.Conv1d(13, 16, 3, padding=1), nn.GRU(16, 16), nn.Linear(16, 6)

        def forward(self, x: Tensor) -> Tensor:
            states, _ = self.gru(F.hardtanh(self.line(x), 0, 20).permute(2, 0, 1))
            return self.head(states).log_softmax(-1)

    spectrum = torch.stft(torch.randn(4, 400), 24, 16, window=torch.hann_window(24), return_complex=True)
    features = spectrum.abs().pow(2).clamp(min=1e-9).log()
    model, targets = Speech(), torch.randint(1, 6, (4, 5))
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.02), torch.zeros(())
    lengths, sizes = torch.tensor([26, 24, 25, 26]), torch.tensor([5, 3, 4, 5])
    for _ in range(10):
        optimizer.zero_grad()
        loss = F.ctc_loss(model(features), targets, lengths, sizes, zero_infinity=True)
        loss.backward()
        optimizer.step()
    return {"loss": loss.item()}


@pattern(FAMILY)
def graphs() -> Figures:
    """Passes messages on a graph: softmax over edges by `scatter_reduce`, `index_add_`, sparse products, degrees."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.neighbours = nn.Linear(8, 16), nn.Linear(8, 16)
            self.score, self.head = nn.Parameter(torch.randn(32) / 5), nn.Linear(16, 4)

        def forward(self, x: Tensor, edges: Tensor, adjacency: Tensor) -> Tensor:
            (source, target), h = edges, self.neighbours(x)
            scores = F.leaky_relu((torch.cat([h[source], h[target]], 1) * self.score).sum(1), 0.2)
            most = torch.full((len(x),), -1e16).scatter_reduce(0, target, scores, "amax")
            scores = (scores - most[target]).exp()
            total = torch.zeros(len(x)).scatter_add_(0, target, scores)
            out = torch.zeros(len(x), 16).index_add_(
                0, target, h[source] * (scores / (total[target] + 1e-16))[:, None]
            )
            degree = (
                torch.zeros(len(x)).scatter_add_(0, target, torch.ones(len(target))).clamp(min=1).pow(-0.5)
            )
            return self.head(torch.relu(out + torch.sparse.mm(adjacency, self.own(x)) * degree[:, None]))

    (x, y), edges, model = batch(), torch.randint(0, 64, (2, 300)), Attention()
    adjacency = torch.sparse_coo_tensor(edges, torch.ones(300), (64, 64), check_invariants=True).coalesce()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(12):
        optimizer.zero_grad()
        F.cross_entropy(model(x, edges, adjacency), y).backward()
        optimizer.step()
    return {"loss": F.cross_entropy(model(x, edges, adjacency), y).item()}


@pattern(FAMILY)
def experts() -> Figures:
    """Routes tokens to experts by top-k of a softmax, with `index_add_`, `torch.where` and auxiliary losses."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = (
                nn.Linear(8, 4, bias=False),
                nn.ModuleList(net(outputs=16) for _ in range(4)),
            )
            self.head = nn.Linear(16, 4)
            self.register_buffer("load", torch.zeros(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.gate(x)
            chances = logits.softmax(-1, dtype=torch.float)
            weights, chosen = chances.topk(2, -1)
            out = torch.zeros(len(x), 16, dtype=x.dtype)
            for index, expert in enumerate(self.experts):
                tokens, place = torch.where(chosen == index)
                out.index_add_(0, tokens, (expert(x[tokens]) * weights[tokens, place, None]).to(x.dtype))
            share = F.one_hot(chosen[:, 0], 4).float().mean(0)
            self.load.mul_(0.99).add_(share, alpha=0.01)
            balance = 4 * (chances.mean(0) * share).sum() + 1e-3 * torch.logsumexp(logits, -1).pow(2).mean()
            return self.head(out), balance

    model, (x, y) = Experts(), batch()
    optimizer, loss, balance = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(()), torch.zeros(())
    for _ in range(12):
        optimizer.zero_grad()
        out, balance = model(x)
        loss = F.cross_entropy(out, y) + 0.01 * balance
        loss.backward()
        optimizer.step()
    return {"loss": loss.item(), "balance": balance.item(), "load": model.load.sum().item()}


@pattern(FAMILY)
def differential_equations() -> Figures:
    """Integrates a model by Runge-Kutta, and penalises derivatives of a model by its inputs (PINN)."""
    field, (x, _) = net(inputs=2, outputs=2), batch(inputs=2, outputs=2)
    optimizer, times = torch.optim.SGD(field.parameters(), lr=0.02), torch.linspace(0, 1, 6)
    residual, error = torch.zeros(()), torch.zeros(())
    for _ in range(8):
        state = x
        for begin, end in pairwise(times):
            step = end - begin
            middle = field(state + step / 2 * field(state))
            state = state + step * middle
        points = x.clone().requires_grad_()
        value = field(points)[:, :1]
        (slope,) = torch.autograd.grad(value, points, torch.ones_like(value), create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)
        residual = (slope[:, 1] - 0.1 * bend[:, 0]).square().mean()
        error = (state - x.flip(1)).abs().mean()
        optimizer.zero_grad()
        (error + residual).backward()
        optimizer.step()
    return {"residual": residual.item(), "error": error.item()}


@pattern(FAMILY, bfloat16=0.1)
def flows() -> Figures:
    """Trains an invertible model by its likelihood: exponentials, log-determinants, state set at the first call."""

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.scale = (
                nn.Parameter(torch.linalg.qr(torch.randn(8, 8))[0]),
                nn.Parameter(torch.zeros(8)),
            )
            self.shift, self.inner = nn.Parameter(torch.zeros(8)), net(inputs=4, outputs=8)
            self.register_buffer("begun", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            if self.begun.item() == 0:
                with torch.no_grad():
                    self.shift.copy_(-x.mean(0))
                    self.scale.copy_(-x.std(0).log())
                    self.begun.fill_(1)
            x = ((x + self.shift) * self.scale.exp()) @ self.mix
            kept, changed = x.chunk(2, 1)
            log_scale, move = self.inner(kept).chunk(2, 1)
            log_scale = torch.tanh(log_scale)
            z = torch.cat([kept, changed * log_scale.exp() + move], 1)
            determinant = log_scale.sum(1) + self.scale.sum() + torch.slogdet(self.mix)[1]
            normal = torch.distributions.MultivariateNormal(torch.zeros(8), torch.eye(8))
            return normal.log_prob(z) + determinant

    model, x = Flow(), 3 * torch.randn(64, 8) + 1
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.01), torch.zeros(())
    for _ in range(12):
        optimizer.zero_grad()
        loss = -model(x).mean()
        loss.backward()
        optimizer.step()
    return {"loss": loss.item()}


@pattern(FAMILY)
def actor_and_critics() -> Figures:
    """Soft actor-critic: three optimizers, a bare `log_alpha`, target networks that follow through `.data`."""
    actor, critics = net(outputs=4), nn.ModuleList([net(inputs=10, outputs=1) for _ in range(2)])
    targets, log_alpha = copy.deepcopy(critics), torch.zeros(1, requires_grad=True)
    optimizers = [
        torch.optim.Adam(actor.parameters(), lr=1e-3),
        torch.optim.Adam(critics.parameters(), lr=1e-3),
        torch.optim.Adam([log_alpha], lr=1e-2),
    ]

    def act(states: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = actor(states).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.tanh().exp())
        raw = normal.rsample()
        correction = torch.log(1 - raw.tanh().pow(2) + 1e-6)
        return raw.tanh(), (normal.log_prob(raw) - correction).sum(1, keepdim=True)

    states, reached, losses = torch.randn(64, 8), torch.randn(64, 8), [torch.zeros(())] * 3
    for _ in range(12):
        alpha = log_alpha.exp().item()
        with torch.no_grad():
            actions, log_p = act(reached)
            pair = torch.cat([reached, actions], 1)
            wanted = states.sum(1, keepdim=True) + 0.9 * (
                torch.min(targets[0](pair), targets[1](pair)) - alpha * log_p
            )
        actions, log_p = act(states)
        taken = torch.cat([states, actions.detach()], 1)
        losses[1] = sum((F.mse_loss(critic(taken), wanted) for critic in critics), torch.zeros(()))
        pair = torch.cat([states, actions], 1)
        losses[0] = (alpha * log_p - torch.min(critics[0](pair), critics[1](pair))).mean()
        losses[2] = (-log_alpha.exp() * (log_p.detach() - 2)).mean()
        for loss, optimizer in zip(losses, optimizers, strict=True):
            for each in optimizers:
                each.zero_grad()
            loss.backward()
            optimizer.step()
        for slow, fast in zip(targets.parameters(), critics.parameters(), strict=True):
            slow.data.copy_(0.05 * fast.data + 0.95 * slow.data)
    return {
        "critic": losses[1].item(),
        "alpha": log_alpha.item(),
        "target": targets[0][0].weight.norm().item(),
    }


class Contrast(nn.Module):
    """A query encoder, a key encoder that follows it inside the forward pass, and a queue of keys (MoCo)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = net(outputs=16), net(outputs=16)
        for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
            slow.data.copy_(fast.data)
            slow.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(16, 128), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        query = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.data = slow.data * 0.99 + fast.data * 0.01
            key = F.normalize(self.key(other), dim=1)
        same = torch.einsum("nc,nc->n", query, key)[:, None]
        logits = torch.cat([same, query @ self.queue.clone().detach()], 1) / 0.2
        start = int(self.place)
        self.queue[:, start : start + len(key)] = key.T
        self.place[0] = (start + len(key)) % 128
        return logits


@pattern(
    FAMILY,
    note="a parameter that the forward writes stays FP32 after the first call",
    not_at_o3="no: a slow average of half weights stands still",
)
def momentum_encoder() -> Figures:
    """Contrasts with a queue of keys, whose encoder follows the other by `.data` inside the forward pass (MoCo)."""
    model, (x, _) = Contrast(), batch()
    first, loss = model.key[0].weight.detach().clone(), torch.zeros(())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        loss = F.cross_entropy(model(x, x.roll(step, 1)), torch.zeros(64, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    moved = (model.key[0].weight - first).norm().item()
    return {"loss": loss.item(), "moved": 100 * moved, "queue": model.queue.norm().item()}


class LowRank(nn.Module):
    """A frozen layer with a trained low-rank part beside it (LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Parameter(torch.randn(4, base.in_features) / 3)
        self.up = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x.to(self.down.dtype) @ self.down.T @ self.up.T

    def merged(self) -> nn.Linear:
        """Return the layer with the trained part in its weight."""
        self.base.weight.data += (self.up @ self.down).data
        return self.base


@pattern(FAMILY)
def low_rank_adapters() -> Figures:
    """Puts low-rank adapters into a frozen model, trains them, and merges them into the weights (LoRA)."""
    model, (x, y) = net().requires_grad_(requires_grad=False), batch()
    model[0], model[3] = LowRank(model[0]), LowRank(model[3])
    trained = [p for p in model.parameters() if p.requires_grad]
    loss = fit(model, torch.optim.AdamW(trained, lr=1e-2))
    before = F.cross_entropy(model(x), y).item()
    model[0], model[3] = model[0].merged(), model[3].merged()
    return {"loss": loss, "apart": before, "merged": F.cross_entropy(model(x), y).item()}
