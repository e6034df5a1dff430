"""Blocks that write into their inputs and return views that are written: as users write them, one of each kind."""

import torch
from torch import nn
from torch.nn import functional as F


class AddsToInput(nn.Module):
    """What it adds stays in the caller's tensor; `before` reads the input as it was."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.before = nn.Linear(width, width), nn.Linear(width, width)
        self.position = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        before = self.before(1.5 * x)
        x += self.position
        return x + torch.tanh(self.linear(x)) + scale + before


class PreActivation(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(width, width))

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        scale *= 1.1
        return x + self.body(x) * scale


class ReturnsView(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x.flatten(0, 1)))).view(x.shape)


class Written(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.head, self.scale = nn.Linear(5, width), nn.Linear(width, 2), nn.Linear(5, width)
        kinds = (PreActivation, AddsToInput, ReturnsView, AddsToInput)
        self.blocks = nn.ModuleList(kind(width) for kind in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, scale = self.stem(x), 1.5 * self.scale(x)
        for block in self.blocks:
            y = block(h, scale=scale)
            y += torch.tanh(h)  # of what the block wrote
            y[:, 0] *= 1.1
            h = y
        return self.head(h * scale)


def build_model(width: int = 8) -> nn.Module:
    return Written(width)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, 3, 5), torch.randn(batch_size, 3, 2)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, targets)
