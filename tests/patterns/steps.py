"""How steps happen: closures, several optimizers, wrappers, schedules, searches, resumption."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from catalogue import Figures, batch, fit, net, pattern
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

FAMILY = "Steps"


@pattern(FAMILY, float16=0.05, bfloat16=0.3)
def lbfgs() -> Figures:
    """Minimises with L-BFGS and a line search: a closure evaluated many times a step."""
    model = nn.Linear(8, 4)
    x, y = batch()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + 1e-2 * model.weight.square().sum()
        loss.backward()
        return loss

    returned = [optimizer.step(closure).item() for _ in range(3)]
    return {"first": returned[0], "loss": closure().item()}


@pattern(FAMILY)
def closures_everywhere() -> Figures:
    """Gives every optimizer a closure (Lightning's automatic optimization)."""
    model, (x, y) = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    losses = [optimizer.step(closure=closure).item() for _ in range(15)]
    return {"sum": sum(losses)}


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization around another optimizer, sharing its parameter groups."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], rho: float, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base = base(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        """Climb to the sharpest point nearby."""
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.detach().clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))

    @torch.no_grad()
    def second_step(self) -> None:
        """Come back and step with the gradient found there."""
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()


@pattern(FAMILY)
def sharpness_aware() -> Figures:
    """Takes two passes a step (SAM); the outer optimizer's `step` is never called."""
    model, (x, y) = net(), batch()
    optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1)
    for _ in range(12):
        F.cross_entropy(model(x), y).backward()
        optimizer.first_step()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.second_step()
        optimizer.zero_grad()
    return {"loss": F.cross_entropy(model(x), y).item()}


class Lookahead(torch.optim.Optimizer):
    """Slow weights that follow fast ones, without `super().__init__`, as copies in the wild do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state, self.count = inner, inner.param_groups, inner.state, 0
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = self.inner.step(closure)
        self.count += 1
        if self.count % 3 == 0:
            fast = (p for group in self.param_groups for p in group["params"])
            for slow, p in zip(self.slow, fast, strict=True):
                slow.lerp_(p.detach(), 0.5)
                p.data.copy_(slow)
        return result


@pattern(FAMILY)
def lookahead() -> Figures:
    """Wraps an optimizer in another that never calls `super().__init__`."""
    model = net()
    return {"loss": fit(model, Lookahead(torch.optim.SGD(model.parameters(), lr=0.1)))}


class Centred(torch.optim.SGD):
    """An optimizer that overrides `step` and calls its parent's."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() > 1:
                    p.grad.sub_(p.grad.mean())
        return super().step(closure)


@pattern(FAMILY)
def optimizer_subclass() -> Figures:
    """Subclasses an optimizer and calls `super().step()`."""
    model = net()
    return {"loss": fit(model, Centred(model.parameters(), lr=0.1))}


@pattern(FAMILY)
def two_optimizers_one_loss() -> Figures:
    """Steps two optimizers after one backward."""
    model, (x, y) = net(), batch()
    optimizers = [
        torch.optim.SGD(model[0].parameters(), lr=0.1),
        torch.optim.Adam(model[5].parameters(), lr=1e-2),
    ]
    for _ in range(15):
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    return {"loss": F.cross_entropy(model(x), y).item()}


@pattern(FAMILY, float16=0.03, bfloat16=0.1)
def adversarial_players() -> Figures:
    """Trains a GAN: two optimizers, three losses, stray gradients in the other player."""
    generator, critic = net(outputs=8), net(outputs=1)
    optimizers = [torch.optim.Adam(m.parameters(), lr=2e-3, betas=(0.5, 0.999)) for m in (generator, critic)]
    real, loss = torch.randn(64, 8) + 1, torch.zeros(())
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
    for _ in range(20):
        fake = generator(torch.randn(64, 8))
        critic.zero_grad()
        F.binary_cross_entropy_with_logits(critic(real), ones).backward()
        F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros).backward()
        optimizers[1].step()
        generator.zero_grad()
        loss = F.binary_cross_entropy_with_logits(critic(fake), ones)
        loss.backward()
        optimizers[0].step()
    return {"generator": loss.item(), "critic": critic(real).mean().item()}


@pattern(FAMILY)
def schedulers() -> Figures:
    """Uses warm-up, cosine, OneCycle and plateau schedules in turn."""
    model, (x, y) = net(), batch()
    rates = 0.0
    for make in (
        lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        schedule = make(optimizer)
        for _ in range(8):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
            rates += optimizer.param_groups[0]["lr"]
    return {"rates": rates, "loss": F.cross_entropy(model(x), y).item()}


@pattern(FAMILY)
def learning_rate_finder() -> Figures:
    """Sweeps the learning rate, then restores model and optimizer."""
    model, (x, y) = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for _ in range(25):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if not math.isfinite(loss.item()):
            break
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 1.5
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    optimizer.param_groups[0]["lr"] = 0.1
    return {"loss": fit(model, optimizer)}


@pattern(FAMILY)
def a_new_optimizer_each_round() -> Figures:
    """Makes a new model and optimizer for each fold or seed."""
    total = 0.0
    for _ in range(4):
        model = net()
        total += fit(model, torch.optim.Adam(model.parameters(), lr=1e-2), steps=8)
    return {"sum": total}


@pattern(FAMILY)
def stops_early() -> Figures:
    """Stops when the loss falls below a threshold."""
    model, (x, y) = net(), batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    steps = 0
    for _ in range(200):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if loss < 0.3:
            break
        loss.backward()
        optimizer.step()
        steps += 1
    return {"steps": steps}


@pattern(FAMILY)
def guards_against_nan() -> Figures:
    """Drops a batch itself when its loss is not finite."""
    model, (x, y) = net(), batch()
    optimizer, dropped = torch.optim.SGD(model.parameters(), lr=0.1), 0
    for step in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x * (float("inf") if step == 7 else 1.0)), y)
        if not torch.isfinite(loss):
            dropped += 1
            continue
        loss.backward()
        optimizer.step()
    return {"dropped": dropped, "loss": F.cross_entropy(model(x), y).item()}


