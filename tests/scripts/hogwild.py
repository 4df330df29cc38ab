"""Train one model in shared memory from two processes, which the way that the argument names has started."""

import multiprocessing
import os
import sys

import torch
from torch import nn


def train(index, model):
    torch.set_num_threads(1)
    torch.manual_seed(index)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3 + index):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    how = sys.argv[1]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).share_memory()
    before = [p.clone() for p in model.parameters()]
    if how == "mp.spawn":
        torch.multiprocessing.spawn(train, args=(model,), nprocs=2)
    elif how == "os.fork":
        for index in range(2):
            if not os.fork():
                train(index, model)
                sys.exit()
            os.wait()
    else:
        children = [multiprocessing.get_context(how).Process(target=train, args=(i, model)) for i in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
    moved = not all(map(torch.equal, before, model.parameters()))
    print(f"the shared weights moved: {moved}, {sorted({str(p.dtype) for p in model.parameters()})}")
