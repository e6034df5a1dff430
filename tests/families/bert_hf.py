"""BERT of Hugging Face transformers, masked-language loss over some of the tokens."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM

VOCABULARY, CONTEXT, IGNORED = 64, 16, -100


def build_model(n_layers: int = 4, width: int = 32, n_heads: int = 4) -> nn.Module:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        intermediate_size=4 * width,
        max_position_embeddings=CONTEXT,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def make_batch(batch_size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (batch_size, CONTEXT))
    padding = torch.ones(batch_size, CONTEXT, dtype=torch.int64)
    padding[:, -2:] = 0
    targets = tokens.clone()
    targets[:, 1::2] = IGNORED
    return {"input_ids": tokens, "attention_mask": padding}, targets


def loss_fn(outputs, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
