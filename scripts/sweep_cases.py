"""The ops that `sweep_kernels.py` measures, with shapes of a medium model: about a millisecond forward in FP32.

An op is added here when a model spends time in it. Its name is the dispatcher's, as in `configs/ops/`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Index(NamedTuple):
    """A tensor of indices below `high` where a tuple would be a floating tensor's shape."""

    high: int
    shape: tuple[int, ...]


class Case(NamedTuple):
    """One op on one set of shapes; `call` takes the inputs, then the weights. `also`: further overloads of the line."""

    op: str
    call: Callable[..., Tensor]
    inputs: Sequence[Any]
    weights: Sequence[Any] = ()  # of a product of two inputs, the second counts as the weight
    variant: str = ""
    also: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.op} {self.variant}".strip()

    @property
    def passes(self) -> list[str]:
        differentiates = [not isinstance(one, Index) for one in self.inputs]
        both = any(differentiates) and self.weights
        return ["forward", "input_gradient", "weight_gradient"] if both else ["forward", "backward"]


M = (512, 1024)  # rows of features
I = (16, 32, 32, 32)  # noqa: E741 - images: (N, C, H, W)
S = (16, 64, 256)  # sequences: (N, C, T)
V = (2, 16, 8, 32, 32)  # volumes: (N, C, D, H, W)
Q = (8, 4, 128, 32)  # queries: (N, heads, T, C)
POINTWISE = ["add", "mul", "div", "maximum", "atan2"]
UNARY = ["relu", "tanh", "sigmoid", "exp", "log", "sqrt", "rsqrt", "abs", "sin", "erf"]
ACTIVATIONS = [
    "gelu",
    "silu",
    "elu",
    "softplus",
    "mish",
    "hardswish",
    "leaky_relu",
    "hardtanh",
    "logsigmoid",
    "glu",
]
OP = {"add": "add.Tensor", "mul": "mul.Tensor", "div": "div.Tensor", "logsigmoid": "log_sigmoid"}


def recurrent(cell: Callable[..., tuple[Tensor, ...]], gates: int, states: int) -> dict[str, Any]:
    """Return call and shapes of one layer of width 128 on 16 sequences of 32 steps, batch first."""

    def call(x: Tensor, *rest: Tensor) -> Tensor:
        start = rest[0] if states == 1 else rest[:states]
        return cell(x, start, rest[states:], True, 1, 0.0, True, False, True)[0]

    wide = 128 * gates
    weights = [(wide, 128), (wide, 128), (wide,), (wide,)]
    return {"call": call, "inputs": [(16, 32, 128), *[(1, 16, 128)] * states], "weights": weights}


