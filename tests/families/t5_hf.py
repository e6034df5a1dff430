"""T5 of Hugging Face transformers: encoder and decoder, shared relative bias, one embedding used three times."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import T5Config, T5ForConditionalGeneration

VOCABULARY, SOURCE, TARGET = 64, 16, 8


def build_model(n_layers: int = 2, width: int = 32, n_heads: int = 4) -> nn.Module:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=width,
        d_kv=width // n_heads,
        d_ff=2 * width,
        num_layers=n_layers,
        num_decoder_layers=n_layers,
        num_heads=n_heads,
        relative_attention_num_buckets=8,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def make_batch(batch_size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (batch_size, TARGET + 1))
    source = torch.randint(VOCABULARY, (batch_size, SOURCE))
    return {"input_ids": source, "decoder_input_ids": tokens[:, :-1]}, tokens[:, 1:]


def loss_fn(outputs, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())
