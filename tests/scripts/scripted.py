"""Train a model that TorchScript has compiled: by script or by trace; then save it, load it and call it."""

import sys

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, x):
        h = torch.relu(self.norm(self.conv(x.unsqueeze(1))))
        return self.head(h.flatten(1)) * torch.softmax(h.mean(-1)[:, :3], dim=-1).sum(-1, keepdim=True)


torch.manual_seed(0)
net = Net()
how = sys.argv[1]
if how == "script":
    model = torch.jit.script(net)
elif how == "trace":
    model = torch.jit.trace(net, torch.randn(8, 16))
else:  # a compiled part of a model that is not
    net.head = torch.jit.script(net.head)
    model = net
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(1)
for step in range(6):
    x = torch.randn(8, 16, generator=draw)
    loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item()!r} {loss.dtype} {model.head.weight.grad.dtype}", flush=True)
model.eval()
with torch.no_grad():
    x = torch.randn(8, 16, generator=draw)
    before = model(x)
    if how != "part":
        torch.jit.save(model, "model.pt")
        model = torch.jit.load("model.pt")
    print(
        f"RESULT {model.head.weight.dtype} {before.dtype} {(model(x).float() - before.float()).abs().max() < 0.01}"
    )
