"""The table of ops and modules: the type each runs in, at every level and in both half types, forward and backward.

An op is called inside a module's forward pass, on `h`, the result of a linear layer (half at O1 to O3), with FP32
parameters of the module (half at O2 and O3, where they are working copies or converted).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Op = Callable[["Probe", Tensor], Any]

INDEX, TARGETS = torch.tensor([0, 2]), torch.tensor([0, 1, 2, 3])
LEVELS = ("O0", "O1", "O2", "O3")


class Probe(nn.Module):
    """Applies one op to a (4, 8) activation, and keeps what a script could see there."""

    def __init__(self, op: Op, inner: nn.Module | None) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.inner = inner
        self.matrix = nn.Parameter(torch.randn(8, 8))
        self.vector = nn.Parameter(torch.randn(8))
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        self.h = self.embed(x)
        self.h.retain_grad()
        y = self.op(self, self.h)
        y = y if isinstance(y, Tensor) else y[0]
        self.ran_in = y.dtype  # an attribute that holds y itself would be FP32 after the call
        return y


def of(
    module: Callable[[], nn.Module], *shape: int
) -> tuple[Callable[[Probe, Tensor], Any], Callable[[], nn.Module]]:
    """An op that is a module, called on the activation in another shape."""
    return (lambda m, h: m.inner(h.view(shape) if shape else h)), module


def assigned(into: Tensor, index: Any, values: Callable[[Tensor], Tensor]) -> Op:
    def op(m: Probe, h: Tensor) -> Tensor:
        buffer = into.clone()
        buffer[index(h) if callable(index) else index] = values(h)
        return buffer

    return op


def attention(m: Probe, h: Tensor) -> Any:
    q = h[None]
    return m.inner(q, q, q)


def heads(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (h.view(1, 2, 4, 4),) * 3


def transformer_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)


def embedded(m: Probe, h: Tensor) -> Tensor:
    return m.inner(INDEX) + 0 * h.mean()


ZEROS = torch.zeros(4, 8)
ROWS = torch.zeros(4, 8, dtype=torch.int64)
CONSTANT = torch.full((4, 8), 0.5)

# fmt: off
# Columns: O0, O1, O2, O3. "a/b": a in float16, b in bfloat16.
TABLE: dict[str, tuple[Any, str]] = {
    # the matmul family: half wherever there is a half
    "linear":                (lambda m, h: F.linear(h, m.matrix),                 "full half half half"),
    "matmul":                (lambda m, h: h @ m.matrix,                          "full half half half"),
    "mm":                    (lambda m, h: torch.mm(h, m.matrix),                 "full half half half"),
    "addmm":                 (lambda m, h: torch.addmm(m.vector, h, m.matrix),    "full half half half"),
    "bmm":                   (lambda m, h: torch.bmm(h[None], m.matrix[None]),    "full half half half"),
    "baddbmm":               (lambda m, h: torch.baddbmm(m.vector, h[None], m.matrix[None]), "full half half half"),
    "mv":                    (lambda m, h: torch.mv(h, m.vector),                 "full half half half"),
    "einsum":                (lambda m, h: torch.einsum("ij,jk->ik", h, m.matrix), "full half half half"),
    "conv1d":                (of(lambda: nn.Conv1d(4, 4, 3), 1, 4, 8),            "full half half half"),
    "conv1d, padding=same":  (of(lambda: nn.Conv1d(4, 4, 3, padding="same"), 1, 4, 8), "full half half half"),
    "conv2d":                (of(lambda: nn.Conv2d(1, 4, 3), 1, 1, 4, 8),         "full half half half"),
    "conv3d":                (of(lambda: nn.Conv3d(1, 2, 2), 1, 1, 2, 4, 4),      "full half half half"),
    "conv_transpose1d":      (of(lambda: nn.ConvTranspose1d(4, 4, 3), 1, 4, 8),   "full half half half"),
    "conv_transpose2d":      (of(lambda: nn.ConvTranspose2d(1, 4, 3), 1, 1, 4, 8), "full half half half"),
    "conv_transpose3d":      (of(lambda: nn.ConvTranspose3d(1, 2, 2), 1, 1, 2, 4, 4), "full half half half"),
    "sdpa":                  (lambda m, h: F.scaled_dot_product_attention(*heads(h)), "full half half half"),
    "PReLU":                 (of(nn.PReLU),                                       "full half half half"),
    # layers made of it
    "LSTM":                  (of(lambda: nn.LSTM(8, 8), 1, 4, 8),                 "full full/half full/half full/half"),
    "GRU":                   (of(lambda: nn.GRU(8, 8), 1, 4, 8),                  "full half half half"),
    "RNN":                   (of(lambda: nn.RNN(8, 8), 1, 4, 8),                  "full half half half"),
    "LSTMCell":              (of(lambda: nn.LSTMCell(8, 8)),                      "full half half half"),
    "GRUCell":               (of(lambda: nn.GRUCell(8, 8)),                       "full half half half"),
    "MultiheadAttention":    ((attention, lambda: nn.MultiheadAttention(8, 2)),   "full half half half"),
    "TransformerEncoderLayer": (of(transformer_layer, 1, 4, 8),                   "full full half half"),
    # softmax in its four spellings
    "F.softmax":             (lambda m, h: F.softmax(h, -1),                      "full full half half"),
    "torch.softmax":         (lambda m, h: torch.softmax(h, -1),                  "full full half half"),
    "Tensor.softmax":        (lambda m, h: h.softmax(-1),                         "full full half half"),
    "nn.Softmax":            (of(lambda: nn.Softmax(-1)),                         "full full half half"),
    "log_softmax":           (lambda m, h: F.log_softmax(h, -1),                  "full full half half"),
    # normalization
    "layer_norm":            (of(lambda: nn.LayerNorm(8)),                        "full full half half"),
    "group_norm":            (of(lambda: nn.GroupNorm(2, 8)),                     "full full half half"),
    "rms_norm":              (of(lambda: nn.RMSNorm(8)),                          "full full half half"),
    "batch_norm":            (of(lambda: nn.BatchNorm1d(8)),                      "full half half half"),
    "instance_norm":         (of(lambda: nn.InstanceNorm1d(4, affine=True), 1, 4, 8), "full half half half"),
    # losses: FP32 where a level may choose
    "cross_entropy":         (lambda m, h: F.cross_entropy(h, TARGETS),           "full full full half"),
    "nll_loss":              (lambda m, h: F.nll_loss(h, TARGETS),                "full full full half"),
    "mse_loss":              (lambda m, h: F.mse_loss(h, CONSTANT.to(h.dtype)),   "full full full half"),
    "mse_loss, FP32 target": (lambda m, h: F.mse_loss(h, CONSTANT),               "full full full full"),
    "l1_loss":               (lambda m, h: F.l1_loss(h, CONSTANT),                "full full full full"),
    "huber_loss":            (lambda m, h: F.huber_loss(h, CONSTANT),             "full full full full"),
    "binary_cross_entropy":  (lambda m, h: F.binary_cross_entropy(h.sigmoid(), CONSTANT), "full full full full"),
    "bce_with_logits":       (lambda m, h: F.binary_cross_entropy_with_logits(h, CONSTANT), "full full full full"),
    # a wide range
    "exp":                   (lambda m, h: h.exp(),                               "full full full half"),
    "log":                   (lambda m, h: (h.abs() + 1).log(),                   "full full full half"),
    "pow":                   (lambda m, h: h.pow(2),                              "full full full half"),
    "**":                    (lambda m, h: h**2,                                  "full full full half"),
    "2 **":                  (lambda m, h: 2**h,                                  "full full full half"),
    "square":                (lambda m, h: h.square(),                            "full full full half"),
    "rsqrt":                 (lambda m, h: (h.abs() + 1).rsqrt(),                 "full full full half"),
    "softplus":              (lambda m, h: F.softplus(h),                         "full full full half"),
    # reductions
    "sum":                   (lambda m, h: h.sum(),                               "full full full half"),
    "sum over a dimension":  (lambda m, h: h.sum(0),                              "full full full half"),
    "prod":                  (lambda m, h: (h / 2 + 1).prod(0),                   "full full full half"),
    "cumsum":                (lambda m, h: h.cumsum(0),                           "full full full half"),
    "norm":                  (lambda m, h: h.norm(),                              "full full full half"),
    "norm over a dimension": (lambda m, h: h.norm(dim=-1),                        "full full full half"),
    "linalg.vector_norm":    (lambda m, h: torch.linalg.vector_norm(h),           "full full full half"),
    "var":                   (lambda m, h: h.var(),                               "full full full half"),
    "logsumexp":             (lambda m, h: h.logsumexp(-1),                       "full full full half"),
    "normalize":             (lambda m, h: F.normalize(h, dim=-1),                "full full full half"),
    "mean":                  (lambda m, h: h.mean(),                              "full half half half"),
    "max":                   (lambda m, h: h.max(-1),                             "full half half half"),
    # mixed types are brought to the widest, or to the tensor that is written
    "cat, mixed":            (lambda m, h: torch.cat([h, CONSTANT]),              "full full full full"),
    "stack, mixed":          (lambda m, h: torch.stack([h, CONSTANT]),            "full full full full"),
    "cat":                   (lambda m, h: torch.cat([h, h]),                     "full half half half"),
    "dot":                   (lambda m, h: torch.dot(h[0], CONSTANT[0]),          "full full full full"),
    "index_put":             (lambda m, h: ZEROS.index_put((INDEX,), h[:2]),      "full full full full"),
    "buf[i] = y":            (assigned(ZEROS, INDEX, lambda h: h[:2]),            "full full full full"),
    "buf[mask] = y":         (assigned(ZEROS, lambda h: h > 0, lambda h: h[h > 0]), "full full full full"),
    "half[i] = FP32":        (lambda m, h: (h + 0).index_put((INDEX,), CONSTANT[:2]), "full full full full"),
    "scatter_add":           (lambda m, h: ZEROS.scatter_add(0, ROWS, h),         "full full full full"),
    "index_add_":            (lambda m, h: ZEROS.clone().index_add_(0, TARGETS, h), "full full full full"),
    "lerp":                  (lambda m, h: torch.lerp(h, CONSTANT, 0.5),          "full full full full"),
    "where":                 (lambda m, h: torch.where(h > 0, h, CONSTANT),       "full full full full"),
    "Bilinear":              ((lambda m, h: m.inner(h, h), lambda: nn.Bilinear(8, 8, 4)), "full full half half"),
    # numbers that half cannot hold
    "masked_fill(-1e9)":     (lambda m, h: h.masked_fill(h > 0, -1e9),            "full full/half full/half full/half"),
    "masked_fill_(-1e9)":    (lambda m, h: (h + 0).masked_fill_(h > 0, -1e9),     "full half half half"),
    "masked_fill(-100)":     (lambda m, h: h.masked_fill(h > 0, -100.0),          "full half half half"),
    # no half kernel on the CPU
    "fft":                   (lambda m, h: torch.fft.rfft(h).abs(),               "full full full full"),
    "cdist":                 (lambda m, h: torch.cdist(h, m.matrix),              "full full full full"),
    "avg_pool3d":            (of(lambda: nn.AvgPool3d(2), 1, 1, 2, 4, 4),         "full full full full"),
    # the rest follows its inputs
    "embedding":             ((embedded, lambda: nn.Embedding(4, 8)),             "full full half half"),
    "interpolate":           (lambda m, h: F.interpolate(h[None, None], scale_factor=2.0), "full full half half"),
    "reflection pad":        (lambda m, h: F.pad(h[None], (1, 1), mode="reflect"), "full full half half"),
    "max_pool2d":            (lambda m, h: F.max_pool2d(h[None, None], 2),        "full half half half"),
    "relu":                  (lambda m, h: h.relu(),                              "full half half half"),
    "gelu":                  (lambda m, h: F.gelu(h),                             "full half half half"),
    "dropout":               (lambda m, h: F.dropout(h, 0.5),                     "full half half half"),
    "half * half":           (lambda m, h: h * h,                                 "full half half half"),
    "half + parameter":      (lambda m, h: h + m.vector,                          "full full half half"),
}
# fmt: on


def column(level: str, dtype: str) -> dict[str, str]:
    """What the table says for a level and a half type."""
    cells = {name: cells.split()[LEVELS.index(level)] for name, (_, cells) in TABLE.items()}
    return {name: cell.split("/")[-1 if dtype == "bfloat16" else 0] for name, cell in cells.items()}


def probe(name: str) -> Probe:
    """Return a module around an op, with the same weights each time."""
    op, inner = TABLE[name][0] if isinstance(TABLE[name][0], tuple) else (TABLE[name][0], None)
    torch.manual_seed(0)
    return Probe(op, inner and inner())


def trained(name: str) -> tuple[Probe, Tensor]:
    """Return the module after a forward and backward pass, and its output."""
    model = probe(name)
    torch.manual_seed(1)
    out = model(torch.randn(4, 8))
    (out * torch.linspace(0.5, 1.0, out.numel()).view(out.shape)).sum().backward()
    return model, out


def distance(model: Probe, reference: Probe) -> float:
    """Return how far the gradients are apart, relative to their size."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    both = [(a.grad.double().flatten(), b.grad.double().flatten()) for a, b in pairs if b.grad is not None]
    ours, theirs = (torch.cat(grads) for grads in zip(*both, strict=True))
    return float((ours - theirs).norm() / theirs.norm())


