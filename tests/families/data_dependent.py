"""Control flow that depends on data: a block is skipped, one of two experts runs, and a loop ends by its own values."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, N_CLASSES = 16, 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class EarlyExit(nn.Module):
    """Easy batches leave early; odd ones take the other expert; small values are doubled until they are large."""

    def __init__(self, n_layers: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(n_layers)])
        self.even, self.odd = nn.Linear(width, width), nn.Linear(width, width)
        self.never = nn.Linear(width, width)
        self.head = nn.Linear(width, N_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            if x.mean() > 0.02:
                break
        if not torch.isfinite(x).all():
            x = self.never(x)
        x = self.even(x) if int(x.sum() * 100) % 2 == 0 else self.odd(x)
        while x.abs().mean() < 0.5:
            x = 2.0 * x
        return self.head(x)


def build_model(n_layers: int = 4, width: int = 32) -> nn.Module:
    return EarlyExit(n_layers, width)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, WIDTH), torch.randint(N_CLASSES, (batch_size,))


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets)
