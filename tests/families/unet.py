"""A U-Net: skips from every level of the way down to the same level of the way up, GroupNorm."""

import torch
from torch import nn
from torch.nn import functional as F

IMAGE = 16


class Pair(nn.Module):
    """Two normalized 3x3 convolutions."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, n_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    """Down by pooling, up by transposed convolution."""

    def __init__(self, *, width: int, n_levels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(n_levels)]
        self.down = nn.ModuleList(Pair(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.middle = Pair(widths[-1], widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(w, w, 2, stride=2) for w in reversed(widths))
        self.merge = nn.ModuleList(Pair(2 * w, w // 2) for w in reversed(widths))
        self.head = nn.Conv2d(width // 2, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for pair in self.down:
            x = pair(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips), strict=True):
            x = merge(torch.cat([up(x), skip], dim=1))
        return self.head(x)


def build_model(width: int = 8, n_levels: int = 3) -> nn.Module:
    return UNet(width=width, n_levels=n_levels)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(batch_size, 3, IMAGE, IMAGE)
    return x, x.mean(dim=1, keepdim=True)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, targets)