CASES = [("O0", "float16"), *((level, dtype) for level in LEVELS[1:] for dtype in ("float16", "bfloat16"))]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(("level", "dtype"), CASES)
def test_each_op_runs_in_the_type_of_the_table_and_its_gradients_are_those_of_float32(level, dtype, at_level):
    references = {name: trained(name)[0] for name in TABLE}
    half = getattr(torch, dtype)
    # a few roundings of half a unit in the last place (5e-4 in float16, 4e-3 in bfloat16); softmax amplifies them
    close = {"O0": 0.0}.get(level, 5e-3 if dtype == "float16" else 5e-2)
    ran_in, faults = {}, []
    # scale 8: none of these gradients overflows, and the arithmetic of scaling is used all the same
    with at_level(level, f"dtype={dtype}", "loss_scale.init=8"):
        for name in TABLE:
            model, out = trained(name)
            ran_in[name] = {half: "half", torch.float32: "full"}[model.ran_in]
            weights = half if level == "O3" else torch.float32
            if out.dtype is not torch.float32:
                faults.append(f"{name}: output {out.dtype}")
            if any(p.dtype is not weights for p in model.parameters()):
                faults.append(f"{name}: parameters {[p.dtype for p in model.parameters()]}")
            if any(p.grad.dtype is not weights for p in model.parameters() if p.grad is not None):
                faults.append(f"{name}: gradients not {weights}")
            if model.h.grad.dtype is not model.h.dtype:
                faults.append(f"{name}: gradient of the input {model.h.grad.dtype}")
            if not (off := distance(model, references[name])) <= close:
                faults.append(f"{name}: gradients off by {off:.1e}")
    assert ran_in == column(level, dtype)
    assert not faults
