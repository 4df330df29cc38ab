"""Who calls what: methods, submodules, several models, functional calls, threads, containers of results."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from catalogue import Figures, batch, fit, net, pattern
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

FAMILY = "Calls"


class Autoencoder(nn.Module):
    """A model that is used by its methods, never by its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = net(outputs=4), net(inputs=4, outputs=8)

    def encode(self, x: Tensor) -> Tensor:
        """Return the code."""
        return self.encoder(x)

    def decode(self, code: Tensor) -> Tensor:
        """Return the reconstruction."""
        return self.decoder(code)


@pattern(FAMILY)
def calls_methods() -> Figures:
    """Calls the model's methods instead of its forward."""
    model, (x, _) = Autoencoder(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.zeros(())
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(model.decode(model.encode(x)), x)
        loss.backward()
        optimizer.step()
    return {"loss": loss.item()}


@pattern(FAMILY)
def layers_in_a_python_list() -> Figures:
    """Keeps layers in a plain list and calls them one by one."""
    layers = [nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 4)]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)

    def forward(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return {"loss": fit(forward, optimizer)}


@pattern(FAMILY)
def hides_layers_from_torch() -> Figures:
    """Holds submodules in a list attribute, which torch does not register."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rest = nn.Linear(8, 32), [nn.Linear(32, 32), nn.Linear(32, 4)]

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(x))
            return self.rest[1](torch.relu(self.rest[0](x)))

    model = Hidden()
    parameters = [*model.parameters(), *(p for layer in model.rest for p in layer.parameters())]
    return {"loss": fit(model, torch.optim.SGD(parameters, lr=0.1))}


@pattern(FAMILY)
def model_inside_another() -> Figures:
    """Calls a frozen teacher inside the student's forward."""
    teacher = net().requires_grad_(requires_grad=False)

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()
            self.others = [teacher]

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) + 0.1 * self.others[0](x)

    model = Student()
    return {"loss": fit(model, torch.optim.SGD(model.parameters(), lr=0.1))}


Pair = namedtuple("Pair", ["logits", "hidden"])  # noqa: PYI024 - users write both


@dataclass
class Output:
    """A result as libraries define it."""

    logits: Tensor
    extra: Any = None


