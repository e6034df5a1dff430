"""A model file: torch's own encoder and decoder, which look at the values of their masks."""

import torch
from torch import nn
from torch.nn import functional as F

PAD, N_TOKENS, VOCABULARY, WIDTH = 0, 8, 32, 16


class Translator(nn.Module):
    """The encoder reads a buffer as its mask, the decoder a mask that forward makes; some tokens are padding."""

    def __init__(self, dropout):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 2 * WIDTH, dropout, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(N_TOKENS))

    def forward(self, source, target):
        is_padding = {"src_key_padding_mask": source == PAD, "memory_key_padding_mask": source == PAD}
        is_future = torch.ones(N_TOKENS, N_TOKENS, dtype=torch.bool, device=target.device).triu(1)
        embedded = self.embed(source), self.embed(target)
        return self.head(self.transformer(*embedded, src_mask=self.mask < 0, tgt_mask=is_future, **is_padding))


def build_model(dropout=0.0):
    return Translator(dropout)


def make_batch(batch_size):
    source, target = torch.randint(1, VOCABULARY, (2, batch_size, N_TOKENS))
    source[: batch_size // 2, 6:] = target[: batch_size // 2, 7:] = PAD
    return (source, target), target.roll(-1, 1)


def loss_fn(outputs, targets):
    losses, is_token = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none"), targets != PAD
    return (losses * is_token).mean()
