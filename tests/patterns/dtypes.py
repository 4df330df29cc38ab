"""Scripts that mention dtypes: asserts, numpy, default dtypes, casts to a weight's type, islands, AMP of their own."""

from __future__ import annotations

import torch
from catalogue import Figures, batch, fit, net, pattern
from torch import Tensor, nn
from torch.nn import functional as F

FAMILY = "Dtypes that the script mentions"


@pattern(FAMILY)
def asserts_float32() -> Figures:
    """Asserts that outputs, losses, gradients and weights are FP32, and reads them as numpy."""
    model, (x, y) = net(), batch()
    optimizer, total = torch.optim.SGD(model.parameters(), lr=0.1), 0.0
    for _ in range(10):
        out = model(x)
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        if {t.dtype for p in model.parameters() for t in (out, loss, p, p.grad)} != {torch.float32}:
            return {"loss": float("nan")}
        total += float(out.detach().numpy().mean()) + float(loss.detach().numpy())
        optimizer.step()
    return {"loss": total}


@pattern(FAMILY)
def follows_the_weight() -> Figures:
    """Casts inputs with `x.to(self.weight.dtype)` and makes tensors with `new_zeros`, inside the forward."""

    class Follower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.head = nn.Parameter(torch.randn(16, 8) / 3), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = x.to(self.weight.dtype) @ self.weight.t()
            return self.head(torch.cat([h[:, :8], h.new_zeros(len(h), 8)], 1) + torch.zeros_like(h))

    model = Follower()
    return {"loss": fit(model, torch.optim.SGD(model.parameters(), lr=0.1))}


@pattern(FAMILY)
def default_dtype_double() -> Figures:
    """Sets the default dtype to double."""
    torch.set_default_dtype(torch.float64)
    try:
        model = net()
        return {"loss": fit(model, torch.optim.SGD(model.parameters(), lr=0.1))}
    finally:
        torch.set_default_dtype(torch.float32)


@pattern(FAMILY)
def islands_of_float32() -> Figures:
    """Protects a part of the model with `autocast(enabled=False)` and `.float()`."""

    class Island(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            with torch.autocast("cpu", enabled=False):
                h = torch.relu(self.inner(h.float())) + F.linear(h.float(), self.inner.weight)
            return self.last(h)

    model = Island()
    return {"loss": fit(model, torch.optim.SGD(model.parameters(), lr=0.1))}


@pattern(
    FAMILY,
    note="the script's GradScaler and regions are taken over; `--script-amp keep` leaves them in charge",
)
def amp_by_hand() -> Figures:
    """Has autocast and a GradScaler of its own, with `unscale_` and clipping."""
    model, (x, y) = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, norms = torch.amp.GradScaler("cpu", init_scale=1024.0), 0.0
    for _ in range(15):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms += nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        scaler.step(optimizer)
        scaler.update()
    return {"loss": F.cross_entropy(model(x), y).item(), "norms": norms}


@pattern(FAMILY)
def old_amp_spelling() -> Figures:
    """Uses `torch.cuda.amp` on a machine without CUDA, where it disables itself."""
    model, (x, y) = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with __import__("warnings").catch_warnings():
        __import__("warnings").simplefilter("ignore")
        scaler = torch.cuda.amp.GradScaler()
        for _ in range(15):
            optimizer.zero_grad()
            with torch.cuda.amp.autocast():
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return {"loss": F.cross_entropy(model(x), y).item()}


@pattern(FAMILY)
def half_batches() -> Figures:
    """Feeds inputs that are half already."""
    model = net()
    return {"loss": fit(lambda x: model(x.half().float()), torch.optim.SGD(model.parameters(), lr=0.1))}


@pattern(FAMILY)
def integer_inputs() -> Figures:
    """Feeds integers and booleans, one-hot and embedded."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(16, 8), nn.Linear(24, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.cat([self.table(ids), F.one_hot(ids, 16).float()], -1))

    model, ids = Words(), torch.randint(0, 16, (64,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(15):
        optimizer.zero_grad()
        F.cross_entropy(model(ids), ids % 4).backward()
        optimizer.step()
    return {"loss": F.cross_entropy(model(ids), ids % 4).item()}
