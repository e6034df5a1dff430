"""ResNet-152 on 1000 classes of 224 x 224 images, in plain torch: 60 M parameters.

autoplan whatif examples/what_if/small_resnet.toml
"""

import torch
from torch import nn
from torch.nn import functional as F

N_CLASSES, IMAGE = 1000, 224
DEPTHS, WIDTH = (3, 8, 36, 3), 64


def normalized(n_in: int, n_out: int, size: int, *, stride: int = 1) -> nn.Sequential:
    """A convolution and its BatchNorm; the image becomes smaller by the stride alone."""
    convolution = nn.Conv2d(n_in, n_out, size, stride=stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(n_out))


class Bottleneck(nn.Module):
    """x + conv1x1(conv3x3(conv1x1(x))), with a projection where the shape changes."""

    def __init__(self, n_in: int, width: int, *, stride: int) -> None:
        super().__init__()
        n_out = 4 * width
        self.reduce = normalized(n_in, width, 1)
        self.inner = normalized(width, width, 3, stride=stride)
        self.expand = normalized(width, n_out, 1)
        self.projection = normalized(n_in, n_out, 1, stride=stride) if n_in != n_out else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.projection is None else self.projection(x)
        x = F.relu(self.inner(F.relu(self.reduce(x))))
        return F.relu(self.expand(x) + shortcut)


class ResNet(nn.Module):
    """A stem, groups of bottlenecks of which all but the first halve the image, and a linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = normalized(3, WIDTH, 7, stride=2)
        self.blocks = nn.ModuleList()
        n_in = WIDTH
        for group, depth in enumerate(DEPTHS):
            width = WIDTH * 2**group
            for index in range(depth):
                self.blocks.append(Bottleneck(n_in, width, stride=2 if group and not index else 1))
                n_in = 4 * width
        self.classifier = nn.Linear(n_in, N_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.stem(x)), 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        return self.classifier(F.adaptive_avg_pool2d(x, 1).flatten(1))


def build_model() -> nn.Module:
    return ResNet()


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, 3, IMAGE, IMAGE), torch.randint(N_CLASSES, (batch_size,))


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets)
