"""Text in the manner of scripts that fine-tune BERT: gradient accumulation, clipping, a schedule. Prints every loss."""

import argparse

import torch
from torch import nn

try:
    from apex.normalization.fused_layer_norm import FusedLayerNorm as BertLayerNorm
except ImportError:
    BertLayerNorm = nn.LayerNorm


class Encoder(nn.Module):
    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(32, dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm = BertLayerNorm(dim, eps=1e-12)
        self.classify = nn.Linear(dim, 2)

    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = self.qkv(x).view(*ids.shape, 3, self.heads, -1).unbind(2)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
        mixed = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2)
        return self.classify(self.norm(x + self.out(mixed)).mean(1))


def train(args):
    torch.manual_seed(args.seed)
    model = Encoder()
    no_decay = ["bias", "norm.weight"]
    named = list(model.named_parameters())
    grouped = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(grouped, lr=args.learning_rate, eps=1e-8)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    if args.fp16:
        try:
            import apex
            from apex import amp

            apex.amp.register_half_function(torch, "einsum")
        except ImportError:
            raise ImportError("Please install apex from https://www.github.com/nvidia/apex") from None
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level)
    for step in range(6):
        ids = torch.randint(32, (4, 8))
        labels = ids[:, 0] % 2
        loss = nn.functional.cross_entropy(model(ids), labels)
        if args.gradient_accumulation_steps > 1:
            loss = loss / args.gradient_accumulation_steps
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        norm = None
        if (step + 1) % args.gradient_accumulation_steps == 0:
            if args.fp16:
                norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_grad_norm)
            else:
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                norm = torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            model.zero_grad()
        print(f"text {step} {loss.item()!r} {norm if norm is None else norm.item()!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--fp16_opt_level", type=str, default="O1")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--max_grad_norm", type=float, default=0.5)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=3)
    train(parser.parse_args())
