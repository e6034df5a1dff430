"""A model with every kind of value across its cuts: skips over many stages, int, bool, constants, views, two outputs.

Segments are the stem, the blocks and the head; `skip`, `ids`, `is_kept` and `scale` cross every cut between the first
and the last.
"""

import torch
from torch import nn
from torch.nn import functional as F

N_IDS = 5


class Block(nn.Module):
    """Two inputs, two outputs; the first is a transposed view, and so is its gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.gate = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.linear(x.transpose(1, 2))
        return (h + torch.tanh(h)).transpose(1, 2), total + self.gate(h).squeeze(-1)


class Crossing(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.middle = nn.Linear(width, width)
        self.names = nn.Embedding(N_IDS, width)
        self.head = nn.Linear(width, 4)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        skip = self.stem(features)
        ids = features[..., :N_IDS].argmax(dim=-1)
        is_kept = features[..., 0] > -1.0
        scale = features[..., 1:2].abs()
        x, total = skip.transpose(1, 2), skip.sum(dim=-1)
        for number, block in enumerate(self.blocks):
            x, total = block(x, total)
            if number == 1:
                x = x + self.middle(skip).transpose(1, 2)
        y = x.transpose(1, 2) * scale + skip + self.names(ids)
        y = torch.where(is_kept.unsqueeze(-1), y, 0.0) + total.unsqueeze(-1)
        return self.head(y).mean(dim=1)


def build_model(width: int = 16, depth: int = 6) -> nn.Module:
    return Crossing(width, depth)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, 6, 8), torch.randint(4, (batch_size,))


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets)
