"""Parameters with given gradients, and who updated them: a fused kernel of torch's, or not."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

SHAPES = ((7, 5), (5,), (3, 2, 4, 4), ())


class Fused(TorchDispatchMode):
    """Counts the calls of fused kernels that update parameters."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func.__name__.startswith("_fused_") and isinstance(args[0][0], nn.Parameter)
        return func(*args, **(kwargs or {}))


def parameters(dtype=torch.float32, shapes=SHAPES):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype)) for shape in shapes]


def give_gradients(trained, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in trained:
        grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = grad.to(parameter.dtype)


def farthest(found, true):
    return max((a.double() - b).abs().max().item() for a, b in zip(found, true, strict=True))


def snapshot(trained):
    return [parameter.detach().clone() for parameter in trained]


def outcome(run):
    """Return what a function returns with the steps that were fused in it, or the kind of error that it raises."""
    with Fused() as fused:
        try:
            return run(), fused.calls
        except (ArithmeticError, AssertionError, RuntimeError, TypeError) as error:
            return type(error), fused.calls
