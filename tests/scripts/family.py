"""Train in children, by the start method that the first argument names, and before that here if there is a second."""

import multiprocessing
import sys

import torch
from torch import nn


def train(steps):
    torch.set_num_threads(1)
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    # Multiples of a half type's step, or not: whether this process computed in one.
    with torch.no_grad():
        out = model[0](torch.randn(64, 8))
    print(f"trained {steps}: half {torch.equal(out, out.half().float())}", flush=True)


def infer():
    with torch.no_grad():
        nn.Linear(8, 8)(torch.randn(4, 8))


def idle():
    print("idle", flush=True)


if __name__ == "__main__":
    method, *first = sys.argv[1:]
    if first:
        train(5)
    context = multiprocessing.get_context(method)
    for target, args in ((train, (3,)), (train, (4,)), (infer, ()), (idle, ())):
        child = context.Process(target=target, args=args)
        child.start()
        child.join()
        if child.exitcode:
            sys.exit(child.exitcode)
