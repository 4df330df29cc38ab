"""Train a little, then end in the way that the first argument names."""

import os
import signal
import sys

import torch
from torch import nn
from torch.nn import functional as F

how = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(12):
    x = torch.randn(16, 16)
    loss = 100 * F.cross_entropy(model(x), x[:, :4].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item()!r}", flush=True)
    if step == 9:
        if how == "exception":
            model(torch.randn(16, 3))
        elif how == "exit-3":
            sys.exit(3)
        elif how == "_exit-7":
            os._exit(7)
        elif how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
