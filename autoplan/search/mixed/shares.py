"""Data parallelism over several groups of a mixed cluster, each of which takes its own share of the batch.

    sum over groups g of  dp_g x size_g x n_g = global batch       (size_g samples in each of n_g micro-batches)

tp, sharding and ZeRO are the same everywhere, pp is 1, and no shard group spans two groups of hosts. Micro-batch sizes
are divisors of the global batch; under tensor parallelism, whose layout may depend on them, and with three groups or
more they are the same in all. Meshes without their n_g wait in the order of their bounds (`share_families`). The first
one is opened into those with n_g, which wait in the order of `step_bound_s` of their slowest group. The queue keeps
what `known_s` cannot rule out.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from autoplan.options import BATCH_NORMS, GRAD_COMPRESSIONS, Options
from autoplan.parallel_plan import BatchShare, GroupRanks, Mesh
from autoplan.search.bounds import step_bound_s
from autoplan.search.meshes import fixed, fixed_int
from autoplan.search.mixed.meshes import Groups, MixedSpace
from autoplan.search.mixed.share_families import ShareFamily, mesh_of, share_families
from autoplan.solver.linear_model import INFINITY


class ShareQueue:
    """The meshes of the space whose bounds are below `known_s`, in the order of these."""

    def __init__(self, space: MixedSpace, options: Options, *, known_s: float) -> None:
        self._space = space
        self._families = tuple(share_families(space, options, known_s=known_s)) if _are_allowed(space, options) else ()
        numbers = np.repeat(np.arange(len(self._families)), [len(own.bounds_s) for own in self._families])
        rows = np.concatenate([np.zeros(0, dtype=int), *(np.arange(len(own.bounds_s)) for own in self._families)])
        bounds_s = np.concatenate([np.zeros(0), *(own.bounds_s for own in self._families)])
        order = np.argsort(bounds_s, kind="stable")
        self._bounds_s, self._places = bounds_s[order], list(zip(numbers[order], rows[order], strict=True))
        self._n_counted = 0
        self._waiting: list[tuple[float, int, Mesh, Groups]] = []
        self.n_meshes = 0

    @property
    def bound_s(self) -> float:
        """No mesh left is faster; INFINITY when none is left."""
        waiting_s = self._waiting[0][0] if self._waiting else INFINITY
        return min(waiting_s, self._next_uncounted_s)

    @property
    def _next_uncounted_s(self) -> float:
        return float(self._bounds_s[self._n_counted]) if self._n_counted < len(self._bounds_s) else INFINITY

    def pop(self, *, known_s: float) -> tuple[float, Mesh, Groups] | None:
        """The mesh with the least bound, and where its shares are; None when no bound is below `known_s`."""
        while self._next_uncounted_s < known_s and self._next_uncounted_s <= self.bound_s:
            number, row = self._places[self._n_counted]
            for bound_s, mesh, groups in tuple(self._counted(self._families[number], int(row), known_s=known_s)):
                heapq.heappush(self._waiting, (bound_s, self.n_meshes, mesh, groups))
                self.n_meshes += 1
            self._n_counted += 1
        if not self._waiting or self._waiting[0][0] >= known_s:
            return None
        bound_s, _, mesh, groups = heapq.heappop(self._waiting)
        return bound_s, mesh, groups

    def _counted(self, own: ShareFamily, row: int, *, known_s: float) -> Iterator[tuple[float, Mesh, Groups]]:
        batch, groups = self._space.pipelines.global_batch, tuple(GroupRanks(group, 1) for group in own.groups)
        dps, sizes = own.dp[row].tolist(), own.sizes[row].tolist()
        steps = [dp * size for dp, size in zip(dps, sizes, strict=True)]
        most = [int(min(batch, n)) for n in own.most_micro_batches(row, known_s)]
        for counts in micro_batch_counts(batch, steps, most):
            mesh = mesh_of(own.mesh, tuple(map(BatchShare, dps, sizes, counts)))
            bound_s = max(map(step_bound_s, self._space.price(mesh, groups).rank_tables))
            if bound_s < known_s:
                yield max(bound_s, float(own.bounds_s[row])), mesh, groups


def micro_batch_counts(total: int, steps: Sequence[int], most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every n with  sum of steps x n = total  and 1 <= n <= most."""
    if len(steps) == 1:
        if total % steps[0] == 0 and 1 <= total // steps[0] <= most[0]:
            yield (total // steps[0],)
        return
    others_most = sum(step * n for step, n in zip(steps[1:], most[1:], strict=True))
    first_least = max(1, -(-(total - others_most) // steps[0]))
    for first in range(first_least, min(most[0], (total - sum(steps[1:])) // steps[0]) + 1):
        for rest in micro_batch_counts(total - first * steps[0], steps[1:], most[1:]):
            yield (first, *rest)


def _are_allowed(space: MixedSpace, options: Options) -> bool:
    """Not with what ranks do together in every micro-batch, nor with compressed gradients."""
    is_alone = (fixed(options, "batch_norm") or space.batch_norm) == BATCH_NORMS[0]
    is_whole = fixed(options, "grad_compression") in (None, GRAD_COMPRESSIONS[0])
    return is_alone and is_whole and all(fixed_int(options, name) in (None, 1) for name in ("pp", "stages_per_rank"))
