"""A batch tried before a step: the model's own code runs on the meta device, where nothing is computed.

The loss takes zeros for outputs, and the real targets: on the meta device torch does not look at all that is wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..building.known_values import build_on_meta
from ..seeds import seeding_the_host
from .batches import Batch, flatten_tensors, global_batch, map_tensors, tensors_at, with_paths
from .model_calls import call_model, loss_of

MAX_OUTPUTS = 2**24  # numbers of outputs with which the loss is computed


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The user's model and loss as they are without a plan.

    Attributes:
        build_model: that of the model file, with its arguments.
        is_generated: the program takes the tensors of the inputs, as `tensors_at` finds them.
    """

    model_file: Any
    build_model: Callable[[], nn.Module]
    is_generated: bool

    def planned(self) -> Batch:
        """A sample as it was planned for."""
        return global_batch(self.model_file.make_batch, batch_size=1, seed=0, step=0)

    def failure(self, batch: Batch) -> Exception | None:
        """What a batch makes the model or its loss raise, if anything; generators stay as they are.

        A step would warn of the same once more.
        """
        inputs, targets = batch
        planned, _ = self.planned()
        with seeding_the_host(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                if self.is_generated:
                    found = iter(tensors_at(inputs, [path for path, _ in with_paths(planned)]))
                    inputs = map_tensors(lambda _: next(found), planned)
                with torch.device("meta"):
                    model = build_on_meta(self.build_model).float().eval()
                    outputs = call_model(model, map_tensors(partial(_as_on, "meta"), inputs))
                n_elements = sum(output.numel() for output in flatten_tensors(outputs))
                where = "cpu" if n_elements <= MAX_OUTPUTS else "meta"
                with torch.device(where):
                    zeros = map_tensors(lambda output: torch.zeros_like(output, device=where), outputs)
                    loss_of(
                        getattr(self.model_file, "loss_fn", None), zeros, map_tensors(partial(_as_on, where), targets)
                    )
            except Exception as error:  # of any kind: it is the user's code, and the answer
                return error
        return None


def _as_on(device: str, tensor: torch.Tensor) -> Any:
    """Floating-point numbers in float32, as the parameters."""
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return tensor.to(device, dtype, copy=True)  # loss_fn may write into it
