"""Call a trained-looking model in the three ways of inference, and save what it answers."""

import sys

import torch
from torch import nn

torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.attend = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        features = self.image(x).flatten(2)  # (B, 8, 16)
        return {"logits": self.head(self.attend(features)), "features": features}


model = Model()
for _ in range(3):
    with torch.no_grad():
        model(torch.randn(16, 1, 8, 8))  # running statistics that are not the initial ones
model.eval()
x = torch.randn(4, 1, 8, 8)
answers = {"eval": model(x)}
with torch.no_grad():
    answers["no_grad"] = model(x)
with torch.inference_mode():
    answers["inference_mode"] = model(x)
detached = {
    how: {name: value.detach().clone() for name, value in answer.items()} for how, answer in answers.items()
}
torch.save(detached, sys.argv[1])
print("state", *sorted({str(value.dtype) for value in model.state_dict().values()}))
print("grad", answers["eval"]["logits"].requires_grad, answers["no_grad"]["logits"].requires_grad)
print("inference", answers["inference_mode"]["logits"].is_inference())
