"""ViT-L/16 of Hugging Face transformers on 1000 classes of 224 x 224 images; no dropout."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

N_CLASSES, IMAGE = 1000, 224


def build_model() -> nn.Module:
    size = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return ViTForImageClassification(ViTConfig(**size, image_size=IMAGE, patch_size=16, num_labels=N_CLASSES))


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, 3, IMAGE, IMAGE), torch.randint(N_CLASSES, (batch_size,))


def loss_fn(outputs, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits, targets)
