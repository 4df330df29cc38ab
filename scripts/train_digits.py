"""Train a convolutional network with BatchNorm on the handwritten digits that ship with scikit-learn.

1,797 grey images of 8 x 8 pixels, a fifth of them held out: nothing is downloaded.
Two runs with the same arguments on the same machine print the same digits.

    python scripts/train_digits.py --epochs 10 --out digits.pt
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split


def conv(inputs: int, outputs: int) -> nn.Sequential:
    """A 3 x 3 convolution without bias (BatchNorm has one), normed and rectified; height and width stay."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class DigitNet(nn.Module):
    """Three convolutions, a pooling between them, and one linear layer on the mean over the image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            conv(1, width),  # (N, W, 8, 8)
            conv(width, 2 * width),  # (N, 2W, 8, 8)
            nn.MaxPool2d(2),  # (N, 2W, 4, 4)
            conv(2 * width, 2 * width),  # (N, 2W, 4, 4)
        )
        self.classify = nn.Linear(2 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.features(images)  # (N, 2W, 4, 4)
        return self.classify(x.mean(dim=(2, 3)))  # (N, 10)


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader, device: str) -> float:
    """Return the fraction of the loader's images that the model names rightly."""
    model.eval()
    right = seen = 0
    for images, labels in loader:
        predicted = model(images.to(device)).argmax(dim=1)
        right += (predicted == labels.to(device)).sum().item()
        seen += len(labels)
    model.train()
    return right / seen


def load_data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set: images (N, 1, 8, 8) in 0..1 and labels (N)."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    return random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(seed))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small CNN on scikit-learn's handwritten digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, help="optimizer steps, instead of --epochs")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=32, help="channels of the first convolution")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write a checkpoint here at the end")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    train, test = load_data(args.seed)
    train_loader = DataLoader(train, batch_size=args.batch, shuffle=True)
    test_loader = DataLoader(test, batch_size=256)
    model = DigitNet(args.width).to(args.device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay, nesterov=True
    )
    total = args.steps or args.epochs * len(train_loader)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size:,} parameters, {len(train)} images, on {args.device}")

    step = 0
    while step < total:
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images.to(args.device)), labels.to(args.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % args.log_every == 0:  # repr() keeps every digit: runs can be compared bit by bit
                print(f"step {step:5d}  loss {loss.item()!r}", flush=True)
            step += 1
            if step == total:
                break
        print(f"step {step - 1:5d}  test accuracy {accuracy(model, test_loader, args.device)!r}", flush=True)

    if args.out:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, args.out)


if __name__ == "__main__":
    main()
