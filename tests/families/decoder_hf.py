"""Decoders of Hugging Face transformers, by their model type: Llama, Mistral, Qwen, Mixtral and their like."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY, CONTEXT = 64, 16


def build_model(kind: str = "llama", **fields: Any) -> nn.Module:
    """A model of type `kind`; `fields` are those of its config that the others do not have."""
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        use_cache=False,
        **fields,
    )
    return AutoModelForCausalLM.from_config(config)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (batch_size, CONTEXT + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(outputs, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())
