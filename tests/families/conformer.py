"""A small Conformer with a CTC loss: Conv1d front end, relative positions, gated convolutions, labels of many lengths.

The depthwise convolution keeps its bias, whose gradient BatchNorm makes nothing but rounding.
"""

import torch
from torch import nn
from torch.nn import functional as F

N_MELS, N_FRAMES, N_LABELS, VOCABULARY = 8, 32, 4, 12


class RelativeAttention(nn.Module):
    """Self-attention whose scores also depend on the distance, by a matrix of its own (Transformer-XL)."""

    def __init__(self, width, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.distance = nn.Linear(width, width, bias=False)
        self.of_content = nn.Parameter(torch.zeros(n_heads, width // n_heads))
        self.of_distance = nn.Parameter(torch.zeros(n_heads, width // n_heads))
        self.out = nn.Linear(width, width)

    def forward(self, x, distances):
        batch, n_frames, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, n_frames, 3, self.n_heads, -1).unbind(2)
        p = self.distance(distances).view(2 * n_frames - 1, self.n_heads, -1)
        content = torch.einsum("bthd,bshd->bhts", q + self.of_content, k)
        distance = F.pad(torch.einsum("bthd,phd->bhtp", q + self.of_distance, p), (1, 0))
        shifted = distance.view(batch, self.n_heads, 2 * n_frames, n_frames)[:, :, 1:].reshape(*distance.shape[:3], -1)
        weights = torch.softmax((content + shifted[..., :n_frames]) * (width // self.n_heads) ** -0.5, dim=-1)
        return self.out(torch.einsum("bhts,bshd->bthd", weights, v).reshape(batch, n_frames, width))


class GatedConvolution(nn.Module):
    """norm, gated product, depthwise convolution, BatchNorm, product."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.into = nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Conv1d(width, width, 5, padding=2, groups=width)
        self.batch_norm = nn.BatchNorm1d(width)
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x):
        x = F.glu(self.into(self.norm(x).transpose(1, 2)), dim=1)
        return self.out(F.silu(self.batch_norm(self.depthwise(x)))).transpose(1, 2)


class Block(nn.Module):
    """Half a feed-forward, attention, convolution, half a feed-forward."""

    def __init__(self, width, n_heads):
        super().__init__()
        self.first, self.last = (
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
            for _ in range(2)
        )
        self.attention = RelativeAttention(width, n_heads)
        self.convolution = GatedConvolution(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x, distances):
        x = x + 0.5 * self.first(x)
        x = x + self.attention(x, distances)
        x = x + self.convolution(x)
        return self.norm(x + 0.5 * self.last(x))


class Conformer(nn.Module):
    """Two strided convolutions, equal blocks, a head over labels."""

    def __init__(self, width, n_heads, depth):
        super().__init__()
        self.width = width
        self.front = nn.Sequential(
            nn.Conv1d(N_MELS, width, 3, 2, 1), nn.GELU(), nn.Conv1d(width, width, 3, 2, 1), nn.GELU()
        )
        self.blocks = nn.ModuleList(Block(width, n_heads) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, mels):
        x = self.front(mels.transpose(1, 2)).transpose(1, 2)
        n_frames = x.shape[1]
        at = torch.arange(n_frames - 1, -n_frames, -1, device=x.device, dtype=x.dtype)
        rates = 1e-4 ** (torch.arange(0, self.width, 2, device=x.device, dtype=x.dtype) / self.width)
        angles = at[:, None] * rates
        distances = torch.cat([angles.sin(), angles.cos()], dim=1)
        for block in self.blocks:
            x = block(x, distances)
        return self.head(x)


def build_model(width=16, n_heads=4, depth=4):
    return Conformer(width, n_heads, depth)


def make_batch(batch_size):
    labels = torch.randint(1, VOCABULARY, (batch_size, N_LABELS))
    n_labels = torch.randint(1, N_LABELS + 1, (batch_size,))
    n_frames = torch.full((batch_size,), N_FRAMES // 4)
    return torch.randn(batch_size, N_FRAMES, N_MELS), {"labels": labels, "n_frames": n_frames, "n_labels": n_labels}


def loss_fn(outputs, targets):
    log_probs = outputs.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(log_probs, targets["labels"], targets["n_frames"], targets["n_labels"], zero_infinity=True)
