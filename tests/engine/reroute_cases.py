"""The calls whose half kernels are slow somewhere, for the tests of their reroutes: the numbers are half numbers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HALF = torch.float16


@dataclass(frozen=True)
class Convolution:
    """One convolution: its function, the shapes of input and weight, and what else it is given."""

    function: Any
    x: tuple[int, ...]
    weight: tuple[int, ...]
    given: dict[str, Any] = field(default_factory=dict)
    bias: bool = True

    def inputs(self, dtype: torch.dtype) -> list[Tensor | None]:
        """Return input, weight and bias; the same numbers in each type, all of which are half numbers."""
        generator = torch.Generator().manual_seed(3)
        transposed = "transpose" in self.function.__name__
        width = self.weight[1] * self.given.get("groups", 1) if transposed else self.weight[0]
        shapes = [self.x, self.weight, (width,) if self.bias else None]
        return [None if s is None else torch.randn(s, generator=generator).to(HALF).to(dtype) for s in shapes]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.function(x, weight, bias, **self.given)


CONVOLUTIONS = {
    "conv1d": Convolution(F.conv1d, (2, 3, 9), (4, 3, 3)),
    "conv1d, same, even kernel": Convolution(F.conv1d, (2, 3, 9), (4, 3, 4), {"padding": "same"}),
    "conv1d, unbatched": Convolution(F.conv1d, (3, 9), (4, 3, 3), {"padding": 1}),
    "conv2d": Convolution(F.conv2d, (2, 3, 7, 6), (4, 3, 3, 2)),
    "conv2d, no bias": Convolution(F.conv2d, (2, 3, 7, 6), (4, 3, 3, 3), bias=False),
    "conv2d, stride": Convolution(F.conv2d, (2, 3, 7, 7), (4, 3, 3, 3), {"stride": (2, 1), "padding": 1}),
    "conv2d, dilation": Convolution(F.conv2d, (2, 3, 9, 9), (4, 3, 3, 3), {"dilation": 2, "padding": (2, 1)}),
    "conv2d, groups": Convolution(F.conv2d, (2, 4, 7, 7), (6, 2, 3, 3), {"groups": 2}),
    "conv2d, depthwise": Convolution(F.conv2d, (2, 4, 7, 7), (4, 1, 3, 3), {"groups": 4, "padding": "same"}),
    "conv2d, same": Convolution(F.conv2d, (2, 3, 7, 7), (4, 3, 3, 3), {"padding": "same"}),
    "conv2d, same, even kernel, dilation": Convolution(
        F.conv2d, (2, 3, 9, 8), (4, 3, 2, 4), {"padding": "same", "dilation": (3, 1)}
    ),
    "conv2d, valid": Convolution(F.conv2d, (2, 3, 7, 7), (4, 3, 2, 2), {"padding": "valid"}),
    "conv2d, unbatched": Convolution(F.conv2d, (3, 7, 7), (4, 3, 3, 3), {"padding": 1}),
    "conv3d": Convolution(F.conv3d, (2, 2, 4, 5, 6), (3, 2, 2, 3, 3), {"padding": 1}),
    "conv3d, same": Convolution(F.conv3d, (1, 2, 4, 5, 6), (3, 2, 2, 3, 2), {"padding": "same"}),
    "conv_transpose1d": Convolution(F.conv_transpose1d, (2, 3, 7), (3, 4, 3), {"stride": 2, "padding": 1}),
    "conv_transpose2d": Convolution(F.conv_transpose2d, (2, 3, 5, 5), (3, 4, 3, 3)),
    "conv_transpose2d, output_padding": Convolution(
        F.conv_transpose2d, (2, 3, 5, 5), (3, 4, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}
    ),
    "conv_transpose2d, groups, dilation": Convolution(
        F.conv_transpose2d, (2, 4, 5, 5), (4, 3, 3, 3), {"groups": 2, "dilation": 2}
    ),
    "conv_transpose2d, unbatched": Convolution(F.conv_transpose2d, (3, 5, 5), (3, 4, 3, 3)),
    "conv_transpose3d": Convolution(F.conv_transpose3d, (1, 2, 3, 3, 3), (2, 3, 2, 2, 2)),
}


@dataclass(frozen=True)
class Attention:
    """One call of scaled_dot_product_attention."""

    given: dict[str, Any] = field(default_factory=dict)
    q: tuple[int, ...] = (2, 4, 6, 8)
    k: tuple[int, ...] = (2, 4, 6, 8)
    v: tuple[int, ...] = (2, 4, 6, 8)
    mask: str | None = None

    def inputs(self, dtype: torch.dtype) -> list[Tensor | None]:
        generator = torch.Generator().manual_seed(3)
        q, k, v = (torch.randn(s, generator=generator).to(HALF).to(dtype) for s in (self.q, self.k, self.v))
        if self.mask is None:
            return [q, k, v]
        mask = torch.randn(self.q[-2], self.k[-2], generator=generator).to(HALF)
        return [q, k, v, mask > -1 if self.mask == "bool" else mask.to(dtype)]

    def __call__(self, *inputs: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*inputs, **self.given)


ATTENTIONS = {
    "sdpa": Attention(),
    "sdpa, causal": Attention({"is_causal": True}),
    "sdpa, scale": Attention({"scale": 0.3}),
    "sdpa, boolean mask": Attention(mask="bool"),
    "sdpa, float mask": Attention(mask="float"),
    "sdpa, other lengths": Attention(k=(2, 4, 9, 8), v=(2, 4, 9, 8)),
    "sdpa, grouped queries": Attention({"enable_gqa": True}, k=(2, 2, 6, 8), v=(2, 2, 6, 8)),
    "sdpa, three dimensions": Attention(q=(2, 6, 8), k=(2, 6, 8), v=(2, 6, 8)),
}


@dataclass(frozen=True)
class Product:
    """One op of the matmul family: its function, the shapes of its tensors, and what else it is given."""

    function: Any
    shapes: tuple[tuple[int, ...], ...]
    given: dict[str, Any] = field(default_factory=dict)

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        return [torch.randn(shape, generator=generator).to(HALF).to(dtype) for shape in self.shapes]

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, **self.given)


def linalg_multi_dot(*matrices: Tensor) -> Tensor:
    return torch.linalg.multi_dot(matrices)


def einsum(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("bij,bjk->bik", a, b)


PRODUCTS = {
    "linear": Product(F.linear, ((7, 5), (4, 5), (4,))),
    "linear, no bias": Product(F.linear, ((7, 5), (4, 5))),
    "linear, one row": Product(F.linear, ((5,), (4, 5), (4,))),
    "linear, four dimensions": Product(F.linear, ((2, 3, 2, 5), (4, 5), (4,))),
    "mm": Product(torch.mm, ((3, 5), (5, 4))),
    "bmm": Product(torch.bmm, ((2, 3, 5), (2, 5, 4))),
    "addmm": Product(torch.addmm, ((4,), (3, 5), (5, 4))),
    "addmm, factors": Product(torch.addmm, ((3, 4), (3, 5), (5, 4)), {"beta": 0.5, "alpha": 2.0}),
    "baddbmm": Product(torch.baddbmm, ((2, 3, 4), (2, 3, 5), (2, 5, 4))),
    "baddbmm, one for all, factors": Product(
        torch.baddbmm, ((1, 3, 4), (2, 3, 5), (2, 5, 4)), {"beta": 2.0, "alpha": 0.25}
    ),
    "matmul": Product(torch.matmul, ((3, 5), (5, 4))),
    "matmul, one matrix for the batch": Product(torch.matmul, ((2, 2, 3, 5), (5, 4))),
    "matmul, one matrix first": Product(torch.matmul, ((3, 5), (2, 5, 4))),
    "addbmm": Product(torch.addbmm, ((3, 4), (2, 3, 5), (2, 5, 4))),
    "linalg.multi_dot": Product(linalg_multi_dot, ((3, 5), (5, 4), (4, 2))),
    "einsum": Product(einsum, ((2, 3, 5), (2, 5, 4))),
    "matmul, broadcast": Product(torch.matmul, ((2, 1, 3, 5), (3, 5, 4))),
}
MADE_OF_PRODUCTS = ("addbmm", "linalg.multi_dot", "einsum")  # what autograd saves inside of them is FP32
BROADCAST = ("matmul, one matrix first", "matmul, broadcast")
CASES: dict[str, Any] = CONVOLUTIONS | ATTENTIONS
ALL_CASES: dict[str, Any] = CASES | PRODUCTS

ABLE = frozenset({"avx2", "avx512_bw", "avx512_fp16"})  # half instructions, but slow in some directions
UNABLE = frozenset({"avx2"})


def leaves(case: Any, inputs: list[Tensor | None]) -> list[Tensor]:
    """Let what a model would train or pass on require gradients: not a mask."""
    return [t.requires_grad_() for t in inputs[:3] if t is not None]


def run(case: Any, dtype: torch.dtype, region: Any = None) -> tuple[Tensor, list[Tensor]]:
    """Return the output of a case and the gradients of its inputs."""
    inputs = case.inputs(dtype)
    wanted = leaves(case, inputs)
    with region or nullcontext():
        out = case(*inputs)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(HALF)
    return out, list(torch.autograd.grad(out, wanted, seed.to(out.dtype)))


def op_of(case: Any) -> str:
    return "scaled_dot_product_attention" if isinstance(case, Attention) else case.function.__name__


def substituted(recorded: Any, case: Any) -> bool:
    return any(row["id"].startswith(f"op:{op_of(case)}") for row in recorded.summary["substitutions"])
