"""Weights and modules whose names Python does not take, or that generated code has for something else."""

import torch
from torch import nn


class Layer(nn.Module):
    """x + from(tanh(tp(x) @ in + a-b))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tp = nn.Linear(width, width)
        weights = {"in": torch.randn(width, width) * 0.1, "a-b": torch.randn(width)}
        self.weights = nn.ParameterDict({name: nn.Parameter(weight) for name, weight in weights.items()})
        self.inner = nn.ModuleDict({"x-y": nn.ModuleDict({"from": nn.Linear(width, width)})})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.tp(x) @ self.weights["in"] + self.weights["a-b"])
        return x + self.inner["x-y"]["from"](hidden)


class OddNames(nn.Module):
    """Layers between a list of weights and one that is called class."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_parameter("class", nn.Parameter(torch.randn(width)))
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.ends = nn.ParameterList([nn.Parameter(torch.randn(4, width)), nn.Parameter(torch.randn(width, 2))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.ends[0] + getattr(self, "class")
        for layer in self.layers:
            x = layer(x)
        return x @ self.ends[1]


def build_model(width: int = 16) -> nn.Module:
    return OddNames(width)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, 4), torch.randn(batch_size, 2)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()
