"""A Fourier neural operator: complex numbers, a write into a slice, and gates that send no gradient back."""

import torch
from torch import nn
from torch.nn import functional as F

N_POINTS = 16


class Spectral(nn.Module):
    """The lowest frequencies of a signal times complex weights, which are stored as pairs of numbers."""

    def __init__(self, width: int, n_modes: int) -> None:
        super().__init__()
        self.n_modes = n_modes
        self.weight = nn.Parameter(torch.randn(width, width, n_modes, 2) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.fft.rfft(x.float())
        kept = torch.zeros_like(frequencies)
        weight = torch.view_as_complex(self.weight.float())
        kept[:, :, : self.n_modes] = torch.einsum("bim,iom->bom", frequencies[:, :, : self.n_modes], weight)
        return torch.fft.irfft(kept, n=x.shape[-1]).to(x.dtype)


class Block(nn.Module):
    """gelu(spectral(x) + linear(x)), gated by what the same linear layer makes of x without a gradient."""

    def __init__(self, width: int, n_modes: int) -> None:
        super().__init__()
        self.spectral = Spectral(width, n_modes)
        self.linear = nn.Conv1d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate = torch.sigmoid(self.linear(x))
        return x + gate * F.gelu(self.spectral(x) + self.linear(x))


class FourierOperator(nn.Module):
    """A function on a grid to another one."""

    def __init__(self, *, width: int, n_modes: int, depth: int) -> None:
        super().__init__()
        self.lift = nn.Linear(2, width)
        self.blocks = nn.ModuleList(Block(width, n_modes) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lift(x).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.transpose(1, 2)).squeeze(-1)


def build_model(width: int = 8, n_modes: int = 4, depth: int = 4) -> nn.Module:
    return FourierOperator(width=width, n_modes=n_modes, depth=depth)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, N_POINTS, 2), torch.randn(batch_size, N_POINTS)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).norm(dim=-1).mean()
