"""Who owns a gradient: clipped, hooked, accumulated, edited, read, penalised."""

from __future__ import annotations

import torch
from catalogue import Figures, batch, fit, net, pattern
from torch import nn
from torch.nn import functional as F

FAMILY = "Gradients that the script reads, edits or makes"


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    """Return SGD with momentum: unlike Adam it shows every error of scale."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


@pattern(FAMILY)
def plain_loop() -> Figures:
    """Zeroes, differentiates, steps."""
    model = net()
    return {"loss": fit(model, sgd(model))}


@pattern(FAMILY)
def clips_by_norm() -> Figures:
    """Clips gradients by norm, and logs the norm."""
    model, (x, y) = net(), batch()
    optimizer, norms = sgd(model), 0.0
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norms += nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
        optimizer.step()
    return {"norms": norms, "loss": F.cross_entropy(model(x), y).item()}


@pattern(FAMILY)
def clips_by_value() -> Figures:
    """Clips gradients by value."""
    model, (x, y) = net(), batch()
    optimizer = sgd(model)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    return {"loss": F.cross_entropy(model(x), y).item()}


@pattern(FAMILY)
def accumulates() -> Figures:
    """Accumulates gradients over micro-batches."""
    model, (x, y) = net(), batch()
    optimizer = sgd(model)
    for _ in range(10):
        optimizer.zero_grad()
        for inputs, targets in zip(x.chunk(4), y.chunk(4), strict=True):
            (F.cross_entropy(model(inputs), targets) / 4).backward()
        optimizer.step()
    return {"loss": F.cross_entropy(model(x), y).item()}


@pattern(FAMILY)
def zeroes_in_place() -> Figures:
    """Zeroes gradients in place instead of dropping them."""
    model, (x, y) = net(), batch()
    optimizer = sgd(model)
    for _ in range(20):
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {"loss": F.cross_entropy(model(x), y).item()}


@pattern(FAMILY)
def never_zeroes() -> Figures:
    """Never zeroes gradients: they add up over the steps."""
    model, (x, y) = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    for _ in range(15):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {"loss": F.cross_entropy(model(x), y).item()}


@pattern(FAMILY)
def updates_by_hand() -> Figures:
    """Updates the weights by hand, without an optimizer."""
    model, (x, y) = net(), batch()
    for _ in range(30):
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.2 * p.grad)
                p.grad = None
    return {"loss": F.cross_entropy(model(x), y).item()}


@pattern(FAMILY)
def updates_data_by_hand() -> Figures:
    """Updates the weights through `.data`, which no version counter sees."""
    model, (x, y) = net(), batch()
    for _ in range(30):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            p.data.add_(p.grad.data, alpha=-0.2)
    return {"loss": F.cross_entropy(model(x), y).item()}


@pattern(FAMILY)
def edits_gradients() -> Figures:
    """Edits `.grad` between backward and step: centralisation, frozen layers."""
    model, (x, y) = net(), batch()
    optimizer = sgd(model)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            if p.dim() > 1:
                p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
        model[0].weight.grad = None
        optimizer.step()
    return {"loss": F.cross_entropy(model(x), y).item()}


@pattern(FAMILY)
def hooks_on_leaves() -> Figures:
    """Registers hooks on parameters that read and change their gradient."""
    model, (x, y) = net(), batch()
    seen = []
    model[0].weight.register_hook(lambda grad: seen.append(grad.norm().item()))
    model[3].weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    optimizer = sgd(model)
    for _ in range(10):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {
        "seen": sum(seen),
        "largest": model[3].weight.grad.abs().max().item(),
        "loss": F.cross_entropy(model(x), y).item(),
    }


@pattern(FAMILY)
def optimizer_in_backward() -> Figures:
    """Steps an optimizer of each parameter inside `register_post_accumulate_grad_hook`."""
    model, (x, y) = net(), batch()
    optimizers = {p: torch.optim.SGD([p], lr=0.2) for p in model.parameters()}

    def update(p: torch.Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        optimizers[p].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for _ in range(20):
        F.cross_entropy(model(x), y).backward()
    return {"loss": F.cross_entropy(model(x), y).item()}


@pattern(FAMILY)
def adversarial_inputs() -> Figures:
    """Differentiates with respect to the input (FGSM), then trains on it."""
    model, (x, y) = net(), batch()
    optimizer, sizes = sgd(model), 0.0
    for _ in range(10):
        clean = x.clone().requires_grad_()
        F.cross_entropy(model(clean), y).backward()
        sizes += clean.grad.norm().item()
        optimizer.zero_grad()
        F.cross_entropy(model(x + 0.05 * clean.grad.sign()), y).backward()
        optimizer.step()
    return {"input gradients": sizes, "loss": F.cross_entropy(model(x), y).item()}


@pattern(FAMILY)
def learns_an_image() -> Figures:
    """Optimizes an input instead of weights: style transfer, prompts, DeepDream."""
    model = net().requires_grad_(requires_grad=False)
    image = torch.zeros(4, 8, requires_grad=True)
    optimizer = torch.optim.SGD([image], lr=1.0)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(image), torch.arange(4)).backward()
        optimizer.step()
    return {"loss": F.cross_entropy(model(image), torch.arange(4)).item(), "size": image.norm().item()}


@pattern(FAMILY)
def frozen_and_unfrozen() -> Figures:
    """Freezes layers and unfreezes them in mid run with `add_param_group`."""
    model = net()
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    first = fit(model, optimizer, steps=10)
    model[0].requires_grad_(requires_grad=True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    return {"frozen": first, "loss": fit(model, optimizer, steps=10)}


@pattern(FAMILY)
def sparse_gradients() -> Figures:
    """Trains an embedding with sparse gradients and SparseAdam beside a dense optimizer."""
    table, head = nn.Embedding(50, 16, sparse=True), nn.Linear(16, 4)
    optimizers = [
        torch.optim.SparseAdam(table.parameters(), lr=0.01),
        torch.optim.SGD(head.parameters(), lr=0.1),
    ]
    ids = torch.randint(0, 50, (64,))
    loss = torch.zeros(())
    for _ in range(20):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.cross_entropy(head(table(ids)), ids % 4)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return {"loss": loss.item(), "sparse": float(table.weight.grad.is_sparse)}


@pattern(FAMILY)
def gradient_penalty() -> Figures:
    """Penalises the norm of an input gradient (WGAN-GP): double backward."""
    critic, (x, _) = net(outputs=1), batch()
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.01)
    penalty = torch.zeros(())
    for _ in range(10):
        inputs = x.clone().requires_grad_()
        score = critic(inputs).mean()
        (slope,) = torch.autograd.grad(score * 64, inputs, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        (score + 10 * penalty).backward()
        optimizer.step()
    return {"penalty": penalty.item()}


@pattern(FAMILY)
def inner_loop() -> Figures:
    """Adapts weights with `autograd.grad(create_graph=True)` and differentiates through it (MAML)."""
    model, (x, y) = net(), batch()
    optimizer = sgd(model, lr=0.05)
    loss = torch.zeros(())
    for _ in range(10):
        names, weights = zip(*model.named_parameters(), strict=True)
        inner = F.cross_entropy(model(x[:32]), y[:32])
        grads = torch.autograd.grad(inner, weights, create_graph=True)
        fast = {name: w - 0.1 * g for name, w, g in zip(names, weights, grads, strict=True)}
        loss = F.cross_entropy(torch.func.functional_call(model, fast, (x[32:],)), y[32:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"loss": loss.item()}


@pattern(FAMILY)
def non_scalar_loss() -> Figures:
    """Calls `backward(gradient)` on a vector of losses, with weights of both signs."""
    model, (x, y) = net(), batch()
    optimizer, weights = sgd(model), torch.linspace(-0.005, 0.03, 64)
    for _ in range(15):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction="none").backward(weights)
        optimizer.step()
    return {"loss": F.cross_entropy(model(x), y).item()}


@pattern(FAMILY)
def several_losses_one_step() -> Figures:
    """Calls backward for several losses of one graph (`retain_graph`) before a step."""
    trunk, heads = net(outputs=16), nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 1)])
    optimizer = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], lr=0.05)
    x, y = batch()
    for _ in range(15):
        optimizer.zero_grad()
        hidden = trunk(x)
        first, second = F.cross_entropy(heads[0](hidden), y), F.mse_loss(heads[1](hidden)[:, 0], x[:, 0])
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
    return {"first": first.item(), "second": second.item()}


@pattern(FAMILY)
def gradients_of_some_inputs() -> Figures:
    """Calls `backward(inputs=...)` for some of the parameters."""
    model, (x, y) = net(), batch()
    optimizer = torch.optim.SGD(model[5].parameters(), lr=0.2)
    for _ in range(15):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward(inputs=list(model[5].parameters()))
        optimizer.step()
    return {"loss": F.cross_entropy(model(x), y).item(), "others": float(model[0].weight.grad is None)}


@pattern(FAMILY)
def clips_or_raises() -> Figures:
    """Clips with `error_if_nonfinite=True`, with a loss so large that the scale has to look for its range."""
    model, (x, y) = net(), batch()
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.05), 0
    while steps < 20:  # of those that are applied
        optimizer.zero_grad()
        (1e4 * F.cross_entropy(model(x), y)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        steps += int(norm.isfinite())
    return {"loss": F.cross_entropy(model(x), y).item()}


@pattern(FAMILY)
def clips_before_backward() -> Figures:
    """Clips before `backward`, the gradients of the step before (a fault of a well-known script)."""
    model, (x, y) = net(), batch()
    optimizer, norms = sgd(model), 0.0
    for _ in range(15):
        loss = F.cross_entropy(model(x), y)
        if model[0].weight.grad is not None:
            norms += nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"norms": norms, "loss": F.cross_entropy(model(x), y).item()}


@pattern(FAMILY)
def gradient_surgery() -> Figures:
    """Projects the gradients of tasks on each other (PCGrad), and writes the result into `.grad`."""
    trunk, heads = net(outputs=16), nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 1), nn.Linear(16, 1)])
    optimizer, conflicts = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], lr=0.05), 0.0
    (x, y), shared = batch(), list(trunk.parameters())
    for _ in range(10):
        hidden = trunk(x)
        losses = [
            F.cross_entropy(heads[0](hidden), y),
            F.mse_loss(heads[1](hidden)[:, 0], x[:, 0]),
            F.mse_loss(heads[2](hidden)[:, 0], -x[:, 0]),
        ]
        slopes = [torch.autograd.grad(loss, shared, retain_graph=True) for loss in losses]
        flat = [torch.cat([slope.flatten() for slope in each]) for each in slopes]
        projected = []
        for own in flat:
            result = own.clone()
            for other in flat:
                dot = torch.dot(result, other)
                if dot < 0:
                    result -= dot / other.norm() ** 2 * other
                    conflicts += dot.item()
            projected.append(result)
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        parts = torch.stack(projected).sum(0).split([p.numel() for p in shared])
        for p, part in zip(shared, parts, strict=True):
            p.grad = part.view_as(p).clone()
        optimizer.step()
    return {"loss": torch.stack(losses).sum().item(), "conflicts": conflicts}


@pattern(FAMILY, bfloat16=0.1)
def curvature() -> Figures:
    """Takes Hessian-vector products, a batch of gradients at once, and differentiates the norm of a gradient."""
    model, (x, y) = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), batch()
    parameters = list(model.parameters())
    vector, size = [torch.ones_like(p) for p in parameters], torch.zeros(())
    for _ in range(5):  # power iteration
        slopes = torch.autograd.grad(F.cross_entropy(model(x), y), parameters, create_graph=True)
        product = torch.autograd.grad(slopes, parameters, vector)
        size = torch.stack([part.norm() for part in product]).norm()
        vector = [part / size for part in product]
    rows = torch.autograd.grad(model(x[:1])[0], parameters, torch.eye(4), is_grads_batched=True)
    slopes = torch.autograd.grad(F.cross_entropy(model(x), y), parameters, create_graph=True)
    torch.stack([slope.square().sum() for slope in slopes]).sum().backward()
    return {
        "eigenvalue": size.item(),
        "rows": sum(row.norm().item() for row in rows),
        "sharpness": sum(p.grad.norm().item() for p in parameters),
    }
