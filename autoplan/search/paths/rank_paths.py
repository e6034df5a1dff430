"""Per rank, the chains of `schedule_paths` on which that rank does most: how often each pass of each stage occurs.

From a few rounds of a schedule on, each further round adds the same passes to a chain. So the chains of a long schedule
are those of a short one and a multiple of what one round adds; `_LONG_ROUNDS` rounds are counted one by one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from autoplan.parallel_plan import Mesh
from autoplan.schedules import Action, schedule_of
from autoplan.search.paths.schedule_paths import (
    BACKWARD,
    CARRY,
    CUT,
    FIRST_FORWARD,
    FORWARD,
    INPUTS,
    LAST_BACKWARD,
    LAST_CARRY,
    LAST_WEIGHTS,
    WEIGHTS,
    chains_of,
    path_of,
)

Array = Any  # numpy.ndarray

CARRY_FORWARD = "carry into a forward pass"  # those of CARRY that a forward pass follows
SYMBOLS = (
    FIRST_FORWARD, FORWARD, BACKWARD, LAST_BACKWARD, INPUTS, WEIGHTS, LAST_WEIGHTS, CARRY, LAST_CARRY, CUT,
    CARRY_FORWARD,
)  # fmt: skip
_LONG_ROUNDS = 2  # of pp micro-batches


@dataclass(frozen=True, slots=True)
class RankPaths:
    """The chains of one rank.

    Attributes:
        counts: (path, symbol, stage), in the order of SYMBOLS.
        last_stages: of each path, the stage with whose pass it ends.
    """

    counts: Array
    last_stages: tuple[int, ...]

    def of(self, symbol: str) -> Array:
        """(path, stage): how often it occurs."""
        return self.counts[:, SYMBOLS.index(symbol), :]


def rank_paths(mesh: Mesh) -> tuple[RankPaths, ...]:
    """The chains of each rank of a mesh with several stages per rank."""
    rest = mesh.n_micro_batches % mesh.pp
    n_short = _LONG_ROUNDS * mesh.pp + rest
    if mesh.n_micro_batches <= n_short + mesh.pp:
        return counted_paths(mesh.schedule, mesh.pp, mesh.n_chunks, mesh.n_micro_batches)
    short = counted_paths(mesh.schedule, mesh.pp, mesh.n_chunks, n_short)
    longer = counted_paths(mesh.schedule, mesh.pp, mesh.n_chunks, n_short + mesh.pp)
    n_rounds = (mesh.n_micro_batches - n_short) // mesh.pp
    return tuple(
        replace(one, counts=one.counts + n_rounds * (other.counts - one.counts))
        for one, other in zip(short, longer, strict=True)
    )


@lru_cache(maxsize=256)
def counted_paths(schedule: str, pp: int, n_chunks: int, n_micro_batches: int) -> tuple[RankPaths, ...]:
    """The chains of each rank, counted action by action."""
    mesh = Mesh(pp=pp, n_chunks=n_chunks, n_micro_batches=n_micro_batches, schedule=schedule)
    ordered = schedule_of(mesh)
    found = []
    for rank in range(pp):
        chains = chains_of(mesh, ordered.schedule, rank)
        counts = np.zeros((len(chains), len(SYMBOLS), mesh.n_stages))
        for number, chain in enumerate(chains):
            for (symbol, stage), n_times in path_of(mesh, ordered.ranks, chain).counts:
                counts[number, SYMBOLS.index(symbol), stage] = n_times
            for stage, n_times in _followed_by_forward(chain, ordered.ranks).items():
                counts[number, SYMBOLS.index(CARRY_FORWARD), stage] = n_times
        found.append(RankPaths(counts, tuple(chain[-1].stage for chain in chains)))
    return tuple(found)


def _followed_by_forward(chain: list[Action], ranks: tuple[int, ...]) -> Counter[int]:
    """Per stage, its backward passes after which the same rank begins a forward pass."""
    pairs = zip(chain, chain[1:], strict=False)
    return Counter(
        one.stage
        for one, other in pairs
        if (one.kind, other.kind) == ("B", "F") and ranks[one.stage] == ranks[other.stage]
    )
