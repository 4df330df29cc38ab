"""Scripts that mention dtypes: asserts, numpy, default dtypes, casts to a weight's type, islands, AMP of their own."""

from __future__ import annotations

from typing import Any

import torch
from catalogue import Figures, batch, fit, net, pattern
from torch import Tensor, nn
from torch.nn import functional as F

FAMILY = "Dtypes that the script mentions"


@pattern(FAMILY, not_at_o3="no: weights are half to the script as well")
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


@pattern(FAMILY)
def islands_of_double() -> Figures:
    """Has a part in double precision inside an FP32 model, and a term of the loss in double."""

    class Island(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(8, 16), nn.Linear(16, 16).double(), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(self.first(x).double())
            h = torch.linalg.solve(3 * torch.eye(16, dtype=torch.double), h.T).T
            return self.last(h.to(torch.float32))

    model, (x, y) = Island(), batch()
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(())
    for _ in range(12):
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y) + 0.01 * out.double().square().mean()
        loss.backward()
        optimizer.step()
    kept = {loss.dtype, model.inner.weight.dtype, model.inner.weight.grad.dtype} == {torch.double}
    return {"loss": loss.item(), "kept": float(kept)}


class Rounded(torch.autograd.Function):
    """Fake quantisation with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        steps = torch.round(x / scale)
        ctx.save_for_backward(steps.abs() <= 127)
        return steps.clamp(-127, 127) * scale

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
        (inside,) = ctx.saved_tensors
        return grad_out * inside, None


@pattern(FAMILY, bfloat16=0.1)
def fake_quantisation() -> Figures:
    """Trains for eight-bit integers: observers in buffers, rounded weights and activations (QAT)."""

    class Quantised(nn.Linear):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__(inputs, outputs)
            self.register_buffer("largest", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
            x = torch.fake_quantize_per_tensor_affine(x, self.largest.item() / 127, 0, -127, 127)
            return F.linear(x, Rounded.apply(self.weight, self.weight.abs().max().detach() / 127), self.bias)

    model = nn.Sequential(Quantised(8, 32), nn.ReLU(), Quantised(32, 4))
    loss = fit(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return {"loss": loss, "largest": model[2].largest.item()}
