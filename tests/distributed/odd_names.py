"""Weights and modules whose names Python does not take, or that generated code or traces have for something else."""

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
    """Layers between a list of weights, and two that are called class and mean, which is also an operator's result.

    Another is only returned, and read by the loss.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_parameter("class", nn.Parameter(torch.randn(width)))
        self.mean = nn.Parameter(torch.randn(1))
        self.scales = nn.ParameterDict({"of-loss": nn.Parameter(torch.randn(2))})
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.ends = nn.ParameterList([nn.Parameter(torch.randn(4, width)), nn.Parameter(torch.randn(width, 2))])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x @ self.ends[0] + getattr(self, "class")
        x = x - x.mean(dim=-1, keepdim=True) * self.mean
        for layer in self.layers:
            x = layer(x)
        return x @ self.ends[1], self.scales["of-loss"]


def build_model(width: int = 16) -> nn.Module:
    return OddNames(width)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, 4), torch.randn(batch_size, 2)


def loss_fn(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    found, scale = outputs
    return (found * scale - targets).square().mean()
