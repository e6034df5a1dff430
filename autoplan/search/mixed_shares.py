"""Data parallelism over several groups of a mixed cluster, each of which takes its own share of the batch.

    sum over groups g of  dp_g x size_g x n_g = global batch       (size_g samples in each of n_g micro-batches)

tp, sharding and ZeRO are the same everywhere, pp is 1, and no shard group spans two groups of hosts. Micro-batch sizes
are divisors of the global batch; under tensor parallelism, whose layout may depend on them, and with three groups or
more they are the same in all. With c_g the least compute of a micro-batch and k_g the least time of the optimizer, step
>= n_g c_g + k_g on every group, so whatever the n_g are

    step >= (global batch + sum_g r_g k_g) / sum_g r_g,      r_g = dp_g x size_g / c_g

Meshes without their n_g wait in the order of this bound (`_Open`). The first one is opened into those with n_g, which
wait in the order of `step_bound_s` of their slowest group. The queue keeps what `known_s` cannot rule out.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import gcd

import numpy as np

from autoplan.cost.table import CostTable
from autoplan.options import BATCH_NORMS, GRAD_COMPRESSIONS, Options
from autoplan.parallel_plan import BatchShare, GroupRanks, Mesh
from autoplan.search.bounds import least_compute_s, shortfall_bytes, step_bound_s
from autoplan.search.linear_model import INFINITY
from autoplan.search.meshes import divisors, fixed, fixed_int, legal_tensor_degrees
from autoplan.search.mixed_meshes import Groups, MixedSpace, allowed_counts
from autoplan.search.ranges import Array

FREE_SIZES = 2  # groups at the most that have micro-batch sizes of their own


@dataclass(frozen=True, slots=True)
class _Open:
    """Meshes that differ only in `dp`, which has a row for each and a column per group; their n_g are open.

    Attributes:
        mesh: what they share; the rest of its fields means nothing.
        sizes: micro-batch size of each group.
        compute_s: of a micro-batch on each group, at the least.
    """

    mesh: Mesh
    groups: tuple[int, ...]
    sizes: tuple[int, ...]
    compute_s: tuple[float, ...]
    dp: Array
    bounds_s: Array


class ShareQueue:
    """The meshes of the space whose bounds are below `known_s`, in the order of these."""

    def __init__(self, space: MixedSpace, options: Options, *, known_s: float) -> None:
        self._space = space
        self._open = tuple(_open_meshes(space, options, known_s=known_s)) if _are_allowed(options) else ()
        numbers = np.repeat(np.arange(len(self._open)), [len(own.bounds_s) for own in self._open])
        rows = np.concatenate([np.zeros(0, dtype=int), *(np.arange(len(own.bounds_s)) for own in self._open)])
        bounds_s = np.concatenate([np.zeros(0), *(own.bounds_s for own in self._open)])
        order = np.argsort(bounds_s, kind="stable")
        self._bounds_s, self._places = bounds_s[order], list(zip(numbers[order], rows[order], strict=True))
        self._n_opened = 0
        self._waiting: list[tuple[float, int, Mesh, Groups]] = []
        self.n_meshes = 0

    @property
    def bound_s(self) -> float:
        """No mesh left is faster; INFINITY when none is left."""
        waiting_s = self._waiting[0][0] if self._waiting else INFINITY
        return min(waiting_s, self._next_open_s)

    @property
    def _next_open_s(self) -> float:
        return float(self._bounds_s[self._n_opened]) if self._n_opened < len(self._bounds_s) else INFINITY

    def pop(self, *, known_s: float) -> tuple[float, Mesh, Groups] | None:
        """The mesh with the least bound, and where its shares are; None when no bound is below `known_s`."""
        while self._next_open_s < known_s and self._next_open_s <= self.bound_s:
            number, row = self._places[self._n_opened]
            self._n_opened += 1
            for bound_s, mesh, groups in self._opened(self._open[number], int(row), known_s=known_s):
                heapq.heappush(self._waiting, (bound_s, self.n_meshes, mesh, groups))
                self.n_meshes += 1
        if not self._waiting or self._waiting[0][0] >= known_s:
            return None
        bound_s, _, mesh, groups = heapq.heappop(self._waiting)
        return bound_s, mesh, groups

    def _opened(self, own: _Open, row: int, *, known_s: float) -> Iterator[tuple[float, Mesh, Groups]]:
        batch, groups = self._space.pipelines.global_batch, tuple(GroupRanks(group, 1) for group in own.groups)
        dps = [int(dp) for dp in own.dp[row]]
        steps = [dp * size for dp, size in zip(dps, own.sizes, strict=True)]
        most = [batch if known_s == INFINITY else int(known_s / one_s) for one_s in own.compute_s]
        for counts in micro_batch_counts(batch, steps, most):
            shares = tuple(map(BatchShare, dps, own.sizes, counts))
            mesh = mesh_of(own.mesh, shares)
            bound_s = max(map(step_bound_s, self._space.price(mesh, groups).rank_tables))
            if bound_s < known_s:
                yield bound_s, mesh, groups


def mesh_of(like: Mesh, shares: tuple[BatchShare, ...]) -> Mesh:
    """The mesh that has these shares of the batch and is else like another one."""
    first = shares[0]
    return replace(
        like,
        dp=sum(share.dp for share in shares),
        micro_batch_size=first.micro_batch_size,
        n_micro_batches=first.n_micro_batches,
        shares=shares,
    )


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


def _are_allowed(options: Options) -> bool:
    """Not with what ranks do together in every micro-batch, nor with compressed gradients."""
    is_alone = fixed(options, "batch_norm") in (None, BATCH_NORMS[0])
    is_whole = fixed(options, "grad_compression") in (None, GRAD_COMPRESSIONS[0])
    return is_alone and is_whole and fixed_int(options, "pp") in (None, 1)


def _open_meshes(space: MixedSpace, options: Options, *, known_s: float) -> Iterator[_Open]:
    numbers = range(len(space.groups))
    for n_groups in range(2, len(space.groups) + 1):
        for groups in combinations(numbers, n_groups):
            for tp in legal_tensor_degrees(space.pipelines, options):
                if fixed_int(options, "tp") not in (None, tp):
                    continue
                dp = _dp_choices(space, options, groups, tp=tp)
                for sharding in dict(space.pipelines.shardings)[tp]:
                    yield from _of_layout(space, options, Mesh(tp=tp, sharding=sharding), groups, dp, known_s=known_s)


def _dp_choices(space: MixedSpace, options: Options, groups: tuple[int, ...], *, tp: int) -> Array:
    """Data-parallel ranks on each group, a row per choice."""
    counts = [[n // tp for n in allowed_counts(space, group, n_groups=len(groups)) if n % tp == 0] for group in groups]
    grid = np.stack(np.meshgrid(*counts, indexing="ij"), axis=-1).reshape(-1, len(groups))
    wanted, all_dp = fixed_int(options, "dp"), grid.sum(axis=1)
    return grid[(all_dp <= space.pipelines.global_batch) & ((all_dp == wanted) if wanted is not None else True)]


def _of_layout(
    space: MixedSpace, options: Options, layout: Mesh, groups: tuple[int, ...], dp: Array, *, known_s: float
) -> Iterator[_Open]:
    """Those of one tensor-parallel layout: with every ZeRO stage, shard degree and size of the micro-batches."""
    pipelines, wanted, wanted_degree = space.pipelines, fixed_int(options, "zero"), fixed_int(options, "shard")
    dp = dp[pipelines.global_batch / (dp @ _most_samples_per_s(space, options, layout, groups)) < known_s]
    if len(dp) == 0:
        return
    common = np.gcd.reduce(dp, axis=1)
    in_host = gcd(*(space.groups[group].space.n_devices_per_host for group in groups)) // layout.tp
    stages = [stage for stage in pipelines.zero_stages if wanted in (None, stage)]
    for stage in stages:
        degrees = sorted({*common.tolist(), in_host} - {0, 1}) if stage > 0 else [1]
        for degree in degrees:
            if wanted_degree not in (None, degree):
                continue
            is_meant = (common == degree) | ((common % degree == 0) & (degree == in_host)) | (stage == 0)
            if is_meant.any():
                mesh = replace(layout, zero_stage=stage, zero_shard_degree=degree)
                yield from _of_mesh(space, options, mesh, groups, dp[is_meant], known_s=known_s)


def _most_samples_per_s(space: MixedSpace, options: Options, layout: Mesh, groups: tuple[int, ...]) -> Array:
    """Of one data-parallel rank on each group by compute alone, with the best micro-batches; nothing is sharded."""
    rates = []
    for size in _sizes(space.pipelines.global_batch, options):
        mesh = mesh_of(layout, (BatchShare(1, size, 1),) * len(groups))
        tables = space.price(mesh, tuple(GroupRanks(group, 1) for group in groups)).rank_tables
        rates.append([size / sum(least_compute_s(table)) for table in tables])
    return np.array(rates).max(axis=0)


@dataclass(frozen=True, slots=True)
class _Least:
    """What one group needs at the least, whatever its n_g: c_g and k_g of the module docstring."""

    compute_s: float
    once_s: float


def _of_mesh(
    space: MixedSpace, options: Options, mesh: Mesh, groups: tuple[int, ...], dp: Array, *, known_s: float
) -> Iterator[_Open]:
    batch = space.pipelines.global_batch
    least = {size: _least(space, mesh, groups, size) for size in _sizes(batch, options) if size * int(dp.min()) < batch}
    is_free = len(groups) <= FREE_SIZES and mesh.tp == 1
    for sizes in product(least, repeat=len(groups)) if is_free else [(size,) * len(groups) for size in least]:
        own = [least[size][place] for place, size in enumerate(sizes)]
        known = [item for item in own if item is not None]
        if len(known) < len(own):
            continue
        fits = (dp @ np.array(sizes)) <= batch
        rates = dp * np.array(sizes) / np.array([item.compute_s for item in known])
        bounds_s = (batch + rates @ np.array([item.once_s for item in known])) / rates.sum(axis=1)
        kept = fits & (bounds_s < known_s)
        if kept.any():
            compute_s = tuple(item.compute_s for item in known)
            yield _Open(mesh, groups, sizes, compute_s, dp[kept], bounds_s[kept])


def _sizes(batch: int, options: Options) -> tuple[int, ...]:
    wanted, largest = fixed_int(options, "micro_batch"), options.max_micro_batch_size
    if wanted is not None:
        return (wanted,)
    return tuple(size for size in divisors(batch) if largest is None or size <= largest)


def _least(space: MixedSpace, mesh: Mesh, groups: tuple[int, ...], size: int) -> list[_Least | None]:
    """Of each group with micro-batches of this size; None where the model does not fit."""

    def tables(n_micro_batches: int) -> tuple[CostTable, ...]:
        shares = (BatchShare(mesh.zero_shard_degree, size, n_micro_batches),) * len(groups)
        return space.price(mesh_of(mesh, shares), tuple(GroupRanks(group, 1) for group in groups)).rank_tables

    single = tables(1)  # needs the least memory, and has no gradients to add up
    fits = [shortfall_bytes(table) == 0 for table in single]
    once_s = [_least_once_s(table) for table in single]
    if mesh.zero_stage < 2 and any(fits):  # gradients that were added up may take less time to be copied
        once_s = list(map(min, once_s, (_least_once_s(table) for table in tables(2))))
    own = zip(single, once_s, fits, strict=True)
    return [_Least(sum(least_compute_s(table)), least_s) if is_held else None for table, least_s, is_held in own]


def _least_once_s(table: CostTable) -> float:
    return table.per_step_s + sum(min(cost.optimizer_s for cost in table.costs[kind]) for kind in table.kinds)
