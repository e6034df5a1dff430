"""A mixture of experts with a capacity, in einsums: tokens are sent to slots of experts, group by group.

A group is a run of a sequence. Each expert has some slots in each group, filled in the order of the tokens; a token
that finds its expert full passes by it.
"""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, CONTEXT = 64, 16


class Experts(nn.Module):
    """Each token goes to the slot of its best expert, weighted by the router."""

    def __init__(self, width: int, *, n_experts: int, group: int, n_slots: int) -> None:
        super().__init__()
        self.n_experts, self.group, self.n_slots = n_experts, group, n_slots
        self.router = nn.Linear(width, n_experts, bias=False)
        self.up = nn.Parameter(torch.randn(n_experts, width, 4 * width) * 0.1)
        self.down = nn.Parameter(torch.randn(n_experts, 4 * width, width) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(1, (-1, self.group))
        weights = torch.softmax(self.router(groups), dim=-1)
        weight, expert = weights.max(dim=-1)
        chosen = F.one_hot(expert, self.n_experts)
        slot = (chosen.cumsum(2) * chosen).sum(-1) - 1
        has_slot = F.one_hot(slot.clamp(max=self.n_slots), self.n_slots + 1)[..., : self.n_slots]
        sent = (chosen.unsqueeze(-1) * has_slot.unsqueeze(-2)).to(x.dtype)  # [batch, groups, tokens, experts, slots]
        rows = torch.einsum("bgtec,bgtm->ebgcm", sent, groups)
        hidden = F.gelu(torch.einsum("ebgcm,emh->ebgch", rows, self.up))
        rows = torch.einsum("ebgch,ehm->ebgcm", hidden, self.down)
        returned = torch.einsum("bgtec,ebgcm->bgtm", sent * weight[..., None, None], rows)
        return returned.flatten(1, 2)


class Block(nn.Module):
    """Attention, then experts."""

    def __init__(self, width: int, *, n_heads: int, **experts: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.experts = Experts(width, **experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(2, (self.n_heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.experts(self.norm2(x))


class Mixture(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, *, width: int, n_layers: int, **block: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, **block) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model(
    width: int = 16, n_layers: int = 4, n_heads: int = 4, n_experts: int = 4, group: int = 4, n_slots: int = 2
) -> nn.Module:
    return Mixture(width=width, n_layers=n_layers, n_heads=n_heads, n_experts=n_experts, group=group, n_slots=n_slots)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (batch_size, CONTEXT + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
