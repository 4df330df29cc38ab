"""Trains on every rank with apex's DDP and amp, then again with torch's DDP and neither; writes both into RANK.json."""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from apex import amp
from apex.parallel import DistributedDataParallel, convert_syncbn_model
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=int(os.environ["LOCAL_RANK"]), type=int)
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
        self.head_of_another_task = nn.Linear(12, 2)

    def forward(self, x):
        return self.layers(x)


def train(*, with_apex):
    torch.manual_seed(dist.get_rank())  # DDP brings the weights together
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if with_apex:
        model = convert_syncbn_model(model)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        model = DistributedDataParallel(model, delay_allreduce=True)
    else:
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    losses = []
    for step in range(6):
        torch.manual_seed(10 * step + dist.get_rank())
        x, y = torch.randn(8, 6), torch.randint(3, (8,))
        loss = nn.functional.cross_entropy(model(x), y) * 30
        optimizer.zero_grad()
        if with_apex:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([parameter.detach().flatten() for parameter in model.module.parameters()])
    return {"losses": losses, "weights": weights.tolist(), "keys": list(model.state_dict())}


dist.init_process_group(backend="gloo")
told = {"plain": train(with_apex=False), "apex": train(with_apex=True), "amp": amp.state_dict()}
Path(f"{dist.get_rank()}.json").write_text(json.dumps(told))
dist.destroy_process_group()
