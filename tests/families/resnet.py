"""A bottleneck ResNet: convolutions, BatchNorm with running statistics, strides, a classifier."""

import torch
from torch import nn
from torch.nn import functional as F

N_CLASSES, IMAGE = 8, 16


class Bottleneck(nn.Module):
    """x + conv1x1(conv3x3(conv1x1(x))), with a projection where the shape changes."""

    def __init__(self, n_in: int, width: int, *, stride: int) -> None:
        super().__init__()
        n_out = 4 * width
        self.conv1 = nn.Conv2d(n_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, n_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(n_out)
        self.relu = nn.ReLU(inplace=True)
        self.projection = None
        if stride != 1 or n_in != n_out:
            self.projection = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride=stride, bias=False), nn.BatchNorm2d(n_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.projection is None else self.projection(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.relu(self.bn3(self.conv3(x)) + shortcut)


class ResNet(nn.Module):
    """A stem, groups of bottlenecks that halve the image, and a linear classifier."""

    def __init__(self, *, depths: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.pool = nn.MaxPool2d(2)
        self.groups = nn.ModuleList()
        n_in = width
        for number, depth in enumerate(depths):
            inner = width * 2**number
            blocks = []
            for index in range(depth):
                blocks.append(Bottleneck(n_in, inner, stride=2 if index == 0 and number > 0 else 1))
                n_in = 4 * inner
            self.groups.append(nn.Sequential(*blocks))
        self.classifier = nn.Linear(n_in, N_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.stem(x))
        for group in self.groups:
            x = group(x)
        return self.classifier(F.adaptive_avg_pool2d(x, 1).flatten(1))


def build_model(width: int = 8, depths: tuple[int, ...] = (2, 3)) -> nn.Module:
    return ResNet(depths=depths, width=width)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, 3, IMAGE, IMAGE), torch.randint(N_CLASSES, (batch_size,))


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets)
