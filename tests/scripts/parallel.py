"""Train one small model in each way that the arguments name: tensor parallel, compiled below or above DDP, in stages.

Each rank writes `<rank>.json`: for each way the final weights that it holds, and which steps moved them; once clean,
once with an overflow in the third step, on one rank alone.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, PARTS, BAD_STEP, BAD_RANK = 5, 8, 4, 2, 1
HUGE = 1e12  # times a gradient it is more than FP16 holds at any scale of ours
STAGED = {
    "gpipe": schedules.ScheduleGPipe,
    "sharded": schedules.ScheduleGPipe,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
}
CPU = torch.device("cpu")


class Block(nn.Module):
    bad = False

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)

    def forward(self, x):
        x = self.down(self.act(self.up(x)))
        return x + HUGE * (x - x.detach()) if self.bad else x  # the value of x, and a gradient out of range


def net():
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Tanh(), Block(), nn.Linear(16, 4))


def tensor_parallel():
    parts = {"up": ColwiseParallel, "down": RowwiseParallel}
    plan = {f"{block}.{name}": kind() for block in (0, 2) for name, kind in parts.items()}
    return parallelize_module(net(), init_device_mesh("cpu", (2,)), plan)


WHOLE = {
    "tensor_parallel": tensor_parallel,
    "compiled_below": lambda: DistributedDataParallel(torch.compile(net(), backend="aot_eager")),
    "compiled_above": lambda: torch.compile(DistributedDataParallel(net()), backend="aot_eager"),
}


def batch(step, part):
    x = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(10 * step + part))
    return x, x[:, :4].sin()


def held(module):
    values = [getattr(p.detach(), "_local_tensor", p.detach()) for p in module.parameters()]
    return torch.cat([value.flatten() for value in values]).clone()


def whole(module):
    values = [p.detach() for p in module.parameters()]
    return torch.cat(
        [getattr(value, "full_tensor", lambda value=value: value)().flatten() for value in values]
    )


def trained(module, do_step, *, overflow):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    moved = []
    for step in range(STEPS):
        before = held(module)
        optimizer.zero_grad()
        do_step(step, bad=overflow and step == BAD_STEP)
        optimizer.step()
        moved.append(not torch.equal(before, held(module)))
    return {"weights": whole(module).tolist(), "moved": moved}


def in_one_piece(way, *, overflow):
    model = WHOLE[way]()

    def do_step(step, *, bad):
        x, y = batch(step, 0 if way == "tensor_parallel" else rank)
        loss = nn.functional.mse_loss(model(x), y)
        (loss * (HUGE if bad and rank == BAD_RANK else 1.0)).backward()

    return trained(model, do_step, overflow=overflow)


def in_stages(way, *, overflow):
    layers = net()
    single = STAGED[way] is schedules.ScheduleGPipe
    parts = [layers[:2], layers[2:]] if single else [layers[0], layers[1], layers[2], layers[3]]
    mine = {index: part for index, part in enumerate(parts) if index % 2 == rank}
    if way == "sharded":
        grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "shard"))
        fully_shard(mine[rank], mesh=grid["shard"])
    stages = [PipelineStage(part, index, len(parts), CPU) for index, part in mine.items()]
    schedule = STAGED[way](stages[0] if single else stages, PARTS, loss_fn=nn.functional.mse_loss)

    def do_step(step, *, bad):
        layers[0].bad = bad  # on the first rank, which has this layer: the gradients of the others are sound
        x, y = batch(step, 0)
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)

    return trained(nn.ModuleList(mine.values()), do_step, overflow=overflow)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {}
    for way in sys.argv[1:]:
        run = in_one_piece if way in WHOLE else in_stages
        found[way] = {kind: run(way, overflow=kind == "overflow") for kind in ("clean", "overflow")}
    Path(f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
