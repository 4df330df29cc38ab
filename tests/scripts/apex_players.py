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
netG = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
netD = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
if opt.opt_level:
    [netD, netG], [optimizerD, optimizerG] = amp.initialize(
        [netD, netG], [optimizerD, optimizerG], opt_level=opt.opt_level, num_losses=3
    )

for i in range(5):
    netD.zero_grad()
    errD_real = criterion(netD(torch.randn(8, 8)), torch.ones(8, 1))
    if opt.opt_level:
        with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
            errD_real_scaled.backward()
    else:
        errD_real.backward()
    fake = netG(torch.randn(8, 4))
    errD_fake = criterion(netD(fake.detach()), torch.zeros(8, 1))
    if opt.opt_level:
        with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
            errD_fake_scaled.backward()
    else:
        errD_fake.backward()
    optimizerD.step()

    netG.zero_grad()
    errG = criterion(netD(fake), torch.ones(8, 1))
    if opt.opt_level:
        with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
            errG_scaled.backward()
    else:
        errG.backward()
    optimizerG.step()
    print(f"players {i} {errD_real.item()!r} {errD_fake.item()!r} {errG.item()!r}")
if opt.opt_level:
    assert list(amp.state_dict()) == ["loss_scaler0", "loss_scaler1", "loss_scaler2"]
