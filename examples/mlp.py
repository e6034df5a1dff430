"""A residual MLP on synthetic regression data: the smallest model worth planning.

autoplan plan examples/mlp.py --hw dgx_a100_x8 --set width=4096
"""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """x + down(gelu(up(norm(x))))."""

    def __init__(self, width: int, expansion: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, expansion * width)
        self.down = nn.Linear(expansion * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MLP(nn.Module):
    """A stem, `depth` equal blocks, and a head."""

    def __init__(self, *, n_features: int, width: int, depth: int, expansion: int) -> None:
        super().__init__()
        self.stem = nn.Linear(n_features, width)
        self.blocks = nn.ModuleList(Block(width, expansion) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model(width: int = 256, depth: int = 8, expansion: int = 4) -> nn.Module:
    return MLP(n_features=N_FEATURES, width=width, depth=depth, expansion=expansion)


N_FEATURES = 64


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(batch_size, N_FEATURES)
    return x, x.square().mean(dim=1, keepdim=True).sqrt()


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, targets)
