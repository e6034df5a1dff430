"""Seeds: every stream of random numbers of a run, from the one seed that the user gives.

initial weights      `seed` itself, alike on all ranks
training, dropout    `training_seed`: one per data-parallel rank and pipeline rank, alike on tensor-parallel ranks;
shards of those draw `mixed_seed(state, rank)`, see random.py
after a resume       without saved generators (another mesh): `resumed_seed`
batch of a step      `batch_seed`, where the model file makes batches instead of reading a dataset
order of an epoch    s = `mixed_seed(seed, epoch)`; of that, each sample draws `mixed_seed(s, sample)`
"""

from __future__ import annotations

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
    return seed * _STEPS_APART + step


def mixed_seed(seed: int, number: int) -> int:
    """A seed for one of many things that all have `seed`, far from those of the others and from `seed`."""
    return (seed + (number + 1) * _FAR) % N_SEEDS
