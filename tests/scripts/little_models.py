"""Small classifiers, each with one kind of operation in it, and data for them.

The first matrix product is exact in every floating type: inputs and weights are small multiples of powers of two.
"""

import torch
from torch import nn
from torch.nn import functional as F

FEATURES, CLASSES, BATCH = 16, 8, 32


class Classifier(nn.Module):
    """A linear layer, and something after it."""

    def __init__(self, then):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.then = then
        with torch.no_grad():
            self.linear.weight.copy_(torch.randint(-4, 5, self.linear.weight.shape) / 8)
            self.linear.bias.zero_()

    def forward(self, x):
        return self.then(self.linear(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(1, CLASSES, batch_first=True)

    def forward(self, x):
        return self.rnn(x.unsqueeze(-1))[0][:, -1]


class Bag(nn.Module):
    """Embeddings of the signs of the inputs, summed up by a matrix product."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, CLASSES)
        self.weight = nn.Parameter(torch.ones(1, FEATURES))

    def forward(self, x):
        return torch.matmul(self.weight, self.embedding(x.sign().long() + 1)).squeeze(1)


class Image(nn.Module):
    """A convolution with BatchNorm over the features as a picture."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(8 * 4, CLASSES)

    def forward(self, x):
        return self.head(self.features(x.view(-1, 1, 4, 4)).flatten(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(FEATURES, 2, batch_first=True)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        sequence = x.view(4, BATCH // 4, FEATURES)
        return self.head(self.inner(sequence, sequence, sequence, need_weights=False)[0].flatten(0, 1))


# Operations that every list of mixed precision treats alike on every device.
COMMON = {
    "linear": lambda: Classifier(nn.Identity()),
    "perceptron": lambda: Classifier(
        nn.Sequential(nn.GELU(), nn.Linear(CLASSES, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    ),
    "batch norm": lambda: Classifier(nn.BatchNorm1d(CLASSES)),
    "dropout": lambda: Classifier(nn.Dropout(0.2)),
    "cat": lambda: Classifier(lambda z: torch.cat([z[:, :4], z[:, 4:].float()], dim=1)),
    "embedding": Bag,
    "recurrent": Recurrent,
}
# A half kernel exists, and on some devices it is so slow that nobody wants it.
SLOW = {"convolution": Image, "attention": Attention}
# Operations whose results need more range or more digits than a half type has.
WIDE = {
    "softmax": lambda: Classifier(lambda z: z.softmax(-1)),
    "log_softmax": lambda: Classifier(lambda z: F.log_softmax(z, dim=-1)),
    "layer_norm": lambda: Classifier(nn.LayerNorm(CLASSES)),
    "exp": lambda: Classifier(lambda z: (z / 4).exp()),
    "log": lambda: Classifier(lambda z: (z.abs() + 1).log()),
    "pow": lambda: Classifier(lambda z: (z + 0.125).pow(2)),
    "sum": lambda: Classifier(lambda z: z - z.repeat(1, 33).sum(-1, keepdim=True) / 32),
    "cumsum": lambda: Classifier(lambda z: z.repeat(1, 33).cumsum(-1)[:, -CLASSES:] / 32),
    "norm": lambda: Classifier(lambda z: z / z.norm(dim=-1, keepdim=True).clamp_min(1)),
    "logsumexp": lambda: Classifier(lambda z: z - z.logsumexp(-1, keepdim=True)),
    "softplus": lambda: Classifier(F.softplus),
    "var": lambda: Classifier(lambda z: z * z.var(-1, keepdim=True)),
}
# The same, so large that a half type has no number for it.
OUT_OF_RANGE = {
    "large pow": lambda: Classifier(lambda z: (128 * z).pow(2) / 2**14),
    "large exp": lambda: Classifier(lambda z: (12 + z).exp() / 2**20),
    "large sum": lambda: Classifier(
        lambda z: z - (64 * z.abs()).repeat(1, 1000).sum(-1, keepdim=True) / 2**19
    ),
}
GROUPS = {"common": COMMON, "slow": SLOW, "wide": WIDE, "out of range": OUT_OF_RANGE}
LOUD = "linear"  # this one's loss is so large that its scale has to be found


def batch(step):
    """Return inputs in multiples of a half, and the class that a sum of some of them says."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randint(-2, 3, (BATCH, FEATURES), generator=draw) / 2
    return x, x[:, :CLASSES].argmax(1)
