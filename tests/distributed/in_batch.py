"""Pairs among all pairs of a batch: a loss without targets, on two outputs, whose labels are as many as the samples."""

import torch
from torch import nn
from torch.nn import functional as F


class InBatch(nn.Module):
    """Two towers, and the products of each sample of one with each of the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 8)) for _ in range(2))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        products = F.normalize(self.left(left), dim=-1) @ F.normalize(self.right(right), dim=-1).t()
        return products, products.t()


def build_model(width: int = 16) -> nn.Module:
    return InBatch(width)


def make_batch(batch_size: int) -> tuple[dict[str, torch.Tensor], None]:
    return {"left": torch.randn(batch_size, 4), "right": torch.randn(batch_size, 4)}, None


def loss_fn(outputs: tuple[torch.Tensor, torch.Tensor], _: None) -> torch.Tensor:
    labels = torch.arange(outputs[0].shape[0], device=outputs[0].device)
    return (F.cross_entropy(outputs[0], labels) + F.cross_entropy(outputs[1], labels)) / 2
