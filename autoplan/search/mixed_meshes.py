"""The pipelines over several groups of a mixed cluster, each with a bound on its step time.

A pipeline over ranks of several kinds has the bound (`_bounds_s`; per micro-batch f_gk and b_gk forward and backward of
segment k on group g, p_g ranks there, M micro-batches, c_gk = (M - 1) b_gk + (M - pp) f_gk, C_g its sum over k)

    per_step + sum_k min_g (f_gk + b_gk) + sum_k min_g (c_gk / C_g) / sum_g (p_g / C_g)

since the first micro-batch goes there and back through all segments, and the busiest rank has at least the average of
all, each weighted by its speed.

Like `device_counts`, the ranks of a group fill one host in part, or any number of whole hosts with few significant
bits, so the plans of a larger cluster include those of a smaller one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product

import numpy as np

from autoplan.cost.table import CostTable, SegmentCost, backward_s, forward_s
from autoplan.options import PLAIN_SCHEDULE, Options
from autoplan.parallel_plan import GroupRanks, Mesh, Plan, StagePlan
from autoplan.search.bounds import memory_room_bytes
from autoplan.search.linear_model import INFINITY
from autoplan.search.meshes import (
    SearchSpace,
    device_counts,
    divisors,
    fixed,
    fixed_int,
    legal_tensor_degrees,
    micro_batch_sizes,
    significant_bits,
    zero_choices,
)
from autoplan.search.ranges import Array

Groups = tuple[GroupRanks, ...]
SCHEDULES = ("1f1b", "gpipe")
# Of the numbers of hosts tried per group, by how many groups there are: with more groups there are more combinations.
SIGNIFICANT_BITS = {2: 4, 3: 2}
N_MULTIPLES = 4  # steps by which `_whole_segments_s` looks for the least time
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class GroupSpace:
    """One group alone, as `search` sees it."""

    space: SearchSpace
    price: Callable[[Mesh], CostTable]
    make_plan: Callable[[Mesh, tuple[StagePlan, ...]], Plan]


@dataclass(frozen=True, slots=True)
class MixedSpace:
    """What may be searched on a mixed cluster.

    Attributes:
        groups: each group alone.
        pipelines: batch, segments, cuts and shardings of pipelines over several groups; as many devices per host as
            divide those of every group.
        price: the table of a mesh whose pipeline ranks, or shares of the batch, are on these groups.
        make_plan: likewise its plan.
    """

    groups: tuple[GroupSpace, ...]
    pipelines: SearchSpace
    price: Callable[[Mesh, Groups], CostTable]
    make_plan: Callable[[Mesh, Groups, tuple[StagePlan, ...]], Plan]


@dataclass(frozen=True, slots=True)
class Family:
    """Meshes that differ only in their pipeline ranks: one per row of `n_ranks`, which has a column per group.

    Attributes:
        mesh: one of them, with one rank on each group.
        groups: indices of the groups, in the order of the pipeline.
        bounds_s: of each row; INFINITY where the model is proved not to fit.
        short_bytes: of each row, what its average rank lacks at the least; not above 0 where that is not proved.
    """

    mesh: Mesh
    groups: tuple[int, ...]
    n_ranks: Array
    bounds_s: Array
    short_bytes: Array

    def member(self, row: int) -> tuple[Mesh, Groups]:
        """One of the meshes, and where its ranks are."""
        counts = tuple(int(count) for count in self.n_ranks[row])
        ranks = tuple(GroupRanks(group, count) for group, count in zip(self.groups, counts, strict=True))
        return replace(self.mesh, pp=sum(counts)), ranks


class MeshQueue:
    """The pipelines that may fit, in order of their bounds; there are millions, so they are arrays."""

    def __init__(self, own: tuple[Family, ...]) -> None:
        bounds_s = np.concatenate([np.zeros(0), *(family.bounds_s for family in own)])
        numbers = np.repeat(np.arange(len(own)), [len(family.bounds_s) for family in own])
        rows = np.concatenate([np.zeros(0, dtype=int), *(np.arange(len(family.bounds_s)) for family in own)])
        order = np.argsort(bounds_s, kind="stable")[: np.isfinite(bounds_s).sum()]
        self._bounds_s, self._numbers, self._rows = bounds_s[order], numbers[order], rows[order]
        self._n_done = 0

    def first(self) -> tuple[float, int, int] | None:
        """(bound, family, row) of the first one left; None when none is."""
        if self._n_done == len(self._rows):
            return None
        place = self._n_done
        return float(self._bounds_s[place]), int(self._numbers[place]), int(self._rows[place])

    def drop_first(self) -> None:
        """The first one is done."""
        self._n_done += 1


def families(space: MixedSpace, options: Options) -> Iterator[Family]:
    """Every pipeline over several groups that the options allow, in a fixed order."""
    pipelines, wanted_tp, wanted_dp = space.pipelines, fixed_int(options, "tp"), fixed_int(options, "dp")
    n_most = max(group.space.n_devices for group in space.groups)
    orders = [
        order for size in range(2, len(space.groups) + 1) for order in permutations(range(len(space.groups)), size)
    ]
    tp_degrees = [tp for tp in legal_tensor_degrees(pipelines, options) if wanted_tp in (None, tp)]
    dp_degrees = [dp for dp in divisors(pipelines.global_batch) if dp <= n_most and wanted_dp in (None, dp)]
    for tp, dp, order in product(tp_degrees, dp_degrees, orders):
        n_ranks = _rank_counts(space, options, order, n_devices=dp * tp)
        if len(n_ranks) > 0:
            yield from _families_of(space, options, order, n_ranks, tp=tp, dp=dp)


def allowed_counts(space: MixedSpace, group: int, *, n_groups: int) -> list[int]:
    """How many devices of a group a plan over `n_groups` groups may use."""
    own, n_bits = space.groups[group].space, SIGNIFICANT_BITS.get(n_groups, 1)
    hosts = ((count, math.ceil(count / own.n_devices_per_host)) for count in device_counts(own))
    return [count for count, n in hosts if significant_bits(n) <= n_bits or count == own.n_devices]


def _rank_counts(space: MixedSpace, options: Options, order: tuple[int, ...], *, n_devices: int) -> Array:
    """How many ranks of `n_devices` devices each group may have, one column per group of the order."""
    n_pieces, wanted = space.pipelines.n_pieces, fixed_int(options, "pp")
    counts = [allowed_counts(space, group, n_groups=len(order)) for group in order]
    choices = [[count // n_devices for count in own if count % n_devices == 0] for own in counts]
    grid = np.stack(np.meshgrid(*choices, indexing="ij"), axis=-1).reshape(-1, len(order))
    stages = grid.sum(axis=1)
    return grid[(stages <= n_pieces) & ((stages == wanted) if wanted is not None else True)]


def _families_of(
    space: MixedSpace, options: Options, order: tuple[int, ...], n_ranks: Array, *, tp: int, dp: int
) -> Iterator[Family]:
    pipelines, wanted = space.pipelines, fixed(options, "schedule")
    sizes = micro_batch_sizes(pipelines, options, dp=dp)
    zeros = zero_choices(pipelines, options, tp=tp, dp=dp)
    for sharding, size, (zero_stage, shard_degree) in product(dict(pipelines.shardings)[tp], sizes, zeros):
        mesh = Mesh(
            pp=len(order),
            dp=dp,
            tp=tp,
            zero_stage=zero_stage,
            zero_shard_degree=shard_degree,
            micro_batch_size=size,
            n_micro_batches=pipelines.global_batch // dp // size,
            sharding=sharding,
        )
        table = space.price(mesh, tuple(GroupRanks(group, 1) for group in order))
        for schedule in SCHEDULES:
            if schedule not in pipelines.schedules or wanted not in (None, schedule, PLAIN_SCHEDULE):
                continue
            is_enough = n_ranks.sum(axis=1) <= mesh.n_micro_batches  # micro-batches for 1f1b
            possible = n_ranks[is_enough] if schedule == "1f1b" else n_ranks
            if (schedule, wanted) == ("gpipe", PLAIN_SCHEDULE):
                possible = n_ranks[~is_enough]
            if len(possible) > 0:
                own = replace(mesh, schedule=schedule)
                short_bytes = _short_bytes(table, possible)
                bounds_s = np.where(short_bytes > 0.0, INFINITY, _bounds_s(table, own, possible))
                yield Family(own, order, possible, bounds_s, short_bytes)


def _bounds_s(table: CostTable, mesh: Mesh, n_ranks: Array) -> Array:
    """The bound of the module docstring, per row of `n_ranks`; `table` has one rank on each group."""
    tables = [table.at_rank(rank) for rank in range(mesh.pp)]
    n_of_kind = np.array([table.kinds.count(kind) for kind in range(len(table.costs))], dtype=float)
    forward, backward = _by_kind(tables, forward_s), _by_kind(tables, backward_s)  # [group, kind]
    n = mesh.n_micro_batches
    n_forwards = np.full(len(n_ranks), n - 1) if mesh.schedule == "gpipe" else n - n_ranks.sum(axis=1)
    busy_s = ((n - 1) * backward + n_forwards[:, None, None] * forward) * n_of_kind  # [row, group, kind]
    whole_s = busy_s.sum(axis=2)
    shares = np.divide(busy_s, whole_s[:, :, None], out=np.zeros_like(busy_s), where=whole_s[:, :, None] > 0.0)
    speeds = np.divide(n_ranks, whole_s, out=np.full(whole_s.shape, INFINITY), where=whole_s > 0.0).sum(axis=1)
    busiest_s = shares.min(axis=1).sum(axis=1) / speeds
    commonest = int(n_of_kind.argmax())
    one_s = busy_s[:, :, commonest] / n_of_kind[commonest]
    busiest_s = np.maximum(busiest_s, _whole_segments_s(one_s, n_ranks, n_of_kind[commonest], at_least_s=busiest_s))
    return table.per_step_s + n_of_kind @ (forward + backward).min(axis=0) + busiest_s


def _short_bytes(table: CostTable, n_ranks: Array) -> Array:
    """What the average rank lacks at the least, per row of `n_ranks`."""
    tables = [table.at_rank(rank) for rank in range(table.mesh.pp)]
    n_of_kind = np.array([table.kinds.count(kind) for kind in range(len(table.costs))], dtype=float)
    needed_bytes = n_of_kind @ _by_kind(tables, _least_bytes(table)).min(axis=0)
    room_bytes = n_ranks @ np.array([max(0.0, memory_room_bytes(own)) for own in tables])
    return (needed_bytes - room_bytes) / n_ranks.sum(axis=1)


def _whole_segments_s(one_s: Array, n_ranks: Array, n_segments: float, *, at_least_s: Array) -> Array:
    """The least time of the busiest rank, since no rank has a part of a segment: per row, from below.

    `one_s` is the time of one of `n_segments` alike, per row and group. In t seconds the ranks of a group do
    n_ranks x floor(t / one_s) of them; the least t that is enough is a multiple of one of the times.
    """
    found_s = at_least_s
    with np.errstate(divide="ignore", invalid="ignore"):
        for _ in range(N_MULTIPLES):
            n_done = np.floor(found_s[:, None] / one_s * (1.0 + ROUNDING))
            is_enough = (n_ranks * n_done).sum(axis=1) >= n_segments
            following_s = np.min((n_done + 1.0) * one_s, axis=1)
            found_s = np.where(is_enough | ~np.isfinite(following_s), found_s, following_s)
    return found_s


def _by_kind(tables: list[CostTable], value: Callable[[SegmentCost], float]) -> Array:
    """Per group and kind of segment, the least value over the recompute choices."""
    return np.array([[min(map(value, choices)) for choices in own.costs] for own in tables], dtype=float)


def _least_bytes(table: CostTable) -> Callable[[SegmentCost], float]:
    """What a segment needs at some moment whatever the plan, on any rank."""

    def value(cost: SegmentCost) -> float:
        gathered = cost.gathered_bytes if table.keeps_gathered else 0
        gradients = cost.gradient_bytes if table.mesh.n_micro_batches > 1 else 0
        return cost.state_bytes + cost.saved_bytes + gathered + gradients

    return value
