"""Meshes with shares of the batch on a mixed cluster, before their micro-batches are counted, each with a bound.

One group with n micro-batches of compute c, communication r in each and R once, optimizer k, takes (`step_bound_s`;
beta, gamma: see `Overlap`)

    max(A + beta B, B + gamma A) + k,     A = n c,   B = n r + R

two lines of n, `slopes_s` and `starts_s` of a family. In t seconds group g does at most n_g(t) micro-batches, the least
of its two lines, and sum_g dp_g size_g n_g(t) must reach the global batch. Without rounding, by any one line per group,

    t >= (global batch + sum_g q_g start_g) / sum_g q_g,      q_g = dp_g size_g / slope_g

What is dear to know is asked for last: compute with nothing sharded, communication per shard degree and dp, then the
compute, optimizer and memory of a micro-batch size under that sharding. `price` must give the same `gather_s` and
`reduce_s` to all micro-batches that have the same layout (`MixedSpace.layout_sizes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product, zip_longest
from math import gcd

import numpy as np

from autoplan.cost.table import CostTable
from autoplan.options import Options
from autoplan.overlap import Overlap
from autoplan.parallel_plan import BatchShare, GroupRanks, Mesh
from autoplan.search.bounds import least_communication_s, least_passes_s, shortfall_bytes
from autoplan.search.meshes import divisors, fixed_int, legal_tensor_degrees
from autoplan.search.mixed.meshes import MixedSpace, allowed_counts
from autoplan.search.ranges import Array
from autoplan.solver.linear_model import INFINITY

FREE_SIZES = 2  # groups at the most that have micro-batch sizes of their own
ROUNDING = 1e-9
LEAST_SLOPE_S = 1e-30  # where there is nothing to do, so that it can be divided by
MOST_AT_ONCE = 100_000  # choices of sizes x rows whose bounds are worked out at once


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


@dataclass(frozen=True, slots=True)
class ShareFamily:
    """Meshes that differ only in `dp` and `sizes`, which have a row for each and a column per group.

    Attributes:
        mesh: what they share; the rest of its fields means nothing.
        slopes_s, starts_s: (row, group, line), see the module docstring.
    """

    mesh: Mesh
    groups: tuple[int, ...]
    dp: Array
    sizes: Array
    slopes_s: Array
    starts_s: Array
    bounds_s: Array

    def most_micro_batches(self, row: int, known_s: float) -> list[float]:
        """Of each group in a step of at most `known_s`."""
        most: list[float] = most_micro_batches(self.slopes_s[row], self.starts_s[row], known_s).tolist()
        return most


def share_families(space: MixedSpace, options: Options, *, known_s: float) -> Iterator[ShareFamily]:
    """Every mesh whose bound is below `known_s`, in a fixed order."""
    for n_groups in range(2, len(space.groups) + 1):
        for groups in combinations(range(len(space.groups)), n_groups):
            for tp in legal_tensor_degrees(space.pipelines, options):
                if fixed_int(options, "tp") not in (None, tp):
                    continue
                dp = _dp_choices(space, options, groups, tp=tp)
                for sharding, way in product(dict(space.pipelines.shardings)[tp], space.pipelines.executions):
                    layout = _Layout.of(space, options, Mesh(tp=tp, sharding=sharding).run_as(way), groups)
                    yield from layout.families(options, dp, known_s=known_s)


def _dp_choices(space: MixedSpace, options: Options, groups: tuple[int, ...], *, tp: int) -> Array:
    """Data-parallel ranks on each group, a row per choice."""
    counts = [[n // tp for n in allowed_counts(space, group, n_groups=len(groups)) if n % tp == 0] for group in groups]
    grid = np.stack(np.meshgrid(*counts, indexing="ij"), axis=-1).reshape(-1, len(groups))
    wanted, all_dp = fixed_int(options, "dp"), grid.sum(axis=1)
    return grid[(all_dp <= space.pipelines.global_batch) & ((all_dp == wanted) if wanted is not None else True)]


def _shardings(
    space: MixedSpace, options: Options, layout: Mesh, groups: tuple[int, ...], dp: Array
) -> Iterator[tuple[Mesh, Array]]:
    """Every ZeRO stage and shard degree, and which rows of `dp` go with it: over all common ranks, or in a host."""
    wanted, wanted_degree = fixed_int(options, "zero"), fixed_int(options, "shard")
    common = np.gcd.reduce(dp, axis=1)
    in_host = gcd(*(space.groups[group].space.n_devices_per_host for group in groups)) // layout.tp
    for stage in space.pipelines.zero_stages:
        if wanted not in (None, stage):
            continue
        for degree in sorted({*common.tolist(), in_host} - {0, 1}) if stage > 0 else [1]:
            is_meant = (common == degree) | ((common % degree == 0) & (degree == in_host)) | (stage == 0)
            if wanted_degree in (None, degree) and is_meant.any():
                yield replace(layout, zero_stage=stage, zero_shard_degree=degree), is_meant


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Micro-batch sizes that go together, as (choice, group): the size, and the least known of c and of k."""

    sizes: Array
    compute_s: Array
    optimizer_s: Array

    def at(self, places: Array | slice) -> _Sizes:
        """Some of the choices."""
        return _Sizes(self.sizes[places], self.compute_s[places], self.optimizer_s[places])


