"""Hand-written parallel models for `tiny_gpt`, in the form of generated ones: tensor parallel, pipeline, both.

Across each cut travel the hidden state, a bool mask per position, int position ids and a float constant without
gradient, so every kind of boundary tensor is exercised.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from autoplan.runtime import Boundary, PerSample, Shard, Weights, attach
from autoplan.runtime.tensor_parallel.collectives import all_reduce, copy_to_tp
from autoplan.runtime.tensor_parallel.vocabulary import vocab_parallel_cross_entropy, vocab_parallel_embedding

from .tiny_gpt import N_HEADS, N_LAYERS, SEQ, VOCABULARY, WIDTH


def linear(x, weights):
    return F.linear(x, weights.weight, weights.bias)


class Block(nn.Module):
    """Column-parallel qkv and up, row-parallel out and down."""

    def __init__(self, tp, tp_degree):
        super().__init__()
        self.tp, self.tp_degree = tp, tp_degree
        self.norm_1 = Weights(weight=(WIDTH,), bias=(WIDTH,))
        attach(self, "attention.qkv", Weights(weight=(3 * WIDTH // tp_degree, WIDTH), bias=(3 * WIDTH // tp_degree,)))
        attach(self, "attention.out", Weights(weight=(WIDTH, WIDTH // tp_degree), bias=(WIDTH,)))
        self.norm_2 = Weights(weight=(WIDTH,), bias=(WIDTH,))
        self.up = Weights(weight=(4 * WIDTH // tp_degree, WIDTH), bias=(4 * WIDTH // tp_degree,))
        self.down = Weights(weight=(WIDTH, 4 * WIDTH // tp_degree), bias=(WIDTH,))

    def forward(self, x):
        batch, seq, _ = x.shape
        n_heads = N_HEADS // self.tp_degree
        h = copy_to_tp(F.layer_norm(x, (WIDTH,), self.norm_1.weight, self.norm_1.bias), self.tp)
        q, k, v = linear(h, self.attention.qkv).split(WIDTH // self.tp_degree, dim=-1)
        q, k, v = (t.view(batch, seq, n_heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(batch, seq, WIDTH // self.tp_degree)
        x = x + all_reduce(F.linear(y, self.attention.out.weight), self.tp) + self.attention.out.bias
        h = copy_to_tp(F.layer_norm(x, (WIDTH,), self.norm_2.weight, self.norm_2.bias), self.tp)
        h = F.gelu(linear(h, self.up))
        return x + all_reduce(F.linear(h, self.down.weight), self.tp) + self.down.bias


class Stage(nn.Module):
    """Layers `first` to `stop`; the first stage embeds, the last one gives logits, sharded over the vocabulary."""

    def __init__(self, tp, tp_degree, first, stop):
        super().__init__()
        self.tp, self.first, self.stop = tp, first, stop
        if first == 0:
            attach(self, "tokens", Weights(weight=(VOCABULARY // tp_degree, WIDTH)))
            self.register_buffer("positions", torch.empty(SEQ, WIDTH))
        for layer in range(first, stop):
            attach(self, f"blocks.{layer}", Block(tp, tp_degree))
        if stop == N_LAYERS:
            self.norm = Weights(weight=(WIDTH,), bias=(WIDTH,))
            attach(self, "head", Weights(weight=(VOCABULARY // tp_degree, WIDTH)))
        self.BLOCKS = tuple(f"blocks.{layer}" for layer in range(first, stop))

    def forward(self, *tensors):
        if self.first == 0:
            (tokens,) = tensors
            rows = vocab_parallel_embedding(tokens, self.tokens.weight, self.tp)
            x = all_reduce(rows, self.tp) + self.positions
            is_kept = tokens >= 0
            ids = torch.arange(SEQ, device=x.device).expand_as(tokens)
            ones = torch.ones(SEQ, 1, device=x.device, dtype=x.dtype)
        else:
            x, is_kept, ids, ones = tensors
            x = x.transpose(0, 1)  # what was sent, with a gradient that is not contiguous
        for layer in range(self.first, self.stop):
            x = self.get_submodule(f"blocks.{layer}")(x)
        x = torch.where(is_kept.unsqueeze(-1) & (ids < SEQ).unsqueeze(-1), x * ones, 0.0)
        if self.stop < N_LAYERS:
            return x.transpose(0, 1), is_kept, ids, ones
        h = F.layer_norm(x, (WIDTH,), self.norm.weight, self.norm.bias)
        return F.linear(copy_to_tp(h, self.tp), self.head.weight)


def parallel_model(tp_degree, n_stages):
    """The namespace of a generated parallel_model.py."""
    per_stage = N_LAYERS // n_stages

    def stage_class(first):
        return type(
            "Stage",
            (Stage,),
            {"__init__": lambda self, tp: Stage.__init__(self, tp, tp_degree, first, first + per_stage)},
        )

    block_shards = {
        "attention.qkv.weight": Shard(0, 3),
        "attention.qkv.bias": Shard(0, 3),
        "attention.out.weight": Shard(1),
        "up.weight": Shard(0),
        "up.bias": Shard(0),
        "down.weight": Shard(1),
    }
    shards = {f"blocks.{layer}.{name}": shard for layer in range(N_LAYERS) for name, shard in block_shards.items()}
    shards |= {"tokens.weight": Shard(0), "head.weight": Shard(0)}
    cut = (
        Boundary((SEQ, PerSample(1), WIDTH)),
        Boundary((PerSample(1), SEQ), "bool", requires_grad=False),
        Boundary((PerSample(1), SEQ), "int64", requires_grad=False),
        Boundary((SEQ, 1), requires_grad=False),
    )
    return SimpleNamespace(
        SHARDS=shards if tp_degree > 1 else {},
        PARTIAL_GRADIENTS=(),
        STAGES=tuple(stage_class(first) for first in range(0, N_LAYERS, per_stage)),
        INPUTS=((),),
        BOUNDARIES=(cut,) * (n_stages - 1),
        TIED=(("tokens.weight", "head.weight"),),
        loss_fn=lambda outputs, targets, tp: vocab_parallel_cross_entropy(outputs, targets, tp),
    )
