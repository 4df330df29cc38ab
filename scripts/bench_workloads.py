"""The workloads of the benchmark: ordinary training steps, spelled without mixed precision or with torch.amp by hand.

    python scripts/bench_workloads.py gpt --steps 30                        # plain FP32
    python scripts/bench_workloads.py gpt --steps 30 --amp float16          # torch.autocast and GradScaler by hand
    mpx run -O O1 scripts/bench_workloads.py gpt --steps 30                 # the plain spelling under mpx

Prints one JSON line: the milliseconds of each step, without the warm-up, the peak resident memory in MiB and, with
`--phases`, the microseconds of each part of a step (tenth percentile: what it takes when nobody else is in the way).
"""

import argparse
import json
import resource
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from train_gpt import GPT


class Phases:
    """Says how long the parts of a step take. A part that a step has several times counts as one."""

    def __init__(self) -> None:
        self._of_steps: list[Counter[str]] = []
        self._began = 0

    def begin_step(self) -> None:
        """Begin to count."""
        self._of_steps.append(Counter())
        self._began = time.perf_counter_ns()

    def end(self, phase: str) -> None:
        """Note that what has run since the last one was this part."""
        now = time.perf_counter_ns()
        self._of_steps[-1][phase] += now - self._began
        self._began = time.perf_counter_ns()

    def microseconds(self, warm_up: int) -> dict[str, float]:
        """Return the tenth percentile of each part."""
        counted = self._of_steps[warm_up:]
        return {
            phase: sorted(one[phase] for one in counted)[len(counted) // 10] / 1000 for phase in counted[0]
        }


class Plain:
    """FP32: what a script without mixed precision does."""

    def end(self, phase: str) -> None:
        """A part of the step is over; of interest to `Phases` only."""

    def region(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass and its loss."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Differentiate."""
        loss.backward()

    def step(self, optimizer: Optimizer) -> None:
        """Update."""
        optimizer.step()

    def update(self) -> None:
        """End an iteration."""


class ByHand(Plain):
    """torch.autocast and torch.amp.GradScaler as the tutorial writes them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)

    def region(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=self.dtype)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self, optimizer: Optimizer) -> None:
        self.scaler.step(optimizer)

    def update(self) -> None:
        self.scaler.update()


def supervised(
    model: nn.Module, x: Tensor, y: Tensor, amp: Plain, *, micro_batches: int = 1
) -> Callable[[], None]:
    """Return a step of classification with Adam; gradients accumulate over `micro_batches` equal parts of the batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    parts = list(zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True))

    def step() -> None:
        optimizer.zero_grad()
        amp.end("zero_grad")
        for inputs, targets in parts:
            with amp.region():
                logits = model(inputs)
                amp.end("forward")
                loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten()) / micro_batches
            amp.end("loss")
            amp.backward(loss)
            amp.end("backward")
        amp.step(optimizer)
        amp.update()
        amp.end("step")

    return step


def mlp(amp: Plain) -> Callable[[], None]:
    """Four layers of width 32: nothing but overhead."""
    layers = [part for _ in range(3) for part in (nn.Linear(32, 32), nn.ReLU())]
    return supervised(
        nn.Sequential(*layers, nn.Linear(32, 10)), torch.randn(16, 32), torch.randint(0, 10, (16,)), amp
    )


def convolutional() -> nn.Module:
    """Return a small residual-free CNN with BatchNorm for 32x32 images."""
    blocks = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        blocks += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 16, 10))


def cnn(amp: Plain) -> Callable[[], None]:
    """A CNN with BatchNorm on 32 images of 32x32."""
    return supervised(convolutional(), torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,)), amp)


def accumulation(amp: Plain) -> Callable[[], None]:
    """Gradients accumulated over 8 micro-batches of a wide perceptron."""
    model = nn.Sequential(
        nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10)
    )
    return supervised(model, torch.randn(256, 256), torch.randint(0, 10, (256,)), amp, micro_batches=8)


