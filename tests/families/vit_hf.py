"""A vision transformer of Hugging Face transformers: patches by convolution, class token, learned positions."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

N_CLASSES, IMAGE = 8, 16


def build_model(n_layers: int = 4, width: int = 32, n_heads: int = 4) -> nn.Module:
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        image_size=IMAGE,
        patch_size=4,
        num_labels=N_CLASSES,
    )
    return ViTForImageClassification(config)


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, 3, IMAGE, IMAGE), torch.randint(N_CLASSES, (batch_size,))


def loss_fn(outputs, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits, targets)
