"""Reduce gradients that are known: that of `(x * weight).sum()` is x. Each rank writes `<rank>.json`.

Cases that share one rule come first; the last one overflows, on one rank.
"""

import json
import pickle
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

# Times a loss scale of 1024 and summed over two ranks the second is more than FP16 holds, its mean is not.
INPUTS = [[1 / 3, 60.0, 1e-3, -7.77], [2 / 7, 62.0, -3e-5, 0.1]]
MORE = [[0.7, 1.0, 5e-4, 3.1], [-0.2, 1.0, 1e-7, 9.0]]
TOO_LARGE = [[1.0] * 4, [1.0, 1.0, 1.0, 1000.0]]


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return (x * self.weight).sum()


def build(**options):
    return DistributedDataParallel(Gain(), **options)


def gradient(model, inputs):
    model(torch.tensor(inputs[rank])).backward()
    return model.module.weight.grad.tolist()


def accumulated(model):
    with model.no_sync():
        gradient(model, MORE)
    return gradient(model, INPUTS)


def after_a_hook(model, when):
    if when == "late":
        gradient(model, INPUTS)
        model.zero_grad()
    if when == "builtin":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    else:
        model.register_comm_hook(None, allreduce_hook)
    return gradient(model, INPUTS)


def joined(model):
    with model.join(divide_by_initial_world_size=False):
        try:
            return gradient(model, INPUTS)
        except Exception as error:  # noqa: BLE001 - which one it is, the test asks
            return str(error)


def stepped(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    gradient(model, TOO_LARGE)
    optimizer.step()
    return bool(model.module.weight.any())


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
used = build()
told = {
    "mean": gradient(used, INPUTS),
    "view": gradient(build(gradient_as_bucket_view=True), INPUTS),
    "accumulated": accumulated(build(gradient_as_bucket_view=True)),
    "early": after_a_hook(build(), "early"),
    "late": after_a_hook(build(), "late"),
    "builtin": after_a_hook(build(), "builtin"),
    "joined": joined(build()),
    "joined later": joined(used),
    "pickled with mpx": b"mpx" in pickle.dumps(used),
    "moved": stepped(build()),
}
Path(f"{rank}.json").write_text(json.dumps(told))
dist.destroy_process_group()
