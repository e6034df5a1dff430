"""Blocks that are Sequentials, whose modules have numbers for names; one gives what another gives, of wider inputs."""

import torch
from torch import nn


def block(n_in: int, n_out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(n_in, n_out), nn.LayerNorm(n_out), nn.ReLU(), nn.Linear(n_out, n_out))


class Skips(nn.Module):
    """A U-Net of linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = block(8, width)
        self.down = nn.ModuleList([block(width, 2 * width), block(2 * width, 4 * width)])
        self.up = nn.ModuleList([block(6 * width, 2 * width), block(3 * width, width)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = [self.stem(x)]
        for down in self.down:
            skips.append(down(skips[-1]))
        x = skips.pop()
        for up in self.up:
            x = up(torch.cat([x, skips.pop()], dim=-1))
        return self.head(x)


def build_model(width: int = 8) -> nn.Module:
    return Skips(width)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, 8), torch.rand(batch_size, 1)


loss_fn = nn.BCEWithLogitsLoss()
