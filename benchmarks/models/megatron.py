"""A GPT as Megatron-LM ran it in 2022: scores, softmax, dropout and context are operators of their own.

`CoreAttention` holds what its selective recomputation drops and computes again. The causal mask is left out: that
program applied it inside its softmax kernel, where it moves no bytes.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Config:
    n_layers: int
    n_heads: int
    width: int
    hidden: int
    vocabulary: int
    context: int
    dropout: float = 0.1


class CoreAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.softmax(q @ k.transpose(2, 3), dim=-1)) @ v


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.core = CoreAttention(config)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q = q.view(batch, seq, self.n_heads, width // self.n_heads).transpose(1, 2)
        k = k.view(batch, seq, self.n_heads, width // self.n_heads).transpose(1, 2)
        v = v.view(batch, seq, self.n_heads, width // self.n_heads).transpose(1, 2)
        return self.out(self.core(q, k, v).transpose(1, 2).reshape(batch, seq, width))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, config.hidden)
        self.down = nn.Linear(config.hidden, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


_config: Config


def build_model(**sizes: int) -> nn.Module:
    """`sizes` are the fields of `Config`."""
    global _config
    _config = Config(**sizes)
    return GPT(_config)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(_config.vocabulary, (batch_size, _config.context + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