@pattern(FAMILY)
def every_optimizer() -> Figures:
    """Trains with each optimizer of torch.optim, fused and foreach ones too."""
    kinds: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
        (torch.optim.SGD, {"lr": 0.05, "fused": True}),
        (torch.optim.Adam, {"lr": 1e-3, "fused": True}),
        (torch.optim.AdamW, {"lr": 1e-3, "foreach": True}),
        (torch.optim.Adagrad, {"lr": 1e-2}),
        (torch.optim.Adadelta, {"lr": 1.0}),
        (torch.optim.Adamax, {"lr": 1e-3}),
        (torch.optim.NAdam, {"lr": 1e-3}),
        (torch.optim.RAdam, {"lr": 1e-3}),
        (torch.optim.RMSprop, {"lr": 1e-3}),
        (torch.optim.Rprop, {"lr": 1e-3}),
        (torch.optim.ASGD, {"lr": 1e-2}),
    ]
    figures = {}
    for kind, settings in kinds:
        torch.manual_seed(3)
        model = net()
        figures[kind.__name__] = fit(model, kind(model.parameters(), **settings), steps=6)
    return figures


class Signed(torch.optim.Optimizer):
    """Lion: steps by the sign of a mean of gradients."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(torch.sign(0.9 * mean + 0.1 * p.grad), alpha=group["lr"])
                mean.lerp_(p.grad, 0.01)


class ByHand:
    """AdamW by hand, which is no optimizer to torch."""

    def __init__(self, params: Any, lr: float) -> None:
        self.params, self.lr, self.count = list(params), lr, 0
        self.first = [torch.zeros_like(p.data) for p in self.params]
        self.second = [torch.zeros_like(p.data) for p in self.params]

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for p in self.params:
            p.grad = None

    def step(self) -> None:
        """Update the weights through `.data`."""
        self.count += 1
        for p, first, second in zip(self.params, self.first, self.second, strict=True):
            first.mul_(0.9).add_(p.grad.data, alpha=0.1)
            second.mul_(0.999).addcmul_(p.grad.data, p.grad.data, value=0.001)
            p.data.mul_(1 - 0.01 * self.lr)
            scaled = second.div(1 - 0.999**self.count).sqrt_().add_(1e-8)
            p.data.addcdiv_(first / (1 - 0.9**self.count), scaled, value=-self.lr)


@pattern(FAMILY)
def own_optimizers() -> Figures:
    """Has optimizers of its own: one with torch's base class (Lion), one without any (AdamW by hand)."""
    first, second = net(), net()
    return {
        "signed": fit(first, Signed(first.parameters(), lr=1e-3)),
        "by hand": fit(second, ByHand(second.parameters(), lr=3e-3)),  # type: ignore[arg-type]
    }


@pattern(FAMILY, not_at_o3="no: weights are half to the script as well")
def optimizers_in_layers() -> Figures:
    """Gives each layer an optimizer in its constructor and trains it by a loss of its own (Forward-Forward)."""

    class Layer(nn.Linear):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__(inputs, outputs)
            self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu((x / (x.norm(dim=1, keepdim=True) + 1e-4)) @ self.weight.T + self.bias)

        def learn(self, good: Tensor, bad: Tensor) -> float:
            """Step until the good ones are active and the bad ones are not; return the loss."""
            for _ in range(5):
                high, low = (self.forward(x).pow(2).mean(1) for x in (good, bad))
                loss = torch.log(1 + torch.exp(torch.cat([2 - high, low - 2]))).mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            return loss.item()

    good, bad, total = torch.randn(64, 8), torch.randn(64, 8) * 3, 0.0
    for layer in [Layer(8, 32), Layer(32, 32)]:
        total += layer.learn(good, bad)
        good, bad = layer(good).detach(), layer(bad).detach()
    return {"losses": total}


@pattern(FAMILY)
def one_parameter_in_two_optimizers() -> Figures:
    """Gives one module's parameters to two optimizers, each with a loss of its own (InfoGAN, actor and critic)."""
    shared, first, second = net(outputs=16), nn.Linear(16, 4), nn.Linear(16, 8)
    one = torch.optim.Adam([*shared.parameters(), *first.parameters()], lr=3e-3)
    other = torch.optim.SGD([*shared.parameters(), *second.parameters()], lr=0.05)
    (x, y), loss, rebuilt = batch(), torch.zeros(()), torch.zeros(())
    for _ in range(12):
        one.zero_grad()
        loss = F.cross_entropy(first(shared(x)), y)
        loss.backward()
        one.step()
        other.zero_grad()
        rebuilt = F.mse_loss(second(shared(x)), x)
        rebuilt.backward()
        other.step()
    return {"loss": loss.item(), "rebuilt": rebuilt.item()}
