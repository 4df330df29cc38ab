"""Passes that are out of the ordinary: half losses, errors, overflows in `torch.autograd.grad`, anomaly detection."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

LEVELS = ("O1", "O2")


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 8, generator=generator), torch.randint(4, (6,), generator=generator)


def loss_of(model):
    x, y = batch()
    return F.cross_entropy(model(x), y)


class WithLoss(nn.Module):
    """Computes its loss inside the region, from half activations, as many language models do."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        return (self.net(x) * 2**-4).abs().mean()  # an average of half numbers is half


def half_loss():
    weight = torch.full((4,), 0.5, dtype=torch.float16, requires_grad=True)
    return weight, weight.sum() * 2**-4


def test_a_half_loss_gets_a_scale_that_its_type_holds(at_level, level):
    """Its seed is FP16, where 2^16 is infinite: without a ceiling the first step would always be lost."""
    with at_level(level, "loss_scale.growth_interval=1") as recorded:
        for _ in range(3):
            weight, loss = half_loss()
            loss.backward()
            assert weight.grad.tolist() == [2**-4] * 4
        (scaler,) = recorded.summary["scalers"]
    assert (scaler["max"], scaler["overflows"]) == (2.0**15, 0)


def test_so_does_a_loss_that_a_model_computes_in_half(at_level, level):
    with at_level(level, "loss_scale.growth_interval=1") as recorded:
        model = WithLoss()
        for _ in range(3):
            loss = model(batch()[0])
            assert loss.dtype == torch.float32
            loss.backward()
        (scaler,) = recorded.summary["scalers"]
    assert (scaler["max"], scaler["overflows"]) == (2.0**15, 0)


def test_a_half_loss_that_overflows_at_the_ceiling_lowers_it_at_once(at_level, level):
    with at_level(level, "loss_scale.init=2**24") as recorded:
        _, loss = half_loss()
        (loss * 2**6).backward()
        (scaler,) = recorded.summary["scalers"]
    assert scaler["final"] == 2.0**14


def test_a_pass_that_raises_leaves_true_gradients(at_level, level):
    """And they are guarded: what it has filled may have overflowed."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError

    def train(model):
        loss_of(model).backward()
        x, y = batch()
        with pytest.raises(ZeroDivisionError):
            F.cross_entropy(model[2](Broken.apply(model[1](model[0](x)))), y).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = train(network())
    with at_level(level, "loss_scale=1024"):
        model = network()
        for ours, true in zip(train(model), plain, strict=True):
            assert torch.allclose(ours, true, rtol=2**-6, atol=2**-8)
        model[2].weight.register_hook(lambda grad: grad * torch.inf)
        train(model)
        before = model[2].weight.detach().clone()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert torch.equal(model[2].weight, before)


def backward_of_hooked():
    leaf = torch.ones((), requires_grad=True)
    leaf.register_post_accumulate_grad_hook(lambda _: 1)
    leaf.exp().backward()


WRONG = {
    "a loss that is no number": lambda: torch.ones(2, requires_grad=True).exp().backward(),
    "a loss without a graph": lambda: torch.ones(()).backward(),
    "a complex loss": lambda: torch.ones((), dtype=torch.complex64, requires_grad=True).exp().backward(),
    "no loss": lambda: torch.autograd.grad([], [torch.ones((), requires_grad=True)]),
    "a graph that is gone": lambda: [
        loss.backward() for loss in [torch.ones((), requires_grad=True).exp()] * 2
    ],
    "a hook that returns": backward_of_hooked,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_mistake_of_the_script_gets_torchs_own_message(at_level, level, wrong):
    with pytest.raises((RuntimeError, IndexError, TypeError)) as plain:
        WRONG[wrong]()
    with at_level(level), pytest.raises(type(plain.value)) as ours:
        WRONG[wrong]()
    assert str(ours.value) == str(plain.value)


def test_edges_of_the_graph_are_differentiated_as_ever(at_level, level):
    with at_level(level):
        x = torch.ones(3, requires_grad=True)
        y = (x * 2).sum()
        edge = torch.autograd.graph.get_gradient_edge(x)
        (slope,) = torch.autograd.grad(y, [edge], retain_graph=True)
        y.backward(inputs=[edge], retain_graph=True)
        assert x.grad.tolist() == slope.tolist() == [2.0] * 3
        torch.autograd.backward(torch.autograd.graph.get_gradient_edge(y), torch.ones(()))
        assert x.grad.tolist() == [4.0] * 3


def test_autograd_grad_that_overflows_is_computed_again_at_a_lower_scale(at_level, level):
    """It has no step that could be skipped; the scale is found once."""
    with at_level(level, "loss_scale.init=2**24", "loss_scale.growth_interval=3") as recorded:
        model = network()
        for _ in range(5):
            found = torch.autograd.grad(loss_of(model), list(model.parameters()))
            assert all(bool(torch.isfinite(grad).all()) for grad in found)
        (scaler,) = recorded.summary["scalers"]
    assert scaler["overflows"] == scaler["backoffs"] > 0
    assert scaler["growths"] == 1  # it recovers as any other


@pytest.mark.parametrize(
    "settings", [("loss_scale=1024",), ("loss_scale.min=2**16",)], ids=["static", "floor"]
)
def test_autograd_grad_returns_what_no_scale_can_help(at_level, level, settings):
    with at_level(level, *settings):
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda grad: grad * torch.inf)
        (found,) = torch.autograd.grad(x.sum(), x)
        assert found.isinf().all()


def test_an_infinite_value_is_differentiated_once_and_moves_no_scale(at_level, level):
    with at_level(level) as recorded:
        x = torch.zeros(2, requires_grad=True)
        (found,) = torch.autograd.grad((1 / x).sum(), x)
        assert found.isinf().all()
        (scaler,) = recorded.summary["scalers"]
    assert (scaler["final"], scaler["overflows"]) == (2.0**16, 0)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_anomaly_detection_does_not_end_a_run_for_an_overflow_of_ours(at_level, level):
    with at_level(level, "loss_scale.init=2**24") as recorded, torch.autograd.detect_anomaly():
        model = network()
        loss_of(model).backward()
        torch.autograd.grad(loss_of(model), list(model.parameters()))
        assert all(bool(torch.isfinite(parameter.grad).all()) for parameter in model.parameters())
        assert recorded.substituted("anomaly")


def test_models_that_train_in_threads_of_their_own_leave_no_scale_behind(at_level):
    with at_level("O1", "loss_scale=1024"):
        seen = []

        def train():
            model = network()
            for _ in range(5):
                loss_of(model).backward()

        threads = [threading.Thread(target=train) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        x = torch.ones(2, requires_grad=True)
        x.register_hook(seen.append)
        x.sum().backward()
        assert [grad.tolist() for grad in seen] == [[1.0, 1.0]]


def test_a_gradient_that_is_a_conjugate_is_added_to(at_level):
    """torch keeps a conjugate as a view with a mark, whose parts it does not show as real numbers."""
    with at_level("O1", "loss_scale=1024"):
        z = torch.ones(2, dtype=torch.complex64, requires_grad=True)
        z.grad = torch.full((2,), 1 + 2j).conj()
        (3 * z.real).sum().backward()
        assert z.grad.tolist() == [4 - 2j, 4 - 2j]
