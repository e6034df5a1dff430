"""Random numbers of tensor-parallel ranks: shards of a value drop elements of their own, and can drop them again.

All ranks of the tensor-parallel axis hold their default generator in one state, so that values that are whole on every
rank are dropped alike. A shard needs other numbers on each rank. Here they follow from that common state and the rank:

    state s of the default generator  -->  numbers of f(s, rank)      s advances alike on all ranks

and from nothing else, so recomputation, which sets the state back, draws them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from ..seeds import N_SEEDS, mixed_seed


def rank_dropout(x: torch.Tensor, p: float, training: bool, tp: ProcessGroup | None) -> torch.Tensor:
    """`F.dropout` of this rank's shard, with a mask that differs on each rank of `tp`."""
    if not training or p == 0.0 or tp is None:
        return F.dropout(x, p, training)
    with numbers_of_rank(x.device, tp.rank()):
        return F.dropout(x, p, training)


@contextmanager
def numbers_of_rank(device: torch.device, rank: int) -> Iterator[None]:
    """Inside, the default generator of the device gives this rank's numbers; after, it has advanced as on all ranks."""
    numbers = _cuda_numbers if device.type == "cuda" else _cpu_numbers
    with numbers(device, rank):
        yield


@contextmanager
def _cuda_numbers(device: torch.device, rank: int) -> Iterator[None]:
    """The numbers of another seed at the same offset, which equal shapes advance alike; nothing waits for the GPU."""
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.manual_seed(mixed_seed(seed, rank))
    generator.set_offset(offset)
    try:
        yield
    finally:
        offset = generator.get_offset()
        generator.manual_seed(seed)
        generator.set_offset(offset)


@contextmanager
def _cpu_numbers(device: torch.device, rank: int) -> Iterator[None]:
    """The numbers of a seed that is drawn from the generator, which goes on after that one number."""
    generator = torch.default_generator
    seed = int(torch.randint(N_SEEDS - 1, (), generator=generator))
    state = generator.get_state()
    generator.manual_seed(mixed_seed(seed, rank))
    try:
        yield
    finally:
        generator.set_state(state)
