"""Train as accelerate's own examples do; each rank writes `<rank>.json`: losses, final weights, which steps moved them.

The last rank's loss leaves the range of FP16 in the third step.
"""

import json
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BAD_STEP, HUGE = 2, 1e12

torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(96, 16, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(x, x[:, :4].sin()), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses, moved = [], []
for step, (inputs, targets) in enumerate(loader):
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    bad = step == BAD_STEP and rank == accelerator.num_processes - 1
    accelerator.backward(loss * (HUGE if bad else 1.0))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    moved.append(not torch.equal(before, torch.cat([p.detach().flatten() for p in model.parameters()])))
weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
Path(f"{rank}.json").write_text(json.dumps({"weights": weights, "losses": losses, "moved": moved}))
accelerator.end_training()
