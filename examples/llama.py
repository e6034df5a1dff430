"""A Llama style language model: RMSNorm, rotary positions, grouped-query attention, SwiGLU; 15M to 70B.

autoplan plan examples/llama.py --set size=70b --hw dgx_a100_x8 --hosts 8 --global-batch 1024
"""

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Config:
    n_layers: int
    n_heads: int
    n_kv_heads: int
    width: int
    hidden: int
    vocabulary: int = 128256
    context: int = 4096
    theta: float = 500000.0


SIZES = {
    "15m": Config(n_layers=6, n_heads=6, n_kv_heads=2, width=288, hidden=768, vocabulary=32000, context=256),
    "1b": Config(n_layers=16, n_heads=32, n_kv_heads=8, width=2048, hidden=8192),
    "3b": Config(n_layers=28, n_heads=24, n_kv_heads=8, width=3072, hidden=8192),
    "7b": Config(n_layers=32, n_heads=32, n_kv_heads=32, width=4096, hidden=11008, vocabulary=32000, theta=1e4),
    "8b": Config(n_layers=32, n_heads=32, n_kv_heads=8, width=4096, hidden=14336),
    "70b": Config(n_layers=80, n_heads=64, n_kv_heads=8, width=8192, hidden=28672),
}


def rotary_tables(seq: int, head_dim: int, theta: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every (position, frequency): each [seq, head_dim]."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(seq, device=device, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of x: [batch, heads, seq, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = config.n_heads, config.n_kv_heads
        self.head_dim = config.width // config.n_heads
        self.q = nn.Linear(config.width, config.n_heads * self.head_dim, bias=False)
        self.k = nn.Linear(config.width, config.n_kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(config.width, config.n_kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(config.n_heads * self.head_dim, config.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        q = self.q(x).view(batch, seq, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.k(x).view(batch, seq, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(x).view(batch, seq, self.n_kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.n_heads != self.n_kv_heads)
        return self.out(y.transpose(1, 2).reshape(batch, seq, self.n_heads * self.head_dim))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        h = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        head_dim = self.config.width // self.config.n_heads
        cos, sin = rotary_tables(tokens.shape[1], head_dim, self.config.theta, tokens.device)
        x = self.tokens(tokens)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


_config = SIZES["15m"]


def build_model(size: str = "15m", **overrides: int) -> nn.Module:
    """`size` picks a row of `SIZES`; any field of `Config` can be overridden (`context=8192`)."""
    global _config
    if str(size).lower() not in SIZES:
        raise ValueError(f"size {size!r} is none of {', '.join(SIZES)}")
    _config = replace(SIZES[str(size).lower()], **overrides)
    return Llama(_config)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(_config.vocabulary, (batch_size, _config.context + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
