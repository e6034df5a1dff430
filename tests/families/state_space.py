"""A gated state-space sequence model: causal depthwise convolution, then a diagonal linear recurrence as a product."""

import math

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, CONTEXT = 64, 16


class Mixer(nn.Module):
    """x + out(gate * recurrence(conv(in(x)))); the recurrence h_t = a h_(t-1) + u_t is a lower-triangular product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.conv = nn.Conv1d(2 * width, 2 * width, 4, padding=3, groups=2 * width)
        self.log_decay = nn.Parameter(torch.full((2 * width,), math.log(0.5)))
        self.skip = nn.Parameter(torch.ones(2 * width))
        self.out = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        u, gate = self.wide(self.norm(x)).chunk(2, dim=-1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., :length])
        steps = torch.arange(length, device=x.device)
        distance = (steps[:, None] - steps[None, :]).clamp(min=0)
        kernel = torch.exp(-torch.exp(self.log_decay)[:, None, None] * distance).tril()
        h = torch.einsum("cts,bcs->bct", kernel, u) + self.skip[:, None] * u
        return x + self.out(h.transpose(1, 2) * F.silu(gate))


class StateSpace(nn.Module):
    """Embedding, mixers, head."""

    def __init__(self, *, width: int, n_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Mixer(width) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build_model(width: int = 16, n_layers: int = 4) -> nn.Module:
    return StateSpace(width=width, n_layers=n_layers)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (batch_size, CONTEXT + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
