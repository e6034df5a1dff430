"""T5-large of Hugging Face transformers, 512 source and 512 target tokens; no dropout."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import T5Config, T5ForConditionalGeneration

VOCABULARY, SOURCE, TARGET = 32128, 512, 512


def build_model() -> nn.Module:
    size = {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16}
    config = T5Config(**size, vocab_size=VOCABULARY, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


def make_batch(batch_size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (batch_size, TARGET + 1))
    source = torch.randint(VOCABULARY, (batch_size, SOURCE))
    return {"input_ids": source, "decoder_input_ids": tokens[:, :-1]}, tokens[:, 1:]


def loss_fn(outputs, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())