CASES = [
    Case("linear", F.linear, [M], [(256, 1024), (256,)]),
    Case("linear", F.linear, [(32, 64)], [(64, 64), (64,)], "small"),
    Case("matmul", torch.matmul, [(8, 64, 512)], [(512, 256)]),
    Case("mm", torch.mm, [M], [(1024, 256)]),
    Case("bmm", torch.bmm, [(32, 128, 64)], [(32, 64, 128)]),
    Case("addmm", lambda x, w, b: torch.addmm(b, x, w), [M], [(1024, 256), (256,)]),
    Case("baddbmm", lambda x, w, b: torch.baddbmm(b, x, w), [(32, 128, 64)], [(32, 64, 128), (32, 1, 128)]),
    Case("addbmm", lambda x, w, b: torch.addbmm(b, x, w), [(32, 128, 64)], [(32, 64, 128), (128, 128)]),
    Case("mv", torch.mv, [M], [(1024,)]),
    Case("addmv", lambda x, w, b: torch.addmv(b, x, w), [M], [(1024,), (512,)]),
    Case("dot", torch.dot, [(65536,)], [(65536,)]),
    Case("einsum", partial(torch.einsum, "bhid,bhjd->bhij"), [Q, Q]),
    Case("tensordot", partial(torch.tensordot, dims=1), [M], [(1024, 256)]),
    Case("bilinear", F.bilinear, [(64, 32), (64, 32)], [(32, 32, 32), (32,)]),
    Case("cdist", torch.cdist, [(128, 64), (128, 64)]),
    Case("conv1d", partial(F.conv1d, padding=1), [S], [(64, 64, 3), (64,)], also=("conv1d.padding",)),
    Case("conv2d", partial(F.conv2d, padding=1), [I], [(64, 32, 3, 3), (64,)], also=("conv2d.padding",)),
    Case("conv2d", F.conv2d, [I], [(64, 32, 1, 1), (64,)], "1x1"),
    Case("conv2d", partial(F.conv2d, stride=2, padding=1), [I], [(64, 32, 3, 3), (64,)], "stride 2"),
    Case("conv2d", partial(F.conv2d, padding=1, groups=32), [I], [(32, 1, 3, 3), (32,)], "depthwise"),
    Case("conv3d", partial(F.conv3d, padding=1), [V], [(16, 16, 3, 3, 3), (16,)], also=("conv3d.padding",)),
    Case("conv_transpose1d", F.conv_transpose1d, [S], [(64, 32, 3), (32,)]),
    Case("conv_transpose2d.input", F.conv_transpose2d, [(16, 32, 16, 16)], [(32, 32, 3, 3), (32,)]),
    Case("conv_transpose3d.input", F.conv_transpose3d, [(2, 16, 4, 16, 16)], [(16, 16, 3, 3, 3), (16,)]),
    Case("conv_tbc", F.conv_tbc, [(128, 16, 64)], [(3, 64, 64), (64,)]),
    Case("scaled_dot_product_attention", F.scaled_dot_product_attention, [Q, Q, Q]),
    Case("scaled_dot_product_attention", F.scaled_dot_product_attention, [(2, 8, 1024, 64)] * 3, [], "long"),
    Case(
        "scaled_dot_product_attention",
        partial(F.scaled_dot_product_attention, is_causal=True),
        [Q] * 3,
        [],
        "causal",
    ),
    Case(
        "scaled_dot_product_attention",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m > 0),
        [Q, Q, Q, Index(2, (128, 128))],
        [],
        "mask",
    ),
    Case(
        "scaled_dot_product_attention",
        partial(F.scaled_dot_product_attention, dropout_p=0.1),
        [Q] * 3,
        [],
        "dropout",
    ),
    Case("lstm.input", **recurrent(torch.lstm, 4, 2)),
    Case("gru.input", **recurrent(torch.gru, 3, 1)),
    Case("rnn_tanh.input", **recurrent(torch.rnn_tanh, 1, 1)),
    Case("embedding", F.embedding, [Index(8192, (16, 128))], [(8192, 128)]),
    Case(
        "embedding_bag.padding_idx",
        lambda i, w: F.embedding_bag(i, w, mode="sum"),
        [Index(8192, (256, 16))],
        [(8192, 128)],
        also=("embedding_bag",),
    ),
    Case("layer_norm", lambda x, w, b: F.layer_norm(x, (1024,), w, b), [M], [(1024,), (1024,)]),
    Case("rms_norm", lambda x, w: F.rms_norm(x, (1024,), w), [M], [(1024,)]),
    Case("group_norm", lambda x, w, b: F.group_norm(x, 8, w, b), [I], [(32,), (32,)]),
    Case("batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), [I], [(32,), (32,)]),
    Case("instance_norm", lambda x, w, b: F.instance_norm(x, None, None, w, b), [I], [(32,), (32,)]),
    Case("softmax.int", partial(torch.softmax, dim=-1), [M]),
    Case("log_softmax.int", partial(torch.log_softmax, dim=-1), [M]),
    Case("logsumexp", partial(torch.logsumexp, dim=-1), [M]),
    Case("cross_entropy_loss", F.cross_entropy, [M, Index(1024, (512,))]),
    Case("mse_loss", F.mse_loss, [M, M]),
    Case("binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits, [M, M]),
    *(Case(OP.get(name, name), getattr(torch, name), [M, M]) for name in POINTWISE),
    *(Case(name, getattr(torch, name), [M]) for name in UNARY),
    *(Case(OP.get(name, name), getattr(F, name), [M]) for name in ACTIVATIONS),
    Case("prelu", F.prelu, [I], [(32,)]),
    Case("pow.Tensor_Scalar", lambda x: x**3, [M]),
    Case("clamp", lambda x: x.clamp(0.2, 0.8), [M]),
    Case("masked_fill.Scalar", lambda x, m: x.masked_fill(m > 0, 0.0), [M, Index(2, M)]),
    Case("where.self", lambda x, y, m: torch.where(m > 0, x, y), [M, M, Index(2, M)]),
    Case("dropout", partial(F.dropout, p=0.1), [M]),
    Case("max_pool1d", partial(F.max_pool1d, kernel_size=2), [S]),
    Case("max_pool2d", partial(F.max_pool2d, kernel_size=2), [I]),
    Case("max_pool3d", partial(F.max_pool3d, kernel_size=2), [V]),
    Case("avg_pool2d", partial(F.avg_pool2d, kernel_size=2), [I]),
    Case("avg_pool3d", partial(F.avg_pool3d, kernel_size=2), [V]),
    Case("adaptive_avg_pool2d", partial(F.adaptive_avg_pool2d, output_size=4), [I]),
    Case("adaptive_max_pool2d", partial(F.adaptive_max_pool2d, output_size=4), [I]),
    Case("upsample_nearest2d", partial(F.interpolate, scale_factor=2), [I]),
    Case("upsample_linear1d", partial(F.interpolate, scale_factor=2, mode="linear"), [S]),
    Case("upsample_bilinear2d", partial(F.interpolate, scale_factor=2, mode="bilinear"), [I]),
    Case("upsample_bicubic2d", partial(F.interpolate, scale_factor=2, mode="bicubic"), [I]),
    Case("upsample_trilinear3d", partial(F.interpolate, scale_factor=2, mode="trilinear"), [V]),
    Case("grid_sampler", partial(F.grid_sample, align_corners=False), [I, (16, 32, 32, 2)]),
    Case("constant_pad_nd", partial(F.pad, pad=(1, 1, 1, 1)), [I]),
    Case("reflection_pad2d", partial(F.pad, pad=(1, 1, 1, 1), mode="reflect"), [I]),
    Case("replication_pad2d", partial(F.pad, pad=(1, 1, 1, 1), mode="replicate"), [I]),
    Case("im2col", partial(F.unfold, kernel_size=3), [I]),
    Case("cat", lambda x, y: torch.cat((x, y), 1), [M, M]),
    Case("stack", lambda x, y: torch.stack((x, y), 1), [M, M]),
    Case("clone", lambda x: x.t().contiguous(), [M], (), "transposed"),
    Case("roll", partial(torch.roll, shifts=3, dims=1), [M]),
    Case("index_select", lambda x, i: x.index_select(0, i), [M, Index(512, (512,))]),
    Case("index.Tensor", lambda x, i: x[i], [M, Index(512, (512,))]),
    Case("gather", lambda x, i: x.gather(1, i), [M, Index(1024, M)]),
    Case("scatter_add", lambda x, y, i: x.scatter_add(1, i, y), [M, M, Index(1024, M)]),
    Case("index_add", lambda x, y, i: x.index_add(0, i, y), [M, M, Index(512, (512,))]),
    Case("index_put", lambda x, y, i: x.index_put((i,), y), [M, M, Index(512, (512,))]),
    Case("cumsum", partial(torch.cumsum, dim=-1), [M]),
    Case("sum.dim_IntList", partial(torch.sum, dim=-1), [M]),
    Case("sum", torch.sum, [M]),
    Case("mean.dim", partial(torch.mean, dim=-1), [M]),
    Case("var.correction", partial(torch.var, dim=-1), [M]),
    Case("linalg_vector_norm", partial(torch.linalg.vector_norm, dim=-1), [M]),
    Case("max.dim", lambda x: x.max(-1)[0], [M]),
    Case("sort", lambda x: x.sort(-1)[0], [M]),
    Case("topk", lambda x: x.topk(16, -1)[0], [M]),
]
