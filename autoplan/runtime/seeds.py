"""Seeds: every stream of random numbers of a run, from the one seed that the user gives.

initial weights      `seed` itself, alike on all ranks
training, dropout    `training_seed`: one per data-parallel rank and pipeline rank, alike on tensor-parallel ranks;
shards of those draw `mixed_seed(state, rank)`, see random.py
after a resume       without saved generators (another mesh): `resumed_seed`
batch of a step      `batch_seed`, where the model file makes batches instead of reading a dataset
order of an epoch    s = `mixed_seed(seed, epoch)`
a sample of it       `mixed_seed(scrambled(s), sample)`; of s, sample 1 would draw what sample 0 does an epoch later
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .config import Config
from .mesh import RankMesh

N_SEEDS = 2**63
_FAR = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: neighbours become far apart
_STEPS_APART = 1_000_003  # seeds of users are small and close


def training_seed(seed: int, *, config: Config, mesh: RankMesh) -> int:
    """What dropout and its like begin with on a rank."""
    return seed + 1 + mesh.dp_rank * config.pp + mesh.pp_rank


def resumed_seed(first_seed: int, *, n_steps: int) -> int:
    """What a rank that began with `first_seed` goes on with after `n_steps`, so that it draws nothing twice."""
    return (first_seed + _STEPS_APART * n_steps) % N_SEEDS


def batch_seed(seed: int, *, step: int) -> int:
    """What the batch of a step is made from."""
    return (seed * _STEPS_APART + step) % N_SEEDS


def mixed_seed(seed: int, number: int) -> int:
    """A seed for one of many things that all have `seed`, far from those of the others and from `seed`."""
    return (seed + (number + 1) * _FAR) % N_SEEDS


def scrambled(seed: int) -> int:
    """A seed whose neighbours, and those of `seed`, have nothing to do with each other.

    Source: the finalizer of SplitMix64, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    seed = (seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    seed = (seed ^ (seed >> 27)) * 0x94D049BB133111EB % 2**64
    return (seed ^ (seed >> 31)) % N_SEEDS


@contextmanager
def seeding_the_host() -> Iterator[Callable[[int], Any]]:
    """Gives a function that seeds all that code on the host draws from; in the end all draw on as if it had not.

    These are the generators of torch, of Python's `random`, and of NumPy where somebody has imported it.
    """
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy and numpy.random.get_state()

    def seed_all(seed: int) -> None:
        torch.default_generator.manual_seed(seed)  # of the CPU only
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)

    with torch.random.fork_rng(devices=[]):
        try:
            yield seed_all
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def host_state() -> tuple[str, ...]:
    """What the same generators would draw next, as text: equal texts mean that nothing was drawn in between."""
    numpy = sys.modules.get("numpy")
    numpy_state = numpy and [part.tolist() if hasattr(part, "tolist") else part for part in numpy.random.get_state()]
    return str(random.getstate()), str(torch.default_generator.get_state().tolist()), str(numpy_state)