class Logits(nn.Module):
    """The GPT without its loss."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)[0]


def gpt(amp: Plain) -> Callable[[], None]:
    """The GPT of `train_gpt.py`, 128 channels, 4 layers, 8 sequences of 64 characters."""
    model = GPT(vocab=96, context=64, layers=4, heads=4, channels=128, dropout=0.0)
    tokens = torch.randint(0, 96, (8, 65))
    return supervised(Logits(model), tokens[:, :-1], tokens[:, 1:], amp)


def long_gpt(amp: Plain) -> Callable[[], None]:
    """The same with 256 channels, 16 sequences of 256 characters: activations outweigh all else in memory."""
    model = GPT(vocab=96, context=256, layers=4, heads=4, channels=256, dropout=0.0)
    tokens = torch.randint(0, 96, (16, 257))
    return supervised(Logits(model), tokens[:, :-1], tokens[:, 1:], amp)


class Recurrent(nn.Module):
    """A recurrent network and a head that reads its last state."""

    def __init__(self, layers: nn.RNNBase) -> None:
        super().__init__()
        self.layers = layers
        self.head = nn.Linear(layers.hidden_size, 10)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.layers(x)
        return self.head(states[:, -1])


def lstm(amp: Plain) -> Callable[[], None]:
    """Two LSTM layers over 16 sequences of 50 steps."""
    model = Recurrent(nn.LSTM(32, 128, num_layers=2, batch_first=True))
    return supervised(model, torch.randn(16, 50, 32), torch.randint(0, 10, (16,)), amp)


def gru(amp: Plain) -> Callable[[], None]:
    """Two wide GRU layers over 16 sequences of 50 steps."""
    model = Recurrent(nn.GRU(64, 384, num_layers=2, batch_first=True))
    return supervised(model, torch.randn(16, 50, 64), torch.randint(0, 10, (16,)), amp)


class Unrolled(nn.Module):
    """A cell that a loop runs step by step, and a head that reads its last state."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(channels, channels)
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = state = x.new_zeros(x.shape[0], x.shape[-1])
        for step in x.unbind(1):
            hidden, state = self.cell(step, (hidden, state))
        return self.head(hidden)


def cell(amp: Plain) -> Callable[[], None]:
    """An LSTM cell in a loop over 32 sequences of 128 steps."""
    return supervised(Unrolled(512), torch.randn(32, 128, 512), torch.randint(0, 10, (32,)), amp)


class Many(nn.Module):
    """A model of 2,000 small parameter tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(1000))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) * 1e-3
        return self.head(x)


def many(amp: Plain) -> Callable[[], None]:
    """2,000 parameter tensors: what each of them costs."""
    return supervised(Many(), torch.randn(8, 8), torch.randint(0, 10, (8,)), amp)


def gan(amp: Plain) -> Callable[[], None]:
    """Two players, three backward passes and two optimizers an iteration."""
    generator = nn.Sequential(
        nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64)
    )
    critic = nn.Sequential(
        nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Linear(256, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)
    )
    optimizers = [torch.optim.Adam(model.parameters(), lr=2e-4) for model in (generator, critic)]
    real, noise = torch.randn(64, 64), torch.randn(64, 32)
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)

    def judged(samples: Tensor, target: Tensor) -> Tensor:
        judgement = critic(samples)
        amp.end("forward")
        return F.binary_cross_entropy_with_logits(judgement, target)

    def step() -> None:
        optimizers[1].zero_grad()
        amp.end("zero_grad")
        with amp.region():
            loss_real = judged(real, ones)
        amp.end("loss")
        amp.backward(loss_real)
        amp.end("backward")
        with amp.region():
            fake = generator(noise)
            loss_fake = judged(fake.detach(), zeros)
        amp.end("loss")
        amp.backward(loss_fake)
        amp.end("backward")
        amp.step(optimizers[1])
        amp.end("step")
        optimizers[0].zero_grad()
        amp.end("zero_grad")
        with amp.region():
            loss_generator = judged(fake, ones)
        amp.end("loss")
        amp.backward(loss_generator)
        amp.end("backward")
        amp.step(optimizers[0])
        amp.update()
        amp.end("step")

    return step


WORKLOADS = {w.__name__: w for w in (mlp, cnn, gpt, long_gpt, lstm, gru, cell, many, gan, accumulation)}


def main() -> None:
    """Run one workload in one spelling and print its step times."""
    parser = argparse.ArgumentParser(description="Run one workload of the benchmark.")
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phases", action="store_true", help="time the parts of a step as well")
    parser.add_argument("--amp", choices=("float16", "bfloat16"), help="write torch.amp by hand")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    amp = ByHand(getattr(torch, args.amp)) if args.amp else Plain()
    phases = Phases()
    if args.phases:
        amp.end = phases.end
    step = WORKLOADS[args.workload](amp)
    times = []
    for _ in range(args.warm_up + args.steps):
        phases.begin_step()
        began = time.perf_counter()
        step()
        times.append(1000.0 * (time.perf_counter() - began))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures = {"step_ms": times[args.warm_up :], "peak_mib": peak}
    print(json.dumps(figures | ({"phases_us": phases.microseconds(args.warm_up)} if args.phases else {})))


if __name__ == "__main__":
    main()
