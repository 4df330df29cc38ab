"""Train a model whose parts say in which type their weights are or their results came."""

import torch
from torch import nn


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16))

    def forward(self, x):
        logits = x @ self.weight.t()
        print("head", logits.dtype)
        return logits


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = Head()

    def forward(self, x):
        hidden = self.body(x)
        print("body", hidden.dtype)
        hidden = self.norm(hidden)
        print("norm", self.norm.weight.dtype)
        print("softmax", hidden.softmax(-1).dtype)
        print("product", (hidden @ hidden.t()).dtype)
        return self.head(hidden)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.randn(8, 8)).square().mean()
loss.backward()
optimizer.step()
print("loss", loss.dtype)
