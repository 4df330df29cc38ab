"""Train a character GPT on the English text that ships with CPython, and print a sample of what it writes.

The text is the language reference in `pydoc_data.topics` (about 465,000 characters): nothing is downloaded.
Two runs with the same arguments on the same machine print the same digits.

    python scripts/train_gpt.py --steps 300 --out gpt.pt
    python scripts/train_gpt.py --steps 600 --resume gpt.pt
"""

import argparse
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# B: batch, T: time (characters of context), C: channels, V: vocabulary, nh: heads, hs: C / nh


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a character sees itself and what came before it."""

    def __init__(self, channels: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.heads, C // self.heads)  # (B, T, 3, nh, hs)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, nh, T, hs) each
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)  # (B, nh, T, hs)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))  # (B, T, C)


class Block(nn.Module):
    """One transformer layer: attention, then a perceptron, each normed before and added to the residual."""

    def __init__(self, channels: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(channels)
        self.attention = CausalSelfAttention(channels, heads, dropout)
        self.norm2 = nn.LayerNorm(channels)
        self.expand = nn.Linear(channels, 4 * channels)
        self.contract = nn.Linear(4 * channels, channels)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.contract(F.gelu(self.expand(self.norm2(x)))))  # (B, T, C)


class GPT(nn.Module):
    """A decoder-only transformer over characters; input and output embeddings share one weight."""

    def __init__(
        self, *, vocab: int, context: int, layers: int, heads: int, channels: int, dropout: float
    ) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(vocab, channels)
        self.positions = nn.Embedding(context, channels)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(channels, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, vocab, bias=False)
        self.apply(self._init_weights)
        # Each layer adds twice to the residual stream: start with the variance of one.
        for block in self.blocks:
            nn.init.normal_(block.attention.proj.weight, std=0.02 / math.sqrt(2 * layers))
            nn.init.normal_(block.contract.weight, std=0.02 / math.sqrt(2 * layers))
        self.head.weight = self.characters.weight

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the logits and, when targets are given, the mean cross entropy in nats a character."""
        _, T = ids.shape
        x = self.drop(self.characters(ids) + self.positions(torch.arange(T, device=ids.device)))  # (B, T, C)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # (B, T, V)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss

    @torch.no_grad()
    def generate(self, ids: Tensor, length: int, temperature: float) -> Tensor:
        """Return `ids` (B, T) with `length` sampled characters appended."""
        for _ in range(length):
            logits, _ = self(ids[:, -self.context :])
            probabilities = F.softmax(logits[:, -1] / temperature, dim=-1)  # (B, V)
            ids = torch.cat([ids, torch.multinomial(probabilities, num_samples=1)], dim=1)
        return ids


class Text:
    """The corpus as character ids, the last tenth held out for validation."""

    def __init__(self) -> None:
        text = "\n\n".join(topics[name] for name in sorted(topics))
        self.alphabet = sorted(set(text))
        self.code = {character: i for i, character in enumerate(self.alphabet)}
        ids = torch.tensor([self.code[character] for character in text])
        split = len(ids) * 9 // 10
        self.parts = {"train": ids[:split], "val": ids[split:]}

    def encode(self, text: str) -> Tensor:
        return torch.tensor([[self.code[character] for character in text]])  # (1, T)

    def decode(self, ids: Tensor) -> str:
        return "".join(self.alphabet[i] for i in ids.tolist())

    def batches(
        self, part: str, *, batch: int, context: int, seed: int, skip: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield random windows and the same windows shifted by one character, for ever.

        A generator of its own makes the data a function of (seed, step): validation does not disturb
        training, and a resumed run goes on where it stopped by skipping what it has seen.
        """
        ids = self.parts[part]
        draw = torch.Generator().manual_seed(seed)
        for i in itertools.count():
            starts = torch.randint(len(ids) - context, (batch, 1), generator=draw)
            if i < skip:
                continue
            window = starts + torch.arange(context)  # (B, T)
            yield ids[window], ids[window + 1]


def warm_up_then_cosine(step: int, *, warm_up: int, total: int, floor: float = 0.1) -> float:
    """Return the factor on the learning rate: linear up to 1, then a half cosine down to `floor`."""
    if step < warm_up:
        return (step + 1) / warm_up
    progress = min(1.0, (step - warm_up) / max(1, total - warm_up))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Decay matrices only: biases and norms have no reason to be small."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


@torch.no_grad()
def validation_loss(model: GPT, text: Text, args: argparse.Namespace) -> float:
    """Return the mean loss over the same held-out batches each time it is called."""
    model.eval()
    batches = text.batches("val", batch=args.batch, context=args.context, seed=args.seed)
    losses = []
    for _ in range(args.eval_batches):
        ids, targets = next(batches)
        losses.append(model(ids.to(args.device), targets.to(args.device))[1])
    model.train()
    return torch.stack(losses).mean().item()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a character GPT on Python's own documentation.")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps, resumed ones included")
    parser.add_argument("--batch", type=int, default=16, help="windows a step")
    parser.add_argument("--context", type=int, default=64, help="characters a window")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--channels", type=int, default=96)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--warm-up", type=int, default=20, help="steps until the peak learning rate")
    parser.add_argument("--decay-steps", type=int, help="steps to the lowest learning rate [--steps]")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--eval-every", type=int, default=100, help="steps between two validations")
    parser.add_argument("--eval-batches", type=int, default=10)
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines")
    parser.add_argument("--sample", type=int, default=200, help="characters to write at the end")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write a checkpoint here at the end")
    parser.add_argument("--resume", type=Path, help="go on from this checkpoint")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    text = Text()
    model = GPT(
        vocab=len(text.alphabet),
        context=args.context,
        layers=args.layers,
        heads=args.heads,
        channels=args.channels,
        dropout=args.dropout,
    ).to(args.device)
    optimizer = torch.optim.AdamW(parameter_groups(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.95))
    total = args.decay_steps or args.steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warm_up_then_cosine(step, warm_up=args.warm_up, total=total)
    )
    start = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=args.device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        schedule.load_state_dict(checkpoint["schedule"])
        torch.set_rng_state(checkpoint["rng"].cpu())
        start = checkpoint["step"]

    size = sum(p.numel() for p in model.parameters())
    print(f"{size:,} parameters, {len(text.alphabet)} characters, on {args.device}")
    batches = text.batches("train", batch=args.batch, context=args.context, seed=args.seed, skip=start)
    for step in range(start, args.steps):
        ids, targets = next(batches)
        _, loss = model(ids.to(args.device), targets.to(args.device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        schedule.step()
        last = step + 1 == args.steps
        if step % args.log_every == 0 or last:  # repr() keeps every digit: runs can be compared bit by bit
            print(f"step {step:5d}  loss {loss.item()!r}  grad norm {norm.item()!r}", flush=True)
        if (step + 1) % args.eval_every == 0 or last:
            print(f"step {step:5d}  val loss {validation_loss(model, text, args)!r}", flush=True)

    if args.out:
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "rng": torch.get_rng_state(),
            "step": args.steps,
        }
        torch.save(checkpoint, args.out)
    if args.sample:
        model.eval()
        written = model.generate(text.encode("The ").to(args.device), args.sample, temperature=0.8)
        print(f"--- a sample\n{text.decode(written[0])}")


if __name__ == "__main__":
    main()
