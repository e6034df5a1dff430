"""What torch does not trace without the values of tensors, though a trace needs none of them.

Distributions look whether their parameters are legal, by the values; while traced, they take them as they are.

CTC (Graves et al., ICML 2006) walks over the labels with blanks between them, 2 l + 1 states for l labels. torch
allocates these for the longest label of the batch, which the lengths say. Here it is the most labels that fit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def shapes_without_values() -> Iterator[None]:
    """Inside, these can be traced."""
    library = torch.library._scoped_library("aten", "FRAGMENT")
    with library as aten, _unchecked_distributions():
        torch.library.register_fake("aten::_ctc_loss.Tensor", _ctc_loss, lib=aten)
        yield


@contextlib.contextmanager
def _unchecked_distributions() -> Iterator[None]:
    distribution = torch.distributions.Distribution
    saved = distribution._validate_args
    distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        distribution.set_default_validate_args(saved)


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log_probs: [frame, batch, label] -> losses: [batch], log alpha: [batch, frame, state].

    targets: [batch, label], or the labels of all samples one after another, which are then counted as one label.
    """
    if log_probs.dim() == 2:
        losses, log_alpha = _ctc_loss(log_probs.unsqueeze(1), targets, input_lengths, target_lengths)
        return losses.squeeze(0), log_alpha
    n_frames, batch_size, _ = log_probs.shape
    return log_probs.new_empty(batch_size), log_probs.new_empty(batch_size, n_frames, 2 * targets.shape[-1] + 1)
