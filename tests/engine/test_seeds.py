"""Passes without seeds of the script's go straight to torch's engine; all others by `torch.autograd.backward`."""

import logging

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

LEVELS = ["O0", "O1", "O2", "O1-bf16"]


def weight():
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(5, 3))


def alone(parameter):
    (parameter * parameter).sum().backward()


def of_one_element(parameter):
    (parameter * parameter).sum().reshape(1, 1).backward()


def twice_through_one_graph(parameter):
    loss = (parameter * parameter).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def two_roots(parameter):
    torch.autograd.backward([(parameter * parameter).sum(), parameter.sin().mean()])


def of_a_gradient(parameter):
    loss = (parameter**3).sum()
    loss.backward(create_graph=True)
    grad, parameter.grad = parameter.grad, None
    grad.square().sum().backward()


def in_double_precision(parameter):
    (parameter.double() ** 2).sum().backward()


WAYS = [alone, of_one_element, twice_through_one_graph, two_roots, of_a_gradient, in_double_precision]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_those_of_plain_python(way, level, at_level, monkeypatch):
    """To the bit: nothing here is computed in half, and a scale is a power of two."""
    plain = weight()
    way(plain)
    with at_level(level), monkeypatch.context() as patch:
        patch.setattr(
            torch.autograd, "_make_grads", lambda *_, **__: pytest.fail("torch looked at the seeds")
        )
        found = weight()
        way(found)
    assert torch.equal(found.grad, plain.grad)


def roots_of_an_iterator(parameter):
    torch.autograd.backward(iter([(parameter * 2).sum(), (parameter * 3).sum()]))


def seeds_of_an_iterator(parameter):
    torch.autograd.backward(iter([parameter * 2]), iter([torch.full((5, 3), 0.5)]))


def inputs_of_an_iterator(parameter):
    (parameter * 2).sum().backward(inputs=iter([parameter]))


def inputs_by_name(parameter):
    (parameter * 2).sum().backward(inputs={"weight": parameter})


def in_a_hook(parameter):
    other = torch.ones(5, 3, requires_grad=True)
    other.register_hook(lambda _: torch.autograd.backward(iter([parameter]), iter([torch.ones(5, 3)])))
    other.sum().backward()


def as_results(parameter):
    (parameter.grad,) = torch.autograd.grad(
        iter([parameter * 2]), iter([parameter]), iter([torch.ones(5, 3)])
    )


ITERATORS = [
    roots_of_an_iterator,
    seeds_of_an_iterator,
    inputs_of_an_iterator,
    inputs_by_name,
    in_a_hook,
    as_results,
]


@pytest.mark.parametrize("way", ITERATORS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("level", LEVELS)
def test_what_can_be_iterated_once_is(way, level, at_level):
    def gradient():
        parameter = weight()
        try:
            way(parameter)
        except (RuntimeError, TypeError, AttributeError) as error:  # an older torch takes no dict
            return type(error)
        return parameter.grad.tolist()

    plain = gradient()
    with at_level(level):
        assert gradient() == plain


@pytest.mark.parametrize("level", LEVELS)
def test_two_parameters_may_share_one_gradient(level, at_level):
    with at_level(level):
        parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        parameters[0].grad = parameters[1].grad = torch.zeros(3)
        for passes in (1, 2):
            (parameters[0].sum() + 2 * parameters[1].sum()).backward()
            assert parameters[0].grad is parameters[1].grad
            assert torch.equal(parameters[0].grad, torch.full((3,), 3.0 * passes))


def given(parameter):
    (parameter * 2).backward(torch.ones(5, 3))


def of_some(parameter):
    (parameter * 2).sum().backward(inputs=[parameter])


@pytest.mark.parametrize("way", [given, of_some], ids=lambda way: way.__name__)
def test_what_the_script_gives_torch_looks_at(way, at_level, monkeypatch):
    seen = []
    looks = torch.autograd._make_grads
    monkeypatch.setattr(
        torch.autograd, "_make_grads", lambda *args, **named: seen.append(1) or looks(*args, **named)
    )
    with at_level("O1"):
        parameter = weight()
        way(parameter)
    assert seen
    assert torch.equal(parameter.grad, torch.full((5, 3), 2.0))


@pytest.mark.parametrize("level", LEVELS)
def test_a_pass_is_traced_as_torch_traces_it(level, at_level):
    def traced():
        parameter = nn.Parameter(torch.ones(3))

        def gradient(x):
            (parameter * x).sum().backward()
            return parameter.grad

        graph = make_fx(gradient)(torch.ones(3))
        parameter.grad = None
        return graph(torch.full((3,), 2.0)), graph.code

    plain = traced()
    with at_level(level):
        found = traced()
    assert torch.equal(found[0], plain[0])
    assert found[1] == plain[1]


class Deaf(torch.Tensor):
    """Refuses to be differentiated."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.autograd.backward or getattr(func, "__name__", "") == "backward":
            return None
        return super().__torch_function__(func, types, args, kwargs or {})


class Watching(torch.overrides.TorchFunctionMode):
    """Notes the names of functions that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("level", LEVELS)
def test_who_overrides_functions_of_torch_is_asked(level, at_level):
    def calls():
        parameter = weight()
        with Watching() as watching:
            torch.autograd.backward([parameter.square().sum()])
        deaf = nn.Parameter(torch.ones(3))
        torch.autograd.backward([(deaf * 2).sum().as_subclass(Deaf)])
        return [name for name in watching.names if name == "backward"], deaf.grad is None

    plain = calls()
    with at_level(level):
        assert calls() == plain


def a_second_time():
    loss = weight().square().sum()
    loss.backward()
    loss.backward()


def without_a_graph():
    torch.ones(()).backward()


def of_many_numbers():
    weight().square().backward()


def of_an_integer():
    torch.ones((), dtype=torch.int64).backward()


def of_none():
    torch.autograd.backward([])


@pytest.mark.parametrize(
    "mistake",
    [a_second_time, without_a_graph, of_many_numbers, of_an_integer, of_none],
    ids=lambda one: one.__name__,
)
def test_mistakes_are_refused_as_by_torch(mistake, at_level):
    def told():
        try:
            mistake()
        except RuntimeError as error:
            return str(error)
        return None

    plain = told()
    with at_level("O1"):
        assert told() == plain


def test_torchs_log_of_the_engine_is_written(at_level, caplog):
    with at_level("O1"), caplog.at_level(logging.DEBUG, logger="torch.autograd.graph"):
        weight().square().sum().backward()
    assert any("Executing" in record.getMessage() for record in caplog.records)


def test_a_backward_that_another_tool_has_replaced_before_is_called(at_level, monkeypatch):
    seen = []
    original = torch.autograd.backward
    monkeypatch.setattr(
        torch.autograd, "backward", lambda *args, **named: seen.append(1) or original(*args, **named)
    )
    with at_level("O1"):
        weight().square().sum().backward()
    assert len(seen) == 1
