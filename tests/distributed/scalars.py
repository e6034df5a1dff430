"""Two towers with a temperature, as in CLIP: parameters without dims inside blocks, tied, frozen, and beside them."""

import torch
from torch import nn
from torch.nn import functional as F

N_WORDS, N_FEATURES = 32, 8


class Layer(nn.Module):
    """x + gain * slope * relu(linear(x)); all layers have one slope."""

    def __init__(self, width: int, slope: nn.Parameter) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.slope = slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * (F.relu(self.linear(x)) * self.slope)


class Towers(nn.Module):
    """Pictures and words meet in a matrix of similarities."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        slope = nn.Parameter(torch.tensor(1.5))
        self.words = nn.Embedding(N_WORDS, width)
        self.picture = nn.Linear(N_FEATURES, width)
        self.shift = nn.Parameter(torch.tensor(0.25), requires_grad=False)
        self.picture_layers = nn.ModuleList(Layer(width, slope) for _ in range(depth))
        self.word_layers = nn.ModuleList(Layer(width, slope) for _ in range(depth))
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.bias = nn.Parameter(torch.tensor(-2.0))

    def forward(self, picture: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        x, y = self.picture(picture) + self.shift, self.words(words).mean(1)
        for picture_layer, word_layer in zip(self.picture_layers, self.word_layers, strict=True):
            x, y = picture_layer(x), word_layer(y)
        similarity = F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).T
        return similarity * self.temperature.exp() + self.bias


def build_model(width: int = 16, depth: int = 2) -> nn.Module:
    return Towers(width, depth)


def make_batch(batch_size: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    words = torch.randint(N_WORDS, (batch_size, 6))
    return (torch.randn(batch_size, N_FEATURES), words), torch.randint(2, (batch_size, 1))


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    pairs = torch.eye(len(outputs), dtype=outputs.dtype, device=outputs.device)
    return F.binary_cross_entropy_with_logits(outputs, pairs, weight=1.0 + targets)
