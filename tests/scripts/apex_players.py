"""Two players in the manner of apex's DCGAN example: two models, two optimizers, three losses. Prints every loss."""

import argparse

import torch
from torch import nn

try:
    from apex import amp
except ImportError:
    amp = None

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default=None)
opt = parser.parse_args()

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
criterion = nn.BCEWithLogitsLoss()
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
if opt.opt_level:
    [discriminator, generator], [optimizer_d, optimizer_g] = amp.initialize(
        [discriminator, generator], [optimizer_d, optimizer_g], opt_level=opt.opt_level, num_losses=3
    )

for i in range(5):
    discriminator.zero_grad()
    loss_real = criterion(discriminator(torch.randn(8, 8)), torch.ones(8, 1))
    if opt.opt_level:
        with amp.scale_loss(loss_real, optimizer_d, loss_id=0) as scaled_loss:
            scaled_loss.backward()
    else:
        loss_real.backward()
    fake = generator(torch.randn(8, 4))
    loss_fake = criterion(discriminator(fake.detach()), torch.zeros(8, 1))
    if opt.opt_level:
        with amp.scale_loss(loss_fake, optimizer_d, loss_id=1) as scaled_loss:
            scaled_loss.backward()
    else:
        loss_fake.backward()
    optimizer_d.step()

    generator.zero_grad()
    loss_g = criterion(discriminator(fake), torch.ones(8, 1))
    if opt.opt_level:
        with amp.scale_loss(loss_g, optimizer_g, loss_id=2) as scaled_loss:
            scaled_loss.backward()
    else:
        loss_g.backward()
    optimizer_g.step()
    print(f"players {i} {loss_real.item()!r} {loss_fake.item()!r} {loss_g.item()!r}")
if opt.opt_level:
    assert list(amp.state_dict()) == ["loss_scaler0", "loss_scaler1", "loss_scaler2"]
