"""Train the same small model on every rank, once in each way that the arguments name, and once more with an overflow.

Each rank writes `<rank>.json` into the current folder: for each way the final weights, and which steps moved them. The
overflow is one rank's alone, in its third step.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, BAD_STEP, BAD_RANK = 6, 8, 2, 1
# A gradient that FP16 cannot hold at any scale of ours, of a loss that FP32 can.
HUGE = 1e12
OPTIONS = {
    "plain": {},
    "no_sync": {},
    "join": {},
    "unused": {"find_unused_parameters": True},
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
}


class Net(nn.Module):
    def __init__(self, unused):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.head, self.spare = nn.Linear(32, 4), nn.Linear(32, 4) if unused else None

    def forward(self, x):
        return self.head(self.body(x))


def build(way):
    torch.manual_seed(0)
    model = Net(unused=way == "unused")
    if not way.startswith("fsdp"):
        return DistributedDataParallel(model, **OPTIONS[way])
    for layer in (model.body, model.head):
        fully_shard(layer)
    return fully_shard(model)


def batch(step, rank, part):
    draw = torch.Generator().manual_seed(100 * step + 10 * rank + part)
    x = torch.randn(BATCH, 16, generator=draw)
    return x, x[:, :4].sin()


def weights(model):
    held = model.state_dict().values()
    full = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in held]
    return torch.cat([value.flatten() for value in full]).clone()


def unsynchronised(model, *, when):
    if not when:
        return contextlib.nullcontext()
    if isinstance(model, FSDPModule):
        return contextlib.ExitStack()
    return model.no_sync()


def train(way, rank, *, overflow):
    model = build(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts = 2 if "no_sync" in way else 1
    # With `join` the last rank has more data than the others.
    steps = STEPS + 2 * rank if way == "join" else STEPS
    moved, losses = [], []
    with model.join() if way == "join" else contextlib.nullcontext():
        for step in range(steps):
            before = model_of(model)
            optimizer.zero_grad()
            for part in range(parts):
                x, y = batch(step, rank, part)
                last = part == parts - 1
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(last)
                bad = overflow and rank == BAD_RANK and step == BAD_STEP and part == 0
                with unsynchronised(model, when=not last):
                    loss = nn.functional.mse_loss(model(x), y) * (HUGE if bad else 1.0)
                    loss.backward()
                losses.append(loss.item())
            optimizer.step()
            moved.append(not torch.equal(before, model_of(model)))
    return {"weights": weights(model).tolist(), "moved": moved, "losses": losses}


def model_of(model):
    """Return what this rank holds of the weights; of another rank it must not ask while it may be absent."""
    held = [getattr(p.detach(), "_local_tensor", p.detach()) for p in model.parameters()]
    return torch.cat([value.flatten() for value in held]).clone()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {}
    for way in sys.argv[1:]:
        found[way] = {kind: train(way, rank, overflow=kind == "overflow") for kind in ("clean", "overflow")}
    Path(f"{rank}.json").write_text(json.dumps(found))
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} is done", flush=True)
    dist.destroy_process_group()