class Structured(nn.Module):
    """Returns its result in the container that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: Tensor, kind: str) -> Any:
        y = self.body(x)
        return {
            "namedtuple": Pair(y, [y, {"deep": y}]),
            "dataclass": Output(y, extra=("text", y)),
            "ordered": OrderedDict(logits=y, text="text"),
        }[kind]


@pattern(FAMILY)
def structured_results() -> Figures:
    """Returns named tuples, dataclasses and dict subclasses, nested."""
    model, (x, y) = Structured(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = 0
    for step in range(18):
        out = model(x, ["namedtuple", "dataclass", "ordered"][step % 3])
        kinds += isinstance(out, (Pair, Output, OrderedDict))
        logits = out["logits"] if isinstance(out, OrderedDict) else out.logits
        if logits.dtype is not torch.float32:
            return {"loss": float("nan")}
        optimizer.zero_grad()
        F.cross_entropy(logits, y).backward()
        optimizer.step()
    return {"loss": F.cross_entropy(model.body(x), y).item(), "kinds": kinds}


@pattern(FAMILY)
def packed_sequences() -> Figures:
    """Feeds an LSTM packed sequences of different lengths."""
    lstm, head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)
    optimizer = torch.optim.SGD([*lstm.parameters(), *head.parameters()], lr=0.3)
    x, y, lengths = torch.randn(12, 10, 8), torch.randint(0, 4, (12,)), torch.arange(10, 0, -1).repeat(2)[:12]

    def forward(inputs: Tensor) -> Tensor:
        packed = pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(lstm(packed)[0], batch_first=True)
        return head(states.sum(1))

    for _ in range(15):
        optimizer.zero_grad()
        F.cross_entropy(forward(x), y).backward()
        optimizer.step()
    return {"loss": F.cross_entropy(forward(x), y).item()}


@pattern(FAMILY)
def generator_forward() -> Figures:
    """Has a forward that yields its results one by one."""

    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, x: Tensor) -> Iterator[Tensor]:
            for part in x.chunk(4):
                yield self.body(part)

    model = Stream()
    return {"loss": fit(lambda x: torch.cat(list(model(x))), torch.optim.SGD(model.parameters(), lr=0.1))}


@pattern(FAMILY)
def module_hooks() -> Figures:
    """Registers forward hooks that read and replace inputs and outputs."""
    model, norms = net(), []
    model[0].register_forward_hook(lambda module, args, out: norms.append(out.float().norm().item()))
    model[3].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    model.register_forward_hook(lambda module, args, out: out * 2)
    loss = fit(model, torch.optim.SGD(model.parameters(), lr=0.05))
    return {"loss": loss, "norms": sum(norms)}


@pattern(FAMILY)
def functional_models() -> Figures:
    """Calls the model with other weights through `functional_call`, `grad` and `vmap` (per-sample gradients)."""
    model, (x, y) = net(), batch()
    weights = dict(model.named_parameters())

    def loss_of(parameters: dict[str, Tensor], inputs: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (inputs[None],)), target[None])

    detached = {name: p.detach() for name, p in weights.items()}
    per_sample = vmap(grad(loss_of), in_dims=(None, 0, 0))(detached, x, y)
    return {"norm": sum(g.float().norm().item() for g in per_sample.values())}


@pattern(FAMILY, bfloat16=0.1)
def compiled_model() -> Figures:
    """Compiles the model with `torch.compile`."""
    torch._dynamo.reset()
    model = net()
    compiled = torch.compile(model, backend="aot_eager")
    return {"loss": fit(compiled, torch.optim.SGD(model.parameters(), lr=0.1))}


@pattern(FAMILY, bfloat16=0.1, note="at O2 the compiled step casts FP32 weights at the operations")
def compiled_step() -> Figures:
    """Compiles a function that holds the model and the loss."""
    torch._dynamo.reset()
    model, (x, y) = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="aot_eager")
    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), targets)

    for _ in range(15):
        optimizer.zero_grad()
        loss_of(x, y).backward()
        optimizer.step()
    return {"loss": F.cross_entropy(model(x), y).item()}


@pattern(FAMILY)
def traced_and_scripted() -> Figures:
    """Trains a traced and a scripted model."""
    with __import__("warnings").catch_warnings():
        __import__("warnings").simplefilter("ignore", DeprecationWarning)
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        scripted = torch.jit.script(model)
        traced = torch.jit.trace(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), batch()[0])
    return {
        "scripted": fit(scripted, torch.optim.SGD(scripted.parameters(), lr=0.1)),
        "traced": fit(traced, torch.optim.SGD(traced.parameters(), lr=0.1)),
    }


@pattern(FAMILY)
def symbolic_trace() -> Figures:
    """Trains the graph module of `torch.fx.symbolic_trace`."""
    model = torch.fx.symbolic_trace(net())
    return {"loss": fit(model, torch.optim.SGD(model.parameters(), lr=0.1))}


@pattern(FAMILY)
def evaluates_in_between() -> Figures:
    """Evaluates under `no_grad` and `inference_mode` between training steps."""
    model, (x, y) = net(), batch()
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), 0.0
    for _ in range(8):
        fit(model, optimizer, steps=2)
        model.eval()
        with torch.no_grad():
            seen += F.cross_entropy(model(x), y).item()
        with torch.inference_mode():
            seen += F.cross_entropy(model(x), y).item()
        model.train()
    return {"seen": seen}


@pattern(FAMILY)
def trains_in_a_thread() -> Figures:
    """Trains in a thread that the script starts."""
    results: list[float] = []
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    thread = threading.Thread(target=lambda: results.append(fit(model, optimizer)))
    thread.start()
    thread.join()
    return {"loss": results[0]}


@pattern(FAMILY)
def ensembles_and_jacobians() -> Figures:
    """Trains an ensemble by `stack_module_state` and `vmap`, meta-learns with `grad` in it, takes Jacobians."""
    (x, y), base = batch(), net()
    weights, buffers = stack_module_state([net() for _ in range(3)])
    optimizer, loss = torch.optim.SGD(weights.values(), lr=0.1), torch.zeros(())

    def member(parameters: dict[str, Tensor], state: dict[str, Tensor]) -> Tensor:
        return functional_call(base, (parameters, state), (x,))

    def adapted(inputs: Tensor, targets: Tensor) -> Tensor:
        def inner(fast: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(functional_call(base, fast, (inputs,)), targets)

        own = dict(base.named_parameters())
        return inner({name: own[name] - 0.1 * slope for name, slope in grad(inner)(own).items()})

    for _ in range(10):
        optimizer.zero_grad()
        loss = F.cross_entropy(vmap(member)(weights, buffers).flatten(0, 1), y.repeat(3))
        loss.backward()
        optimizer.step()
    meta = vmap(adapted)(x.view(4, 16, 8), y.view(4, 16)).mean()
    meta.backward()
    return {
        "ensemble": loss.item(),
        "meta": meta.item(),
        "slope": base[0].weight.grad.norm().item(),
        "jacobian": vmap(jacrev(base))(x[:4]).norm().item(),
    }


@pattern(FAMILY)
def data_parallel() -> Figures:
    """Wraps the model in `DataParallel` on a machine without GPUs, and steps `model.module`'s parameters."""
    model = nn.DataParallel(net())
    return {"loss": fit(model, torch.optim.SGD(model.module.parameters(), lr=0.1))}


@pattern(FAMILY)
def replaces_forward() -> Figures:
    """Replaces `forward` on an instance, of the model and of a layer in it."""
    model = net()
    inner, outer = model[0].forward, model.forward
    model[0].forward = lambda x: inner(x) + 0.1  # type: ignore[method-assign]
    model.forward = lambda x: outer(x) * 2  # type: ignore[method-assign]
    return {"loss": fit(model, torch.optim.SGD(model.parameters(), lr=0.05))}
