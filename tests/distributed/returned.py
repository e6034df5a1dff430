"""A model that returns more than its loss reads: an early head, what a block made, its input and a weight."""

import torch
from torch import nn
from torch.nn import functional as F


class Returned(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(depth)
        )
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Linear(width, 8)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        given, made = x, []
        for block in self.blocks:
            x = x + block(x)
            made.append(x)
        early, late = self.heads[0](made[0]), self.heads[1](x)
        return {"late": late.tanh(), "early": early, "made": made[0], "given": given, "scale": self.scale}


def build_model(width: int = 16, depth: int = 4) -> nn.Module:
    return Returned(width, depth)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, 6, 16), torch.randn(batch_size, 6, 8)


def loss_fn(outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs["late"], targets)
