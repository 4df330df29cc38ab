"""Load data with workers by every start method; the dataset calls a module of its own, and a model trains."""

import hashlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Projected(Dataset):
    """Samples that a module with weights prepares: work on data, not of the model."""

    def __init__(self):
        torch.manual_seed(1)
        self.project = nn.Linear(32, 8)
        self.x = torch.randn(24, 32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        with torch.no_grad():
            return self.project(self.x[index]), torch.tensor(index % 3)


def main():
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Projected(), batch_size=8, num_workers=1, multiprocessing_context=method)
        digest, types = hashlib.sha256(), set()
        for x, y in loader:
            digest.update(x.numpy().tobytes())
            types.add(str(x.dtype))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        print(method, *types, digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main()
