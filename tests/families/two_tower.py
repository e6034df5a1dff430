"""A retrieval model of two towers with two losses: does the pair match, and how was it rated?"""

import torch
from torch import nn
from torch.nn import functional as F

N_USERS, N_ITEMS, N_FEATURES = 32, 64, 8


class Layer(nn.Module):
    """relu(linear(norm(x))) + x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.linear(self.norm(x)))


class Tower(nn.Module):
    """An embedding beside dense features, then layers."""

    def __init__(self, n_ids: int, *, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_ids, width)
        self.features = nn.Linear(N_FEATURES, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.features(features)
        for layer in self.layers:
            x = layer(x)
        return F.normalize(x, dim=-1)


class TwoTower(nn.Module):
    """Users and items meet in a product."""

    def __init__(self, *, width: int, depth: int) -> None:
        super().__init__()
        self.user = Tower(N_USERS, width=width, depth=depth)
        self.item = Tower(N_ITEMS, width=width, depth=depth)
        self.rating = nn.Linear(2 * width, 1)

    def forward(
        self, user: torch.Tensor, item: torch.Tensor, user_features: torch.Tensor, item_features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        u, v = self.user(user, user_features), self.item(item, item_features)
        return (u * v).sum(-1), self.rating(torch.cat([u, v], dim=-1)).squeeze(-1)


def build_model(width: int = 16, depth: int = 4) -> nn.Module:
    return TwoTower(width=width, depth=depth)


def make_batch(batch_size: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    inputs = {
        "user": torch.randint(N_USERS, (batch_size,)),
        "item": torch.randint(N_ITEMS, (batch_size,)),
        "user_features": torch.randn(batch_size, N_FEATURES),
        "item_features": torch.randn(batch_size, N_FEATURES),
    }
    return inputs, {"clicked": torch.randint(2, (batch_size,)), "rating": torch.rand(batch_size)}


def loss_fn(outputs: tuple[torch.Tensor, torch.Tensor], targets: dict[str, torch.Tensor]) -> torch.Tensor:
    score, rating = outputs
    clicked = F.binary_cross_entropy_with_logits(score, targets["clicked"].to(score.dtype))
    return clicked + 0.5 * F.mse_loss(rating, targets["rating"])
