"""Train a classifier, write a checkpoint in the middle or go on from one, and print each loss with every digit.

python resumable.py --middle middle.pt --end end.pt
python resumable.py --resume middle.pt --end end.pt
"""

import argparse
import hashlib

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--resume")
parser.add_argument("--middle")
parser.add_argument("--end", required=True)
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(20, 64),
    nn.BatchNorm1d(64),
    nn.ReLU(),
    nn.Dropout(0.1),
    nn.Linear(64, 64),
    nn.LayerNorm(64),
    nn.Linear(64, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)
first = 0
if args.resume:
    checkpoint = torch.load(args.resume)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    schedule.load_state_dict(checkpoint["schedule"])
    torch.set_rng_state(checkpoint["rng"])
    first = checkpoint["step"]


def save(path, step):
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "rng": torch.get_rng_state(),
        "step": step,
    }
    torch.save(checkpoint, path)


for step in range(first, 24):
    if step == 11 and args.middle:
        save(args.middle, step)
    x = torch.randn(32, 20)
    y = x[:, :10].argmax(1)
    loss = F.cross_entropy(model(x), y, reduction="sum")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    print(f"step {step} loss {loss.item()!r}")

save(args.end, 24)
weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
print(f"RESULT {hashlib.sha256(weights).hexdigest()}")
