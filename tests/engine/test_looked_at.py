"""Where gradients are only looked at (BF16: no scale, no skip), each overflow is told, and of the pass that made it."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS = 5  # a module is surveyed in its first calls; what is shown here is found later as well
BAD = 4


class Switch(torch.autograd.Function):
    """Passes its input on, and an infinite gradient back while it is on."""

    on = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.inf if Switch.on else grad


class Encoder(nn.Module):
    """Its gradients overflow when the switch is on; those of what comes after it do not."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        return Switch.apply(self.first(x))


class Conditioned(nn.Module):
    """Adds what somebody has put into an attribute."""

    condition = None

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        return self.last(x) + self.condition


class Stays(nn.Module):
    """Returns what it was given, and owns a parameter."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        return x


class Attribute(Stays):
    """Returns what is in an attribute."""

    found = None

    def forward(self, x):
        return self.found


class Hidden(nn.Module):
    """Holds a module where none is registered."""

    def __init__(self, inner):
        super().__init__()
        self.inner = [inner]
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.inner[0](x))


def after_another(encoder):
    decoder = nn.Linear(4, 4)
    return lambda x: decoder(encoder(x))


def after_two_more(encoder):
    middle, decoder = nn.Linear(4, 4), nn.Linear(4, 4)
    return lambda x: decoder(middle(encoder(x)).relu())


def beside_a_plain_input(encoder):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(4, 4)

        def forward(self, x, *, memory):
            return self.last(x + memory["hidden"])

    decoder = Two()
    return lambda x: decoder(x, memory={"hidden": encoder(x)})


def in_an_attribute(encoder):
    decoder = Conditioned()

    def forward(x):
        decoder.condition = encoder(x)
        return decoder(x)

    return forward


def in_an_attribute_later_on(encoder):
    """When nobody surveys the decoder any more; and of the encoder's parameters one has no part in it."""
    decoder = Conditioned()
    encoder.unused = nn.Linear(4, 4)
    calls = []

    def forward(x):
        calls.append(encoder(x))
        decoder.condition = calls[-1] if len(calls) > 2 else 0.0
        return decoder(x) + (calls[-1] if len(calls) <= 2 else 0.0)

    return forward


def by_a_wrapper_that_is_gone(encoder):
    middle, decoder = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(x):
        wrapped = nn.Sequential(encoder, middle)
        return decoder(wrapped(x))

    return forward


def replaced_before_the_pass(encoder):
    model = nn.Sequential(encoder, nn.Linear(4, 4))

    def forward(x):
        model[0] = encoder
        output = model(x)
        model[0] = nn.Identity()
        return output

    return forward


def by_a_hook(encoder):
    decoder = nn.Linear(4, 4)

    def forward(x):
        hidden = encoder(x)
        cut = hidden.detach().requires_grad_()
        cut.register_hook(hidden.backward)
        return decoder(cut)

    return forward


def with_parameters_of_its_own(encoder):
    """What trains is not in the model."""
    own = dict(encoder.named_parameters())
    model = Encoder()
    return lambda x: torch.func.functional_call(model, own, (x,))


def in_a_list_later_on(encoder):
    experts, calls = [Encoder(), Encoder(), Encoder(), encoder], []

    def forward(x):
        calls.append(len(calls))
        model.inner[0] = experts[min(len(calls), len(experts)) - 1]
        return model(x) + (0.0 if model.inner[0] is encoder else encoder(x))

    model = Hidden(None)
    return forward


def handed_on(encoder):
    stays = Stays()
    return lambda x: stays(encoder(x))


def found_in_an_attribute(encoder):
    finds = Attribute()

    def forward(x):
        finds.found = encoder(x)
        return finds(x)

    return forward


def in_a_list(encoder):
    return Hidden(encoder)


def in_a_checkpoint(encoder):
    decoder = nn.Linear(4, 4)
    return lambda x: decoder(checkpoint(encoder, x.clone().requires_grad_(), use_reentrant=True))


def in_a_checkpoint_of_the_other_kind(encoder):
    decoder = nn.Linear(4, 4)
    return lambda x: decoder(checkpoint(encoder, x, use_reentrant=False))


def all_in_a_checkpoint(encoder):
    decoder = nn.Linear(4, 4)
    return lambda x: checkpoint(lambda x: decoder(encoder(x)), x.clone().requires_grad_(), use_reentrant=True)


def without_a_call(encoder):
    decoder = nn.Linear(4, 4)
    return lambda x: decoder(Switch.apply(x @ encoder.first.weight.T + encoder.first.bias))


def by_another_method(encoder):
    decoder = nn.Linear(4, 4)
    return lambda x: decoder(Switch.apply(encoder.first(x)))


WAYS = [
    after_another,
    after_two_more,
    beside_a_plain_input,
    in_an_attribute,
    in_an_attribute_later_on,
    by_a_wrapper_that_is_gone,
    replaced_before_the_pass,
    with_parameters_of_its_own,
    in_a_list_later_on,
    by_a_hook,
    handed_on,
    found_in_an_attribute,
    in_a_list,
    in_a_checkpoint,
    in_a_checkpoint_of_the_other_kind,
    all_in_a_checkpoint,
    without_a_call,
    by_another_method,
]


@pytest.fixture(autouse=True)
def off(monkeypatch):
    monkeypatch.setattr(Switch, "on", False)


@pytest.mark.parametrize("level", ["O1-bf16", "O2-bf16"])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_told_however_the_model_was_reached(at_level, monkeypatch, level, way):
    torch.manual_seed(0)
    encoder = Encoder()
    x = torch.randn(3, 4)
    with at_level(level) as recorded:
        optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
        forward = way(encoder)
        other = nn.Linear(4, 4)
        for step in range(1, STEPS + 1):
            other(x).sum().backward()  # a pass of its own
            optimizer.zero_grad()
            monkeypatch.setattr(Switch, "on", step == BAD)
            forward(x).sum().backward()
            assert encoder.first.weight.grad.isfinite().all() == (step != BAD)
        (event,) = recorded.of("overflow")
        assert event["kind"] == "backward_inf"
        assert event["backward"] == 2 * BAD
        assert recorded.summary["backwards"] == 2 * STEPS


@pytest.mark.parametrize("level", ["O1-bf16", "O2-bf16"])
def test_a_clean_pass_is_not_blamed_for_what_a_failed_one_left(at_level, monkeypatch, level):
    """It adds to infinities, in the same window."""

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("out of memory")

    torch.manual_seed(0)
    first, encoder, x = nn.Linear(4, 4), Encoder(), torch.randn(3, 4)
    with at_level(level) as recorded:
        monkeypatch.setattr(Switch, "on", True)
        with pytest.raises(RuntimeError, match="out of memory"):
            encoder(Raises.apply(first(x))).sum().backward()
        assert not encoder.first.weight.grad.isfinite().all()
        monkeypatch.setattr(Switch, "on", False)
        encoder(x).sum().backward()
        assert not recorded.of("overflow")
        assert recorded.summary["backwards"] == 1


def test_a_loss_of_a_subclass_is_recorded(at_level):
    class Loss(torch.Tensor):
        pass

    model = nn.Linear(4, 1)
    with at_level("O1-bf16") as recorded:
        for _ in range(STEPS):
            model(torch.ones(1, 4)).sum().as_subclass(Loss).backward()
        ((curve,),) = (recorded.summary["losses"],)
        assert curve["backward"] == list(range(1, STEPS + 1))
        assert curve["value"] == pytest.approx([model(torch.ones(1, 4)).item()] * STEPS, rel=0.01)
