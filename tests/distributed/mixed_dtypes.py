"""A model that casts the sum of a parameter and a float32 tensor to float32, which no operator of a trace shows."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.bias = nn.Parameter(torch.zeros(2 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).float()
        h *= 0.5  # in place, so that the graph is made functional, which drops casts that do nothing
        weights = (h + self.bias).float()
        mixed = weights @ h.transpose(1, 2) @ weights
        return x + self.down(mixed.to(x.dtype).tanh())


def build_model(width: int = 8, depth: int = 2) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(depth)), nn.Linear(width, 4))


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, 6, 8), torch.randint(4, (batch_size, 6))


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
