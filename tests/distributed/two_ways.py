"""Layers that run in two ways, and lists of numbered layers of which the second reads weights of the first."""

import torch
from torch import nn


class Layer(nn.Module):
    """x + tanh(linear(x)), as it is or halved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * scale


class TwoWays(nn.Module):
    """Each input goes through the same layers in its own way, then through lists that share matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.first, self.second = (
            nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2)) for _ in range(2)
        )
        for first, second in zip(self.first, self.second, strict=True):
            second[0].weight = first[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = b = x
        for layer in self.layers:
            a = layer(a, 1.0)
        for layer in self.layers:
            b = layer(b, 0.5)
        for first, second in zip(self.first, self.second, strict=True):
            a, b = first(a), second(b)
        return a + b


def build_model(width: int = 8) -> nn.Module:
    return TwoWays(width)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, 8), torch.randn(batch_size, 8)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()
