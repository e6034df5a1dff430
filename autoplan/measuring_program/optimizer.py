"""The optimizer step as a round, per element."""

from typing import Any

import torch
from torch import nn

from .timing import Clock, Round, round_times

ADAM_ELEMENTS, ADAM_TENSORS = 2**22, 16


class OptimizerStep(Round):
    """The gradient norm in place of a forward pass, the optimizer in place of a backward pass."""

    def __init__(self, weights: list[nn.Parameter], *, is_fused: bool) -> None:
        super().__init__([])
        self._weights = weights
        self._optimizer = torch.optim.AdamW(weights, fused=is_fused or None)

    def forward(self) -> None:
        torch.nn.utils.get_total_norm([weight.grad for weight in self._weights if weight.grad is not None])

    def backward(self) -> None:
        self._optimizer.step()

    def shortest(self) -> Round:
        return self


def measure_optimizer(dtype: torch.dtype, clock: Clock) -> dict[str, Any]:
    """Seconds per element of the gradient norm and one fused AdamW step, as the program does them."""
    master = torch.float32 if dtype.itemsize < 4 else dtype
    n_elements = ADAM_ELEMENTS if clock.is_cuda else ADAM_ELEMENTS // 256
    weights = []
    for _ in range(ADAM_TENSORS):
        weight = nn.Parameter(torch.randn(n_elements, dtype=master, device=clock.device))
        weight.grad = torch.randn_like(weight)
        weights.append(weight)
    times = round_times(OptimizerStep(weights, is_fused=clock.is_cuda), clock)
    per_element_s = (times["forward_s"] + times["backward_s"]) / (n_elements * ADAM_TENSORS)
    return {"status": "measured", "per_element_s": per_element_s}
