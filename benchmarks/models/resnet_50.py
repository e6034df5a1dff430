"""ResNet-50 v1.5 of Hugging Face transformers on 1000 classes of 224 x 224 images, with smoothed labels."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import ResNetConfig, ResNetForImageClassification

N_CLASSES, IMAGE, SMOOTHING = 1000, 224, 0.1


def build_model() -> nn.Module:
    return ResNetForImageClassification(ResNetConfig(depths=[3, 4, 6, 3], num_labels=N_CLASSES))


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, 3, IMAGE, IMAGE), torch.randint(N_CLASSES, (batch_size,))


def loss_fn(outputs, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits, targets, label_smoothing=SMOOTHING)
