"""Two blocks that are called in turns, several times."""

import torch
from torch import nn

N_FEATURES = 8
N_TURNS = 3


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Turns(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(N_FEATURES, width)
        self.blocks = nn.ModuleList([Block(width, 4 * width), Block(width, 2 * width)])
        self.head = nn.Linear(width, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x = self.stem(features)
        for _ in range(N_TURNS):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


def build_model(width: int = 16) -> nn.Module:
    return Turns(width)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, N_FEATURES), torch.randn(batch_size, 2)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()
