"""A GPT-2 style language model: learned positions, fused QKV, tied embedding and head.

The default is a character model of 10.8 million parameters that trains on the text of this very file;
`--set size=124m` (up to `200b`) gives GPT-2 and its larger relatives on random tokens of the same shape.

    autoplan plan examples/gpt.py --hw dgx_a100_x8
    autoplan plan examples/gpt.py --set size=1.5b --hw dgx_a100_x8 --global-batch 512
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Config:
    n_layers: int
    n_heads: int
    width: int
    vocabulary: int = 50304
    context: int = 1024
    dropout: float = 0.0


SIZES = {
    "char": Config(n_layers=6, n_heads=6, width=384, vocabulary=128, context=256),
    "124m": Config(n_layers=12, n_heads=12, width=768),
    "1.5b": Config(n_layers=48, n_heads=24, width=1536),
    "22b": Config(n_layers=48, n_heads=64, width=6144, vocabulary=51200, context=2048),
    "175b": Config(n_layers=96, n_heads=96, width=12288, vocabulary=51200, context=2048),
    "200b": Config(n_layers=96, n_heads=104, width=13312, vocabulary=51200, context=2048),
}


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q = q.view(batch, seq, self.n_heads, width // self.n_heads).transpose(1, 2)
        k = k.view(batch, seq, self.n_heads, width // self.n_heads).transpose(1, 2)
        v = v.view(batch, seq, self.n_heads, width // self.n_heads).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, width))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._initialize)
        self.head.weight = self.tokens.weight

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


_config = SIZES["char"]


def build_model(size: str = "char", **overrides: int) -> nn.Module:
    """`size` picks a row of `SIZES`; any field of `Config` can be overridden (`n_layers=2`)."""
    global _config
    if str(size).lower() not in SIZES:
        raise ValueError(f"size {size!r} is none of {', '.join(SIZES)}")
    _config = replace(SIZES[str(size).lower()], **overrides)
    return GPT(_config)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of this file's text; of random tokens when the vocabulary is not ASCII."""
    if _config.vocabulary == 128:
        text = torch.tensor([min(ord(char), 127) for char in Path(__file__).read_text()])
        starts = torch.randint(len(text) - _config.context, (batch_size,))
        windows = torch.stack([text[start : start + _config.context + 1] for start in starts.tolist()])
    else:
        windows = torch.randint(_config.vocabulary, (batch_size, _config.context + 1))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
