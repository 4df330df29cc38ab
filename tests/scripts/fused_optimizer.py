"""Trains a small classifier with a fused optimizer, and prints every digit of what becomes of it."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
for _ in range(40):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), (x[:, 0] > 0).long())
    loss.backward()
    optimizer.step()
print(loss.item(), [p.sum().item() for p in model.state_dict().values()])
