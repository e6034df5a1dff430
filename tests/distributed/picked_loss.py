"""A model that computes its loss and returns it among other things; `loss_fn` only picks it."""

import torch
from torch import nn
from torch.nn import functional as F


class Picked(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = features
        for block in self.blocks:
            x = x + F.relu(block(x))
        logits = self.head(x)
        return {"logits": logits, "loss": F.cross_entropy(logits, labels), "hidden": x}


def build_model(width: int = 8, depth: int = 4) -> nn.Module:
    return Picked(width, depth)


def make_batch(batch_size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    labels = torch.randint(4, (batch_size,))
    return {"features": torch.randn(batch_size, 8), "labels": labels}, labels


def loss_fn(outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    return outputs["loss"]
