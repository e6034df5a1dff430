"""A mixture of 8 experts, 2 active, in plain PyTorch: 1.0 billion parameters, 2048 tokens, grouped products."""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, CONTEXT = 32000, 2048


class Experts(nn.Module):
    """Each token goes through its `n_active` best experts, weighted by the router."""

    def __init__(self, width: int, *, n_experts: int, n_active: int) -> None:
        super().__init__()
        self.n_experts, self.n_active = n_experts, n_active
        self.router = nn.Linear(width, n_experts, bias=False)
        self.up = nn.Parameter(torch.randn(n_experts, width, 4 * width) * 0.1)
        self.down = nn.Parameter(torch.randn(n_experts, 2 * width, width) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, experts = torch.softmax(self.router(tokens), dim=-1).topk(self.n_active, dim=-1)
        experts, order = experts.flatten().sort()
        ends = F.one_hot(experts, self.n_experts).sum(0).cumsum(0).to(torch.int32)
        gate, value = F.grouped_mm(tokens[order // self.n_active], self.up, offs=ends).chunk(2, dim=-1)
        rows = F.grouped_mm(F.silu(gate) * value, self.down, offs=ends)
        rows = rows * weights.flatten()[order][:, None]
        return rows[order.argsort()].reshape(-1, self.n_active, x.shape[-1]).sum(1).reshape(x.shape)


class Block(nn.Module):
    """Mixing along the sequence, then experts."""

    def __init__(self, width: int, *, n_heads: int, n_experts: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.experts = Experts(width, n_experts=n_experts, n_active=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(2, (self.n_heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.experts(self.norm2(x))


class Mixture(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, *, width: int, n_layers: int, n_heads: int, n_experts: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, n_heads=n_heads, n_experts=n_experts) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model() -> nn.Module:
    return Mixture(width=1024, n_layers=16, n_heads=16, n_experts=8)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (batch_size, CONTEXT + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
