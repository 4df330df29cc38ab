"""`plain_loop.py` as torch's documentation would have it rewritten for mixed precision; prints the loss scale too."""

import sys

import torch
from little_models import GROUPS, LOUD, batch
from torch.nn import functional as F

half = getattr(torch, sys.argv[1])
scaler = torch.amp.GradScaler("cpu", enabled=half == torch.float16, growth_interval=5)
for group in sys.argv[2:]:
    for name, make in GROUPS[group].items():
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        weight = 30.0 if name == LOUD else 1.0
        for step in range(8):
            x, y = batch(step)
            # see docs/decisions.md
            with torch.autocast("cpu", dtype=half, cache_enabled=name == "recurrent"):
                loss = F.cross_entropy(model(x), y) * weight
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            print(f"{name}|{step}|{loss.item()!r}|{scaler.get_scale()!r}")
