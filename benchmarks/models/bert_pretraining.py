"""BERT as NVIDIA pretrained it: masked words and next sentences, scores for the masked positions alone.

Scores, softmax, dropout and context are operators of their own, and what is padding is masked by an addition.
`n_masked` positions of each sample are gathered before the head, whose weight is that of the embedding.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

N_TYPES, N_ORDERS = 2, 2


@dataclass(frozen=True)
class Config:
    n_layers: int
    n_heads: int
    width: int
    hidden: int
    vocabulary: int
    context: int
    n_masked: int
    max_context: int = 512
    dropout: float = 0.1


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.query, self.key, self.value = (nn.Linear(config.width, config.width) for _ in range(3))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part(x).unflatten(2, (self.n_heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
        return (self.dropout(torch.softmax(scores + mask, dim=-1)) @ value).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.out = nn.Linear(config.width, config.width)
        self.norm_1 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, config.hidden)
        self.down = nn.Linear(config.hidden, config.width)
        self.norm_2 = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.norm_1(x + self.dropout(self.out(self.attention(x, mask))))
        return self.norm_2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Bert(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.max_context, config.width)
        self.types = nn.Embedding(N_TYPES, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.pooler = nn.Linear(config.width, config.width)
        self.order = nn.Linear(config.width, N_ORDERS)
        self.transform = nn.Linear(config.width, config.width)
        self.transform_norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary)
        self.head.weight = self.tokens.weight

    def forward(
        self, tokens: torch.Tensor, types: torch.Tensor, is_word: torch.Tensor, masked: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the words at `masked`: [batch, masked], and of the order of the sentences."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.norm(self.tokens(tokens) + self.positions(positions) + self.types(types)))
        mask = (1.0 - is_word)[:, None, None, :] * -10000.0
        for block in self.blocks:
            x = block(x, mask)
        found = x.gather(1, masked[:, :, None].expand(-1, -1, x.shape[-1]))
        logits = self.head(self.transform_norm(F.gelu(self.transform(found))))
        return logits, self.order(torch.tanh(self.pooler(x[:, 0])))


_config: Config


def build_model(**sizes: int) -> nn.Module:
    """`sizes` are the fields of `Config`."""
    global _config
    _config = Config(**sizes)
    return Bert(_config)


def make_batch(batch_size: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    context, vocabulary = _config.context, _config.vocabulary
    inputs = {
        "tokens": torch.randint(vocabulary, (batch_size, context)),
        "types": torch.randint(N_TYPES, (batch_size, context)),
        "is_word": torch.ones(batch_size, context),
        "masked": torch.randint(context, (batch_size, _config.n_masked)),
    }
    words = torch.randint(vocabulary, (batch_size, _config.n_masked))
    return inputs, {"words": words, "order": torch.randint(N_ORDERS, (batch_size,))}


def loss_fn(logits: tuple[torch.Tensor, torch.Tensor], targets: dict[str, torch.Tensor]) -> torch.Tensor:
    words, order = logits
    of_words = F.cross_entropy(words.flatten(0, 1), targets["words"].flatten())
    return of_words + F.cross_entropy(order, targets["order"])
