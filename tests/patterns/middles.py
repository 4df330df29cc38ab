"""What a script takes out of the middle of a model: by hooks, by attributes, by gradients of results."""

from __future__ import annotations

import torch
from catalogue import Figures, batch, net, pattern
from torch import Tensor, nn
from torch.nn import functional as F

FAMILY = "Tensors from the middle of a model"


@pattern(FAMILY)
def features_by_hooks() -> Figures:
    """Takes features out by forward hooks and makes losses of them: style transfer, distillation, probes."""
    model, (x, _) = net(), batch()
    features: dict[int, Tensor] = {}
    for index in (0, 3):
        model[index].register_forward_hook(
            lambda module, args, out, index=index: features.update({index: out})
        )
    model(x)
    style = {index: (kept.t() @ kept).detach() for index, kept in features.items()}
    probe, image = torch.randn(32, 4) / 6, torch.randn(64, 8).requires_grad_()
    optimizer, loss = torch.optim.SGD([image], lr=0.5), torch.zeros(())
    for _ in range(10):
        optimizer.zero_grad()
        model(image)
        grams = [F.mse_loss(kept.t() @ kept, style[index]) for index, kept in features.items()]
        loss = torch.stack(grams).sum() / 100 + (features[3] @ probe).square().mean()
        loss.backward()
        optimizer.step()
    spectrum = torch.linalg.svdvals(features[0].detach())
    return {"loss": loss.item(), "largest": spectrum[0].item(), "moved": image.norm().item()}


class Remembers(nn.Module):
    """Leaves what others may want to look at in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_variance, self.decoder = (
            nn.Linear(8, 4),
            nn.Linear(8, 4),
            net(inputs=4, outputs=8),
        )

    def forward(self, x: Tensor) -> Tensor:
        self.mu, self.logvar = self.mean(x), self.log_variance(x)
        self.code = self.mu + torch.randn_like(self.mu) * (0.5 * self.logvar).exp()
        return self.decoder(self.code)


@pattern(FAMILY)
def side_results() -> Figures:
    """Stores activations in attributes of the model, and makes losses, plots and NumPy arrays of them."""
    model, (x, _) = Remembers(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    mix, shown, kl = torch.randn(4, 4), 0.0, torch.zeros(())
    for _ in range(15):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        kl = -0.5 * (1 + model.logvar - model.mu.square() - model.logvar.exp()).sum() / len(x)
        (loss + 0.1 * kl + 0.01 * (model.code @ mix).square().mean()).backward()
        optimizer.step()
        shown += float(model.mu.detach().numpy().std())
    return {"loss": loss.item(), "kl": kl.item(), "shown": shown}


@pattern(FAMILY, float16=0.02)
def gradients_of_results() -> Figures:
    """Differentiates one result of the model with respect to another: path length penalties, Grad-CAM, saliency."""

    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mapping, self.synthesis = net(outputs=16), net(inputs=16, outputs=8)

        def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
            latents = self.mapping(z)
            return self.synthesis(latents), latents

    model, (z, _) = Generator(), batch()
    optimizer, lengths, kept = torch.optim.SGD(model.parameters(), lr=0.02), 0.0, 0.0
    for _ in range(10):
        images, latents = model(z)
        (slope,) = torch.autograd.grad(images.sum(), latents, create_graph=True)
        length = slope.square().sum(1).add(1e-8).sqrt()
        optimizer.zero_grad()
        ((length - 1).square().mean() + images.square().mean()).backward()
        optimizer.step()
        lengths += length.mean().item()
        images, latents = model(z)
        latents.retain_grad()
        images.square().mean().backward()
        kept += latents.grad.norm().item()
    return {"lengths": lengths, "kept": kept}


@pattern(FAMILY, not_at_o3="no: weights are half to the script as well")
def kronecker_factors() -> Figures:
    """Collects inputs and output gradients of layers by hooks, and preconditions with their factors (K-FAC)."""
    model, (x, y) = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), batch()
    inputs: dict[nn.Module, Tensor] = {}
    outputs: dict[nn.Module, Tensor] = {}
    for layer in (model[0], model[2]):
        layer.register_forward_pre_hook(
            lambda m, args: inputs.update({m: args[0].t() @ args[0] / len(args[0])})
        )
        layer.register_full_backward_hook(
            lambda m, ins, outs: outputs.update({m: outs[0].t() @ outs[0] * 64})
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        optimizer.zero_grad()
        F.cross_entropy(model(x.requires_grad_()), y).backward()
        for layer, factor in inputs.items():
            left, right = torch.linalg.eigh(outputs[layer]), torch.linalg.eigh(factor.detach())
            turned = left[1].t() @ layer.weight.grad @ right[1]
            turned /= left[0][:, None] * right[0] + 0.1
            layer.weight.grad = left[1] @ turned @ right[1].t()
        optimizer.step()
    return {
        "loss": F.cross_entropy(model(x), y).item(),
        "traces": sum(f.trace().item() for f in outputs.values()),
    }
