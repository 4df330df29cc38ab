"""Optimizers do not load the compiler, and train as if they had: plain python and O0 print the same numbers."""

import pytest

HEAD = """
import sys, torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
x = torch.randn(5, 6)
def train(optimizer, net=net):
    optimizer.zero_grad(set_to_none=False)
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item())
def numbers():
    print([parameter.double().sum().item() for parameter in net.parameters()], torch.is_grad_enabled())
"""
OF_TORCH = """
for kind in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adadelta", "ASGD", "Rprop", "Adamax"):
    optimizer = getattr(torch.optim, kind)(net.parameters(), lr=1e-3)
    train(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    train(optimizer)
def closure():
    closing.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    return loss
closing = torch.optim.LBFGS(net.parameters(), max_iter=3)
print(closing.step(closure).item())
"""
DIFFERENTIABLE = """
rate = torch.tensor(0.1, requires_grad=True)
weight = torch.randn(3, requires_grad=True)
moved = weight.clone()
optimizer = torch.optim.SGD([moved], lr=rate, differentiable=True)
moved.grad = torch.ones(3)
optimizer.step()
moved.square().sum().backward()
print(rate.grad.item())
"""
FAILS = """
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
train(optimizer)
net[0].weight.grad = None
net[0].weight.grad = torch.sparse_coo_tensor(torch.tensor([[0], [0]]), torch.ones(1), (8, 6))
try:
    optimizer.step()
except RuntimeError as error:
    print(error)
try:
    optimizer.add_param_group({"params": list(net.parameters())})
except ValueError as error:
    print(error)
"""


def told(shell, text, *options):
    script = shell.script(
        "asks.py", HEAD + text + 'numbers()\nprint("loaded", "torch._dynamo" in sys.modules)\n'
    )
    plain, ours = shell.python(script), shell.mpx("-qq", "-O", "O0", *options, script)
    assert (plain.returncode, ours.returncode) == (0, 0), ours.text
    plain, ours = plain.stdout.decode().splitlines(), ours.stdout.decode().splitlines()
    assert plain[:-1] == ours[:-1]
    return plain[-1], ours[-1]


ASKS = """
import torch.distributed as dist
def has(path):
    found = torch
    try:
        for name in path.split("."):
            found = getattr(found, name)
    except AttributeError as error:
        return str(error)
    return True
asked = (
    "distributed.nn.functional.all_gather", "distributed.fsdp.FullyShardedDataParallel", "utils._sympy.functions",
    "distributed.tensor.DTensor", "utils.tensorboard", "distributed.nothing", "nothing", "optim.nothing",
)
print([has(path) for path in asked])  # not there yet
train(torch.optim.SGD(net.parameters(), lr=0.1))
print([has(path) for path in asked])
"""


@pytest.mark.parametrize("text", [OF_TORCH, DIFFERENTIABLE, FAILS])
def test_optimizers_do_as_they_do_and_do_not_load_the_compiler(shell, text):
    assert told(shell, text) == ("loaded True", "loaded False")


def test_what_comes_with_the_compiler_is_there_for_who_asks(shell):
    plain, ours = told(shell, ASKS)
    assert (plain, ours) == ("loaded True", "loaded True")


COMPILES = """
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
train(optimizer)
compiled = torch.compile(net, backend="eager")
train(optimizer, compiled)
@torch.compile(backend="eager")
def step():
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()
print([step().item() for _ in range(3)])
torch.optim.SGD(net.parameters(), lr=0.1).state_dict()
train(torch.optim.SGD(net.parameters(), lr=0.1), compiled)
"""


def test_a_script_that_compiles_after_its_first_steps_goes_on(shell):
    assert told(shell, COMPILES) == ("loaded True", "loaded True")
