"""A parameter outside DDP overflows on rank 1 in step 3; then a loss of rank 1 is NaN. Says which steps moved."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model, outside = DistributedDataParallel(nn.Linear(16, 4)), nn.Parameter(torch.zeros(()))
optimizer = torch.optim.SGD([*model.parameters(), outside], lr=0.1)
moved = []


def step(loss):
    before = model.module.weight.detach().clone()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    moved.append(int(not torch.equal(before, model.module.weight)))


for number in range(6):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * number + rank))
    # Times any scale of ours this is more than FP32 holds; the loss itself is not.
    step(model(x).square().mean() + outside * (1e37 if rank == 1 and number == 2 else 0.1))
step(model(x).square().mean() * (float("nan") if rank == 1 else 1.0))
told = [None, None]
dist.all_gather_object(told, (moved, model.module.weight.tolist()))
if rank == 0:
    print(told[0][0], told[1][0], told[0][1] == told[1][1], flush=True)
dist.destroy_process_group()
