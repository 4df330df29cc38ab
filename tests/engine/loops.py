"""Training loops of many kinds, as functions that yield their model first and then what a script would see.

Optimizers are fused where an accelerator's script would have them so.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


def small_model(*, norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8)] if norm else [nn.Linear(4, 8)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(8, 2))


def batches(number, size=6):
    generator = torch.Generator().manual_seed(1)
    for _ in range(number):
        yield torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator)


def usual(optimizer=lambda p: torch.optim.Adam(p, lr=0.01, fused=True), **options):
    def train():
        model = small_model(**options)
        yield model
        own = optimizer(model.parameters())
        for x, y in batches(30):
            own.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            own.step()
            yield loss.item()

    return train


def clipped(clip):
    def train():
        model = small_model()
        yield model
        own = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        for x, y in batches(30):
            own.zero_grad()
            F.mse_loss(model(x), y).backward()
            yield clip(list(model.parameters()))
            own.step()

    return train


def accumulated(*, set_to_none=True, steps=30, between=lambda model: None):
    def train():
        model = small_model()
        yield model
        own = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
        for number, (x, y) in enumerate(batches(steps)):
            F.mse_loss(model(x), y).backward()
            between(model)
            if number % 3 == 2:
                own.step()
                own.zero_grad(set_to_none=set_to_none)

    return train


def never_zeroed():
    model = small_model()
    yield model
    own = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)
    for x, y in batches(30):
        F.mse_loss(model(x), y).backward()
        own.step()


def two_players(set_to_none):
    def train():
        model = nn.ModuleList([small_model(), small_model()])
        yield model
        players = [torch.optim.Adam(part.parameters(), lr=0.01, fused=True) for part in model]
        for x, y in batches(30):
            players[0].zero_grad(set_to_none=set_to_none)
            F.mse_loss(model[0](x), y).backward()
            players[0].step()
            players[1].zero_grad(set_to_none=set_to_none)
            # also fills the gradients of the first player, which only its own `zero_grad` drops
            (100 * F.mse_loss(model[0](model[1](x).repeat(1, 2)), y)).backward()
            players[1].step()

    return train


def clipped_together():
    model = nn.ModuleList([small_model(), small_model()])
    yield model
    players = [torch.optim.SGD(part.parameters(), lr=0.01, fused=True) for part in model]
    for x, y in batches(30):
        model.zero_grad()
        F.mse_loss(model[0](x), y).backward()
        (1000 * F.mse_loss(model[1](x), y)).backward()
        yield nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        for player in players:
            player.step()


def learnt_input():
    model = small_model()
    yield model
    own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    for x, y in batches(30):
        own.zero_grad()
        x.requires_grad_()
        F.mse_loss(model(x), y).backward()
        yield x.grad.sum().item()
        own.step()


def bad_batches():
    model = small_model(norm=True)
    yield model
    own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    for number, (x, y) in enumerate(batches(30)):
        own.zero_grad()
        if number % 10 == 7:
            x[0] = math.inf
        F.mse_loss(model(x), y).backward()
        own.step()
        if number % 5 == 4:
            model.eval()
            yield model(torch.ones(2, 4)).sum().item()
            model.train()


def with_a_scaler():
    model = small_model()
    yield model
    own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    for number, (x, y) in enumerate(batches(30)):
        own.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.step(own)
        scaler.update()
        if number % 4 == 0:
            yield scaler.get_scale()
    yield scaler.state_dict()["scale"]


def with_checkpoints():
    model = small_model()
    yield model
    own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    for number, (x, y) in enumerate(batches(30)):
        own.zero_grad()
        F.mse_loss(model(x), y).backward()
        own.step()
        if number % 7 == 6:
            state = own.state_dict()
            yield repr(state["mpx"]) if "mpx" in state else ""
            own.load_state_dict(state)


def with_hooks(*, waiting):
    def train():
        model = small_model()
        yield model
        seen = []
        model[0].weight.register_hook(lambda grad: seen.append(grad.sum().item()))
        if waiting:
            model[2].bias.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.sum().item()))
        model[2].register_full_backward_hook(lambda module, ins, outs: seen.append(outs[0].sum().item()))
        own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
        for x, y in batches(30):
            own.zero_grad()
            F.mse_loss(model(x), y).backward()
            own.step()
        yield from seen

    return train


def replaced():
    model = small_model()
    yield model
    own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    for x, y in batches(30):
        own.zero_grad()
        F.mse_loss(model(x), y).backward()
        for parameter in model[0].parameters():
            parameter.grad = parameter.grad * 0.5
        own.step()


def dropped_by_hand():
    model = small_model()
    yield model
    own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    for x, y in batches(30):
        own.zero_grad(set_to_none=False)
        F.mse_loss(model(x), y).backward()
        if not all(parameter.grad.isfinite().all() for parameter in model.parameters()):
            own.zero_grad(set_to_none=False)
        own.step()


def penalised():
    model = small_model()
    yield model
    own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    for x, y in batches(12):
        own.zero_grad()
        x.requires_grad_()
        loss = F.mse_loss(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        own.step()
        yield loss.item()


def with_a_closure():
    model = small_model()
    yield model
    own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    for x, y in batches(30):

        def closure(x=x, y=y):
            own.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        yield own.step(closure).item()


def with_a_later_optimizer():
    model = small_model()
    yield model
    optimizers = [torch.optim.Adam(model[0].parameters(), lr=0.01, fused=True)]
    for number, (x, y) in enumerate(batches(30)):
        if number == 10:
            optimizers.append(torch.optim.RMSprop(model[2].parameters(), lr=0.01))
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()


def stepped_twice():
    model = small_model()
    yield model
    own = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    for x, y in batches(30):
        own.zero_grad()
        F.mse_loss(model(x), y).backward()
        own.step()
        own.step()


def failing_pass():
    model = small_model()
    yield model
    own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    for number, (x, y) in enumerate(batches(30)):
        own.zero_grad()
        output = model(x)
        if number % 5 == 3:
            output.register_hook(lambda grad: 1 / 0)
        try:
            F.mse_loss(output, y).backward()
        except ZeroDivisionError:
            continue
        own.step()


def sparse():
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 2))
    yield model
    own = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(20):
        own.zero_grad()
        model[1](model[0](torch.tensor([[number % 10, 3]]))).square().sum().backward()
        own.step()


def with_empty_gradients():
    model = small_model()
    model.register_parameter("nothing", nn.Parameter(torch.ones(0, 3)))
    yield model
    own = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    for x, y in batches(20):
        own.zero_grad()
        (F.mse_loss(model(x), y) + model.nothing.sum()).backward()
        own.step()


def without_gradients():
    model = small_model()
    yield model
    own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    for _ in range(5):
        own.zero_grad()
        (torch.ones(1, requires_grad=True) * 2).sum().backward()
        own.step()


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=0.01, fused=True)


LOOPS = {
    "Adam": usual(),
    "AdamW with amsgrad": usual(lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, fused=True)),
    "SGD": usual(lambda p: torch.optim.SGD(p, lr=0.01, fused=True)),
    "SGD with momentum": usual(
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, fused=True)
    ),
    "Adagrad": usual(adagrad),
    "not fused": usual(lambda p: torch.optim.Adam(p, lr=0.01)),
    "BatchNorm": usual(norm=True),
    "clipped by norm": clipped(lambda p: nn.utils.clip_grad_norm_(p, 0.1).item()),
    "clipped by value": clipped(lambda p: nn.utils.clip_grad_value_(p, 0.01)),
    "accumulated": accumulated(),
    "accumulated and zeroed": accumulated(set_to_none=False),
    "accumulated and clipped": accumulated(
        between=lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01)
    ),
    "never zeroed": never_zeroed,
    "two players": two_players(set_to_none=True),
    "two players, zeroed": two_players(set_to_none=False),
    "clipped together": clipped_together,
    "learnt input": learnt_input,
    "bad batches": bad_batches,
    "GradScaler": with_a_scaler,
    "checkpoints": with_checkpoints,
    "hooks": with_hooks(waiting=False),
    "hooks that step": with_hooks(waiting=True),
    "replaced": replaced,
    "dropped by hand": dropped_by_hand,
    "gradient penalty": penalised,
    "closure": with_a_closure,
    "later optimizer": with_a_later_optimizer,
    "stepped twice": stepped_twice,
    "failing pass": failing_pass,
    "sparse gradients": sparse,
    "empty gradients": with_empty_gradients,
    "no gradients": without_gradients,
}
