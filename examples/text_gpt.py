"""A character GPT that trains on a text file: a memory-mapped dataset, an evaluation set, a learning-rate schedule.

The text (`examples/data/stories.txt`, generated, public domain) is never read as a whole: each sample is a window of a
memory-mapped file of tokens, here of one byte each. With `--set text=FILE --set token_bytes=2 --set vocabulary=50304`
FILE may be any file of 2-byte tokens.

    autoplan plan examples/text_gpt.py --hw dgx_a100_x8 --out plans/text
    torchrun --standalone --nproc-per-node 8 plans/text/train.py --steps 300 --lr-schedule cosine --warmup-steps 20
        --clip 1 --workers 2 --eval-every 100 --log-jsonl plans/text.jsonl
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset


@dataclass(frozen=True)
class Config:
    n_layers: int = 4
    n_heads: int = 4
    width: int = 128
    vocabulary: int = 128
    context: int = 128
    token_bytes: int = 1
    text: str = "examples/data/stories.txt"


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.norm_1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(width, dim=2)
        q = q.view(batch, seq, self.n_heads, width // self.n_heads).transpose(1, 2)
        k = k.view(batch, seq, self.n_heads, width // self.n_heads).transpose(1, 2)
        v = v.view(batch, seq, self.n_heads, width // self.n_heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TokenFile(Dataset):
    """Windows of a memory-mapped file of unsigned tokens: the fraction from `start` to `stop` of the file."""

    def __init__(self, config: Config, start: float, stop: float) -> None:
        path = _text_path(config.text)
        n_tokens = path.stat().st_size // config.token_bytes
        dtype = {1: torch.uint8, 2: torch.uint16}[config.token_bytes]
        self.tokens = torch.from_file(str(path), size=n_tokens, dtype=dtype)[
            int(start * n_tokens) : int(stop * n_tokens)
        ]
        self.context = config.context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.tokens[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


def _text_path(text: str) -> Path:
    """The file as named, or, from wherever this file is run, the one beside it."""
    places = (Path(text), Path(__file__).parent / "data" / Path(text).name)
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise FileNotFoundError(f"{text}: no such file here; plan again with --set text=/absolute/path/of/the/file")
    return found


_config = Config()


def build_model(**overrides: int | str) -> nn.Module:
    """Any field of `Config` can be overridden (`n_layers=2`)."""
    global _config
    _config = replace(Config(), **overrides)
    return GPT(_config)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    windows = torch.randint(_config.vocabulary, (batch_size, _config.context + 1))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)


def build_dataset() -> Dataset:
    return TokenFile(_config, 0.0, 0.9)


def build_eval_dataset() -> Dataset:
    return TokenFile(_config, 0.9, 1.0)
