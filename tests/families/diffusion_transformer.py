"""A diffusion transformer: patches, a timestep that modulates every block (adaptive layer norm)."""

import math

import torch
from torch import nn
from torch.nn import functional as F

IMAGE, PATCH, CHANNELS = 16, 4, 4


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


class Block(nn.Module):
    """Attention and MLP, each between a shift, a scale and a gate that the timestep gives."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=1)
        x = x + gate1[:, None] * self.attend(modulate(self.norm1(x), shift1, scale1))
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.n_heads, width // self.n_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))


class DiffusionTransformer(nn.Module):
    """Predicts the noise of an image, given its timestep."""

    def __init__(self, *, width: int, n_layers: int, n_heads: int) -> None:
        super().__init__()
        self.width = width
        self.patches = nn.Conv2d(CHANNELS, width, PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.randn(1, (IMAGE // PATCH) ** 2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, PATCH * PATCH * CHANNELS)

    def forward(self, image: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2) + self.positions
        condition = self.time(self.timestep_features(timestep).to(x.dtype))
        for block in self.blocks:
            x = block(x, condition)
        side = IMAGE // PATCH
        x = self.head(self.norm(x)).reshape(-1, side, side, PATCH, PATCH, CHANNELS)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(-1, CHANNELS, IMAGE, IMAGE)

    def timestep_features(self, timestep: torch.Tensor) -> torch.Tensor:
        half = self.width // 2
        frequencies = torch.exp(-math.log(10000) * torch.arange(half, device=timestep.device) / half)
        angles = timestep[:, None] * frequencies[None]
        return torch.cat([angles.cos(), angles.sin()], dim=-1)


def build_model(width: int = 32, n_layers: int = 4, n_heads: int = 4) -> nn.Module:
    return DiffusionTransformer(width=width, n_layers=n_layers, n_heads=n_heads)


def make_batch(batch_size: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    noise = torch.randn(batch_size, CHANNELS, IMAGE, IMAGE)
    return (noise.roll(1, 0) + noise, torch.randint(1000, (batch_size,))), noise


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, targets)
