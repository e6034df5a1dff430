"""Text of the model files that stand for configurations: `MODEL`, and after it the functions of one task."""

MODEL = '''\
"""{class_name} of Hugging Face transformers, built from CONFIG with new weights."""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import {imports}

CONFIG = {config}
{constants}


def build_model() -> nn.Module:
    model = {class_name}({config_class}.from_dict(copy.deepcopy(CONFIG)))
    model.register_forward_hook(only_logits)
    return model


def only_logits(model: nn.Module, inputs: Any, outputs: Any) -> torch.Tensor:
    """What leaves the model, of all that its class returns."""
    return outputs.logits
'''
CAUSAL = '''\
def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens; the target of each is the token after it."""
    tokens = torch.randint(VOCABULARY, (batch_size, CONTEXT + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
'''
MASKED = '''\
IGNORED = -100  # the target of a token that is not to be predicted
MASK_EVERY = 7  # one token of seven is to be predicted, about 15 %


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens, some of which are replaced and to be predicted; as many in each sample."""
    tokens = torch.randint(VOCABULARY, (batch_size, CONTEXT))
    targets = torch.full_like(tokens, IGNORED)
    targets[:, ::MASK_EVERY] = tokens[:, ::MASK_EVERY]
    tokens[:, ::MASK_EVERY] = torch.randint(VOCABULARY, tokens[:, ::MASK_EVERY].shape)
    return tokens, targets


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
'''
SEQ_TO_SEQ = '''\
def make_batch(batch_size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random source and target tokens, equally many; the decoder predicts the token after each of its own."""
    source = torch.randint(VOCABULARY, (batch_size, CONTEXT))
    tokens = torch.randint(VOCABULARY, (batch_size, CONTEXT + 1))
    return {"input_ids": source, "decoder_input_ids": tokens[:, :-1]}, tokens[:, 1:]


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
'''
IMAGE_CLASSES = '''\
def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images with random labels."""
    return torch.randn(batch_size, N_CHANNELS, HEIGHT, WIDTH), torch.randint(N_LABELS, (batch_size,))


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets)
'''
SEQUENCE_CLASSES = '''\
def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens with random labels."""
    return torch.randint(VOCABULARY, (batch_size, CONTEXT)), torch.randint(N_LABELS, (batch_size,))


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets)
'''