@dataclass(frozen=True, slots=True)
class _Ranks:
    """Data-parallel ranks of one sharding, as (row, group): their number, r and R; beta and gamma per group."""

    dp: Array
    often_s: Array
    once_s: Array
    beta: Array
    gamma: Array

    @classmethod
    def silent(cls, dp: Array) -> _Ranks:
        """Ranks that communicate nothing."""
        nothing = np.zeros(dp.shape[1])
        return cls(dp, np.zeros(dp.shape), np.zeros(dp.shape), nothing, nothing)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Meshes with one tensor-parallel layout, over some groups.

    Attributes:
        sizes: with the least compute there is, that of one micro-batch with nothing sharded.
    """

    space: MixedSpace
    mesh: Mesh
    groups: tuple[int, ...]
    sizes: _Sizes

    @classmethod
    def of(cls, space: MixedSpace, options: Options, mesh: Mesh, groups: tuple[int, ...]) -> _Layout:
        """With every size that the options allow."""
        sizes = _sizes(space.pipelines.global_batch, options)
        is_free = len(groups) <= FREE_SIZES and mesh.tp == 1
        choices = list(product(sizes, repeat=len(groups))) if is_free else [(size,) * len(groups) for size in sizes]
        tables = {size: _tables(space, mesh, groups, (1,) * len(groups), size=size) for size in sizes}
        compute_s = {size: [sum(least_passes_s(table)) for table in own] for size, own in tables.items()}
        found = np.array([[compute_s[size][place] for place, size in enumerate(choice)] for choice in choices])
        return cls(space, mesh, groups, _Sizes(np.array(choices), found, np.zeros(found.shape)))

    def families(self, options: Options, dp: Array, *, known_s: float) -> Iterator[ShareFamily]:
        """One per ZeRO stage and shard degree with which some bound is below `known_s`."""
        if len(dp) > 0:
            dp = np.unique(self._below(self.mesh, self.sizes, _Ranks.silent(dp), known_s=known_s).dp, axis=0)
        for mesh, is_meant in _shardings(self.space, options, self.mesh, self.groups, dp) if len(dp) > 0 else ():
            ranks = self._ranks(mesh, dp[is_meant])
            likely = self._below(mesh, self.sizes, ranks, known_s=known_s)
            own = self._below(mesh, self._sizes_of(mesh, likely), ranks, known_s=known_s)
            if len(own.bounds_s) > 0:
                yield own

    def _ranks(self, mesh: Mesh, dp: Array) -> _Ranks:
        """These with the least communication of each; that of a group is asked for once per number of ranks."""
        kinds = [np.unique(column).tolist() for column in dp.T]
        found: list[dict[int, tuple[float, float]]] = [{} for _ in kinds]
        sizes = self.space.layout_sizes if mesh.tp > 1 else self.space.layout_sizes[:1]
        overlaps: list[Overlap] = []
        for counts, size in product(zip_longest(*kinds), sizes):
            asked = [count or own[-1] for count, own in zip(counts, kinds, strict=True)]
            tables = _tables(self.space, mesh, self.groups, asked, size=size)
            overlaps = [table.overlap for table in tables]  # those of the sharding, whatever the number of ranks
            for known, count, table in zip(found, asked, tables, strict=True):
                often_s, once_s = least_communication_s(table)
                before_s = known.get(count, (often_s, once_s))
                known[count] = min(before_s[0], often_s), min(before_s[1], once_s)
        between_s = np.array([[known[n] for known, n in zip(found, row, strict=True)] for row in dp.tolist()])
        beta = np.array([own.communication_exposed for own in overlaps])
        gamma = np.array([own.compute_exposed for own in overlaps])
        return _Ranks(dp, between_s[:, :, 0], between_s[:, :, 1], beta, gamma)

    def _sizes_of(self, mesh: Mesh, likely: ShareFamily) -> _Sizes:
        """The choices of sizes of a family with what they need under its sharding; none with which some group is full.

        With one micro-batch a group needs the least memory and compute, and has no gradients to add up; with several
        its host may be further ahead at the end.
        """
        degrees, compute_s, optimizer_s = [mesh.zero_shard_degree] * len(self.groups), {}, {}
        for size in np.unique(likely.sizes).tolist():
            tables = _tables(self.space, mesh, self.groups, degrees, size=size)
            fits = np.array([shortfall_bytes(table) == 0 for table in tables])
            compute_s[size] = np.where(fits, [sum(least_passes_s(table)) for table in tables], INFINITY)
            optimizer_s[size] = np.array(list(map(_least_once_s, tables)))
            if fits.any():
                repeated = _tables(self.space, mesh, self.groups, degrees, size=size, n_micro_batches=2)
                optimizer_s[size] = np.minimum(optimizer_s[size], list(map(_least_once_s, repeated)))
        choices = np.unique(likely.sizes, axis=0)
        found = [
            np.array([[own[size][place] for place, size in enumerate(choice)] for choice in choices.tolist()])
            for own in (compute_s, optimizer_s)
        ]
        return _Sizes(choices, *(values.reshape(choices.shape) for values in found)).at(
            np.isfinite(found[0].reshape(choices.shape)).all(axis=1)
        )

    def _below(self, mesh: Mesh, sizes: _Sizes, ranks: _Ranks, *, known_s: float) -> ShareFamily:
        """The meshes with these sizes and ranks that `known_s` does not rule out."""
        n_at_once = max(1, MOST_AT_ONCE // len(ranks.dp))
        starts = range(0, max(1, len(sizes.sizes)), n_at_once)
        parts = [self._part(sizes.at(slice(start, start + n_at_once)), ranks, known_s=known_s) for start in starts]
        return ShareFamily(mesh, self.groups, *map(np.concatenate, zip(*parts, strict=True)))

    def _part(self, sizes: _Sizes, ranks: _Ranks, *, known_s: float) -> tuple[Array, ...]:
        """The arrays of `ShareFamily`."""
        batch = self.space.pipelines.global_batch
        compute_s, often_s, once_s = sizes.compute_s[:, None], ranks.often_s, ranks.once_s
        # over (choice, row, group, line)
        slopes_s = np.stack([compute_s + ranks.beta * often_s, often_s + ranks.gamma * compute_s], axis=-1)
        starts_s = (
            np.stack(np.broadcast_arrays(ranks.beta * once_s, once_s), axis=-1) + sizes.optimizer_s[:, None, :, None]
        )
        slopes_s = np.maximum(slopes_s, LEAST_SLOPE_S)
        samples = sizes.sizes[:, None] * ranks.dp
        most = np.minimum(most_micro_batches(slopes_s, starts_s, known_s), batch)
        is_enough = (most >= 1).all(axis=2) & ((samples * most).sum(axis=2) >= batch)
        bounds_s = np.maximum((slopes_s + starts_s).max(axis=(2, 3)), _least_s(samples, slopes_s, starts_s, batch))
        choice, row = np.nonzero((samples.sum(axis=2) <= batch) & is_enough & (bounds_s < known_s))
        kept = choice, row
        return ranks.dp[row], sizes.sizes[choice], slopes_s[kept], starts_s[kept], bounds_s[kept]


def most_micro_batches(slopes_s: Array, starts_s: Array, known_s: float) -> Array:
    """Over (..., group, line): of each group in a step of at most `known_s`."""
    return np.floor(((known_s - starts_s) / slopes_s).min(axis=-1) * (1.0 + ROUNDING))


def _least_s(samples: Array, slopes_s: Array, starts_s: Array, batch: int) -> Array:
    """The bound of the module docstring, the largest of any one line per group."""
    least_s, n_groups = np.zeros(samples.shape[:2]), samples.shape[2]
    for lines in product(range(2), repeat=n_groups):
        slope_s, start_s = (values[:, :, range(n_groups), lines] for values in (slopes_s, starts_s))
        rates = samples / slope_s
        least_s = np.maximum(least_s, (batch + (rates * start_s).sum(axis=2)) / rates.sum(axis=2))
    return least_s


def _sizes(batch: int, options: Options) -> tuple[int, ...]:
    wanted, largest = fixed_int(options, "micro_batch"), options.max_micro_batch_size
    if wanted is not None:
        return (wanted,)
    return tuple(size for size in divisors(batch) if largest is None or size <= largest)


def _tables(
    space: MixedSpace, mesh: Mesh, groups: tuple[int, ...], dps: Sequence[int], *, size: int, n_micro_batches: int = 1
) -> tuple[CostTable, ...]:
    """Of each group, with so many data-parallel ranks on it and such micro-batches."""
    shares = tuple(BatchShare(dp, size, n_micro_batches) for dp in dps)
    return space.price(mesh_of(mesh, shares), tuple(GroupRanks(group, 1) for group in groups)).rank_tables


def _least_once_s(table: CostTable) -> float:
    return table.per_step_s + sum(min(cost.optimizer_s for cost in table.costs[kind]) for kind in table.kinds)
