"""BERT-large of Hugging Face transformers, masked-language loss over one token in eight of 512; no dropout."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM

VOCABULARY, CONTEXT, IGNORED = 30522, 512, -100


def build_model() -> nn.Module:
    size = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return BertForMaskedLM(BertConfig(**size, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (batch_size, CONTEXT))
    targets = torch.full_like(tokens, IGNORED)
    targets[:, ::8] = tokens[:, ::8]
    return tokens, targets


def loss_fn(outputs, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
