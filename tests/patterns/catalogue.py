"""The ways in which training scripts are written, each as a small function that trains and returns figures.

A pattern knows nothing of mpx. It is run in FP32 and at each level, and its figures must agree within its tolerance:
the rounding of the half type in so few steps. `docs/compatibility.md` is made from this catalogue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["PATTERNS", "Figures", "Pattern", "batch", "fit", "net", "pattern"]

Figures = dict[str, float]


@dataclass(frozen=True)
class Pattern:
    """One way of writing a script.

    Attributes:
        family: Heading in the table of compatibility.
        name: The function's name.
        title: What the script does.
        run: Trains from a fixed seed and returns figures.
        tolerance: Relative, by half type.
        note: What a user should know; empty where it just works.
        not_at_o3: Why it makes no sense where the weights are half; empty where it does.
    """

    family: str
    name: str
    title: str
    run: Callable[[], Figures]
    tolerance: dict[str, float] = field(default_factory=dict)
    note: str = ""
    not_at_o3: str = ""


PATTERNS: list[Pattern] = []


def pattern(
    family: str, *, float16: float = 0.01, bfloat16: float = 0.05, note: str = "", not_at_o3: str = ""
) -> Callable[[Callable[[], Figures]], Callable[[], Figures]]:
    """Add a function to the catalogue; the first line of its docstring is its title."""

    def add(run: Callable[[], Figures]) -> Callable[[], Figures]:
        title = (run.__doc__ or "").strip().splitlines()[0].rstrip(".")
        tolerance = {"float16": float16, "bfloat16": bfloat16}
        PATTERNS.append(Pattern(family, run.__name__, title, run, tolerance, note, not_at_o3))
        return run

    return add


def net(*, width: int = 32, inputs: int = 8, outputs: int = 4) -> nn.Sequential:
    """Return a perceptron with a LayerNorm."""
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LayerNorm(width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, outputs),
    )


def batch(*, rows: int = 64, inputs: int = 8, outputs: int = 4) -> tuple[Tensor, Tensor]:
    """Return inputs and classes that can be learnt from them."""
    x = torch.randn(rows, inputs)
    return x, x[:, :outputs].argmax(1)


def fit(model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, *, steps: int = 20) -> float:
    """Train on one batch and return the last loss."""
    x, y = batch()
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()
