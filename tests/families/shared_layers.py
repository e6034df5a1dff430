"""Source and target: equal containers in two parts, layers that are called twice, dict and tuple around the loss."""

import torch
from torch import nn
from torch.nn import functional as F

N_FEATURES, N_CLASSES = 8, 4


class Layer(nn.Module):
    """x + down(gelu(up(norm(x))))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Part(nn.Module):
    """Layers that run `n_passes` times, and a scale of its own."""

    def __init__(self, width: int, *, n_layers: int, n_passes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(n_layers))
        self.scale = nn.Parameter(torch.ones(width))
        self.n_passes = n_passes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for _ in range(self.n_passes):
            for layer in self.layers:
                x = layer(x)
        return x


class SharedLayers(nn.Module):
    """An encoder whose result only the end reads, and a decoder that uses its layers twice."""

    def __init__(self, width: int, *, n_layers: int) -> None:
        super().__init__()
        self.stem = nn.Linear(N_FEATURES, width)
        self.parts = nn.Module()
        self.parts.encoder = Part(width, n_layers=n_layers, n_passes=1)
        self.parts.decoder = Part(width, n_layers=n_layers, n_passes=2)
        self.head = nn.Linear(width, N_CLASSES)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        memory = self.parts.encoder(self.stem(source))
        hidden = self.parts.decoder(self.stem(target)) + memory
        return {"logits": self.head(hidden), "hidden": hidden}


def build_model(width: int = 16, n_layers: int = 2) -> nn.Module:
    return SharedLayers(width, n_layers=n_layers)


def make_batch(batch_size: int) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    source, target = torch.randn(2, batch_size, N_FEATURES)
    labels = torch.randint(N_CLASSES, (batch_size,))
    return {"source": source, "target": target}, (labels, source.mean(dim=1, keepdim=True))


def loss_fn(outputs: dict[str, torch.Tensor], targets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    labels, level = targets
    return F.cross_entropy(outputs["logits"], labels) + 0.1 * (outputs["hidden"] - level).square().mean()
