"""Images in the manner of apex's ImageNet example; `--opt-level` turns its amp on. Prints every loss."""

import argparse

import torch
from torch import nn

try:
    from apex import amp, optimizers  # noqa: F401
    from apex.fp16_utils import *  # noqa: F403
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.parallel import DistributedDataParallel as DDP  # noqa: F401, N817
    from apex.parallel import convert_syncbn_model
except ImportError:
    amp = None

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", type=str)
parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
parser.add_argument("--loss-scale", type=str, default=None)
parser.add_argument("--sync_bn", action="store_true")


def main():
    args = parser.parse_args()
    if args.opt_level and amp is None:
        raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    if args.sync_bn:
        model = convert_syncbn_model(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    if args.opt_level:
        assert not multi_tensor_applier.available
        model, optimizer = amp.initialize(
            model,
            optimizer,
            opt_level=args.opt_level,
            keep_batchnorm_fp32=args.keep_batchnorm_fp32,
            loss_scale=args.loss_scale,
        )
    criterion = nn.CrossEntropyLoss()
    for step in range(5):
        images, target = torch.randn(8, 3, 8, 8), torch.randint(4, (8,))
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        if args.opt_level:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        optimizer.step()
        print(f"images {step} {loss.item()!r}")
    model.eval()
    with torch.no_grad():
        print(f"images eval {model(images).sum().item()!r}")


if __name__ == "__main__":
    main()
