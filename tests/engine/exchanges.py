"""Training loops in which optimizers, parameters and gradients change hands between a pass and a step."""

from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import nn

from tests.engine.loops import batches, small_model


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01, fused=True)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, fused=True)


def large(model, x, y):
    return 1000 * F.mse_loss(model(x), y)


def two_models():
    return nn.ModuleList([small_model(), small_model()])


def inputs_of_the_other_player():
    model = two_models()
    yield model
    players = [adam(part.parameters()) for part in model]
    for x, y in batches(30):
        model.zero_grad()
        large(model[0], x, y).backward()
        F.mse_loss(model[1](x), y).backward(inputs=list(model[1].parameters()))
        for player in players:
            player.step()


def inputs_of_a_part():
    model = small_model()
    yield model
    own = adam(model.parameters())
    for x, y in batches(30):
        own.zero_grad()
        large(model, x, y).backward(inputs=list(model[0].parameters()))
        F.mse_loss(model(x), y).backward(inputs=list(model[2].parameters()))
        own.step()


def optimizer_made_anew_after_the_pass():
    model = small_model()
    yield model
    own = sgd(model.parameters())
    for x, y in batches(30):
        model.zero_grad()
        large(model, x, y).backward()
        own = sgd(model.parameters())
        own.step()


def parameters_that_change_hands():
    model = small_model()
    yield model
    first, second = sgd(model[0].parameters()), sgd(model[2].parameters())
    one, other = first.param_groups[0], second.param_groups[0]
    for x, y in batches(30):
        model.zero_grad()
        large(model, x, y).backward()
        one["params"], other["params"] = other["params"], one["params"]
        first.step()
        second.step()


def gradients_copied_to_another_model():
    model = two_models()
    yield model
    players = [adam(part.parameters()) for part in model]
    for x, y in batches(30):
        model.zero_grad()
        large(model[0], x, y).backward()
        for parameter, other in zip(*(part.parameters() for part in model), strict=True):
            other.grad = parameter.grad.clone()
        for player in players:
            player.step()


def gradients_exchanged():
    model = two_models()
    yield model
    players = [adam(part.parameters()) for part in model]
    for x, y in batches(30):
        model.zero_grad()
        large(model[0], x, y).backward()
        F.mse_loss(model[1](x), y).backward()
        for parameter, other in zip(*(part.parameters() for part in model), strict=True):
            parameter.grad, other.grad = other.grad, parameter.grad
        for player in players:
            player.step()


def gradients_of_the_script():
    model = small_model()
    yield model
    own = sgd(model.parameters())
    for x, y in batches(30):
        own.zero_grad()
        large(model, x, y).backward()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1)
        own.step()


def layers_in_turns():
    model = small_model()
    yield model
    own = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    for number, (x, y) in enumerate(batches(30)):
        for place in (0, 2):
            model[place].requires_grad_((number // 15 == 0) is (place == 0))
        own.zero_grad()
        loss = F.mse_loss(model(x), y)
        (loss * 2.0**20 if number == 15 else loss).backward()
        own.step()


def failing_after_a_clip():
    model = small_model()
    yield model
    own = sgd(model.parameters())
    for x, y in batches(30):
        own.zero_grad()
        large(model, x, y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        output = model(x)
        output.register_hook(lambda grad: 1 / 0)
        with suppress(ZeroDivisionError):
            F.mse_loss(output, y).backward()
        own.step()


def clipped_between_passes():
    """Infinities, without a NaN: clipping makes them finite before the next pass looks."""
    model = small_model()
    yield model
    own = sgd(model.parameters())
    for x, _ in batches(30):
        own.zero_grad()
        model(x.abs()).sum().backward()
        for _ in range(2):
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            (model(x).sum() * 2.0**-20).backward()
        own.step()


EXCHANGES = {
    "inputs of the other player": inputs_of_the_other_player,
    "inputs of a part": inputs_of_a_part,
    "optimizer made anew": optimizer_made_anew_after_the_pass,
    "parameters change hands": parameters_that_change_hands,
    "gradients copied": gradients_copied_to_another_model,
    "gradients exchanged": gradients_exchanged,
    "gradients of the script": gradients_of_the_script,
    "layers in turns": layers_in_turns,
    "clipped between passes": clipped_between_passes,
    "failing after a clip": failing_after_a_clip,
}
