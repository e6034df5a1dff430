"""Where reduced gradients lie: in memory of the stream that computes, which the backward pass frees more and more of.

`fully_shard` reduces on a stream of its own and allocates there what it reduces into. torch's allocator keeps the
memory of each stream apart: room that one has freed becomes room of another by giving it back to the device, for which
it waits. A step that is short of memory would wait so again and again; while a CUDA graph is captured nobody can, and
it would take the most that passes need and all gradients besides.

    memory of a step     passes | gradients        passes and gradients
                         two streams               one stream
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from ..config import Config
from .grad_compression import parameter_groups


def keep_gradients_on(stream: torch.cuda.Stream, modules: Iterable[FSDPModule], *, config: Config) -> None:
    """Let reductions of these modules write into memory of `stream`; of passes on another one they do as by themselves.

    Only what stays as the gradient may lie there: when it is freed, the step has waited for the reduction. What is
    added to another and freed at once stays on the stream that adds. So do the sums that replicas of shards make of
    several micro-batches before they reduce these.
    """
    n_micro_batches = max((n for *_, n in config.shares), default=config.n_micro_batches)
    if config.zero_stage >= 2 and config.zero_shard_degree < config.dp and n_micro_batches > 1:
        return
    for module in modules:
        groups = parameter_groups(module)
        if len(groups) == 1:
            reduction: Any = _Reduction(groups[0]._reduce_scatter_comm, groups[0].fsdp_params, stream)
            module.set_custom_reduce_scatter(reduction)


class _Reduction:
    """What `fully_shard` calls to reduce a group: as it would, but for where the result lies."""

    def __init__(self, reduction: Any, parameters: Sequence[Any], stream: torch.cuda.Stream) -> None:
        self._reduction, self._parameters, self._stream = reduction, parameters, stream
        self._is_begun = False

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Called for what is reduced, on the stream of the passes, then for the result, on that of the reduction.

        The latter waits for the former between the two, so that nothing is written before what was there is read.
        """
        is_first = torch.cuda.current_stream(device) == self._stream
        is_kept = not is_first and self._is_begun and all(map(_becomes_gradient(dtype), self._parameters))
        # What is allocated is filled then, on the stream whose memory it is, which nothing here waits for.
        is_kept &= not torch.are_deterministic_algorithms_enabled()
        self._is_begun = is_first
        with torch.cuda.stream(self._stream if is_kept else None):
            allocated: torch.Tensor = self._reduction.allocate(size, dtype=dtype, device=device)
        return allocated

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._reduction(*args, **kwargs)


def _becomes_gradient(dtype: torch.dtype) -> Callable[[Any], bool]:
    """Whether a reduced gradient of this dtype is that of a parameter, and not added to one, cast to another or, as a
    hook of the user's may, freed while the step has not waited for it.
    """

    def becomes(held: Any) -> bool:
        parameter = held.sharded_param
        has_hooks = bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
        return parameter.grad is None and parameter.dtype == dtype and not has_hooks

    return becomes
