"""An MLP with an operator of the user's own, for which no sharding rule exists."""

import torch
from torch import nn
from torch.nn import functional as F

N_FEATURES = 16


@torch.library.custom_op("families::soft_cap", mutates_args=())
def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(x / cap)


@soft_cap.register_fake
def _(x: torch.Tensor, cap: float) -> torch.Tensor:
    return torch.empty_like(x)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(output)
    ctx.cap = inputs[1]


def _backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    (output,) = ctx.saved_tensors
    return grad * (1 - (output / ctx.cap) ** 2), None


soft_cap.register_autograd(_backward, setup_context=_save)


class Block(nn.Module):
    """x + down(soft_cap(up(norm(x))))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(soft_cap(self.up(self.norm(x)), 5.0))


class Capped(nn.Module):
    """A stem, blocks, a head."""

    def __init__(self, *, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Linear(N_FEATURES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model(width: int = 32, depth: int = 4) -> nn.Module:
    return Capped(width=width, depth=depth)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(batch_size, N_FEATURES)
    return x, x.square().mean(dim=1, keepdim=True).sqrt()


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, targets)
