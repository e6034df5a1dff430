"""The pipelines over several groups of a mixed cluster, in the order of bounds on their step times.

A shape says all of a pipeline but its ZeRO stage, its shard degree and how many ranks each group has; its bound is that
of the least compute there is. The queue prices a shape when its bound is the first (`families_of`): the bounds of its
meshes are those of `bounds`.

Like `device_counts`, the ranks of a group fill one host in part, or any number of whole hosts with few significant
bits, so the plans of a larger cluster include those of a smaller one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product

import numpy as np

from autoplan.cost.table import CostTable
from autoplan.options import BATCH_NORMS, PLAIN_SCHEDULE, Options
from autoplan.parallel_plan import GroupRanks, Mesh, Plan, StagePlan
from autoplan.search.meshes import (
    MakePlan,
    Price,
    SearchSpace,
    canonical,
    device_counts,
    divisors,
    fixed,
    fixed_int,
    legal_tensor_degrees,
    micro_batch_sizes,
    significant_bits,
    zero_choices,
)
from autoplan.search.mixed.bounds import LeastPasses, between_ranks_s, pipeline_bounds_s, short_bytes
from autoplan.search.ranges import Array
from autoplan.solver.linear_model import INFINITY

Groups = tuple[GroupRanks, ...]
SCHEDULES = ("1f1b", "gpipe")
# Of the numbers of hosts tried per group, by how many groups there are: with more groups there are more combinations.
SIGNIFICANT_BITS = {2: 4, 3: 2}


@dataclass(frozen=True, slots=True)
class GroupSpace:
    """One group alone, as `search` sees it."""

    space: SearchSpace
    price: Price
    make_plan: MakePlan


@dataclass(frozen=True, slots=True)
class MixedSpace:
    """What may be searched on a mixed cluster.

    Attributes:
        groups: each group alone.
        pipelines: batch, segments, cuts, shardings and executions of pipelines over several groups; as many devices per
            host as divide those of every group.
        price: the table of a mesh whose pipeline ranks, or shares of the batch, are on these groups.
        make_plan: likewise its plan.
        layout_sizes: micro-batch sizes of which every other one shares the tensor-parallel layout with some.
        batch_norm: that of a plan where the options do not fix it.
    """

    groups: tuple[GroupSpace, ...]
    pipelines: SearchSpace
    price: Callable[[Mesh, Groups], CostTable]
    make_plan: Callable[[Mesh, Groups, tuple[StagePlan, ...]], Plan]
    layout_sizes: tuple[int, ...] = (1,)
    batch_norm: str = BATCH_NORMS[0]


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


@dataclass(frozen=True, slots=True)
class Shape:
    """Pipelines that differ only in their ZeRO stage and shard degree, and in where their ranks are.

    Attributes:
        mesh: one of them, with one rank on each group, not sharded.
        groups: indices of the groups, in the order of the pipeline.
        n_ranks: a row per choice, a column per group.
        bound_s: none of them is faster.
    """

    mesh: Mesh
    groups: tuple[int, ...]
    n_ranks: Array
    zeros: tuple[tuple[int, int], ...]
    bound_s: float

    @property
    def n_meshes(self) -> int:
        """How many meshes these are."""
        return len(self.n_ranks) * len(self.zeros)


class MeshQueue:
    """The pipelines that may fit, in order of their bounds; there are millions, so they are arrays."""

    def __init__(self, space: MixedSpace, shapes: tuple[Shape, ...]) -> None:
        self._space = space
        self._shapes = sorted(shapes, key=lambda shape: shape.bound_s)
        self._n_priced = 0
        self._orders: list[Array] = []  # of each family, the rows by their bounds
        self._waiting: list[tuple[float, int, int]] = []  # (bound, family, place in its order) of its first row left
        self.families: list[Family] = []

    @property
    def bound_s(self) -> float:
        """No mesh left is faster; INFINITY when none is left."""
        return min(self._waiting[0][0] if self._waiting else INFINITY, self._next_shape_s)

    @property
    def _next_shape_s(self) -> float:
        return self._shapes[self._n_priced].bound_s if self._n_priced < len(self._shapes) else INFINITY

    def pop(self, *, known_s: float) -> tuple[float, Mesh, Groups] | None:
        """The mesh with the least bound, and where its ranks are; None when no bound is below `known_s`."""
        while self._next_shape_s < known_s and self._next_shape_s <= self.bound_s:
            for own in families_of(self._space, self._shapes[self._n_priced]):
                order = np.argsort(own.bounds_s, kind="stable")[: np.isfinite(own.bounds_s).sum()]
                self.families.append(own)
                self._orders.append(order)
                self._wait(len(self.families) - 1, 0)
            self._n_priced += 1
        if not self._waiting or self._waiting[0][0] >= known_s:
            return None
        bound_s, number, place = heapq.heappop(self._waiting)
        self._wait(number, place + 1)
        return bound_s, *self.families[number].member(int(self._orders[number][place]))

    def _wait(self, number: int, place: int) -> None:
        """Let the row at this place of a family wait, if there is one."""
        own, order = self.families[number], self._orders[number]
        if place < len(order):
            heapq.heappush(self._waiting, (float(own.bounds_s[order[place]]), number, place))


def shapes(space: MixedSpace, options: Options) -> Iterator[Shape]:
    """Every pipeline over several groups that the options allow, in a fixed order."""
    pipelines, wanted_tp, wanted_dp = space.pipelines, fixed_int(options, "tp"), fixed_int(options, "dp")
    n_most = max(group.space.n_devices for group in space.groups)
    orders = [
        order for size in range(2, len(space.groups) + 1) for order in permutations(range(len(space.groups)), size)
    ]
    tp_degrees = [tp for tp in legal_tensor_degrees(pipelines, options) if wanted_tp in (None, tp)]
    dp_degrees = [dp for dp in divisors(pipelines.global_batch) if dp <= n_most and wanted_dp in (None, dp)]
    least: dict[tuple[Mesh, tuple[int, ...]], LeastPasses] = {}
    for tp, dp, order in product(tp_degrees, dp_degrees, orders):
        n_ranks = _rank_counts(space, options, order, n_devices=dp * tp)
        zeros = zero_choices(pipelines, options, tp=tp, dp=dp)
        sizes = micro_batch_sizes(pipelines, options, dp=dp)
        if len(n_ranks) == 0 or not zeros:
            continue
        for sharding, size, way in product(dict(pipelines.shardings)[tp], sizes, pipelines.executions):
            plain = Mesh(pp=len(order), tp=tp, micro_batch_size=size, sharding=sharding).run_as(way)
            if (plain, order) not in least:
                least[plain, order] = LeastPasses.of(_table(space, plain, order))
            mesh = replace(plain, dp=dp, n_micro_batches=pipelines.global_batch // dp // size)
            own_zeros = canonical(zeros, n_micro_batches=mesh.n_micro_batches)
            for schedule, possible in _schedules(space, options, mesh, n_ranks):
                own = replace(mesh, schedule=schedule)
                bound_s = float(pipeline_bounds_s(least[plain, order], own, possible).min())
                yield Shape(own, order, possible, own_zeros, bound_s)


def families_of(space: MixedSpace, shape: Shape) -> Iterator[Family]:
    """The pipelines of a shape, priced: a family per ZeRO stage and shard degree."""
    for zero_stage, shard_degree in shape.zeros:
        mesh = replace(shape.mesh, zero_stage=zero_stage, zero_shard_degree=shard_degree)
        table = _table(space, mesh, shape.groups)
        lacking_bytes = short_bytes(table, shape.n_ranks)
        bounds_s = pipeline_bounds_s(LeastPasses.of(table), mesh, shape.n_ranks) + between_ranks_s(table, shape.n_ranks)
        bounds_s = np.maximum(table.per_step_s + bounds_s, shape.bound_s)
        bounds_s = np.where(lacking_bytes > 0.0, INFINITY, bounds_s)
        yield Family(mesh, shape.groups, shape.n_ranks, bounds_s, lacking_bytes)


def _table(space: MixedSpace, mesh: Mesh, groups: tuple[int, ...]) -> CostTable:
    """With one rank on each group."""
    return space.price(mesh, tuple(GroupRanks(group, 1) for group in groups))


def _schedules(space: MixedSpace, options: Options, mesh: Mesh, n_ranks: Array) -> Iterator[tuple[str, Array]]:
    """Each schedule with the rows of `n_ranks` that it may have; a rank has one stage."""
    if fixed_int(options, "stages_per_rank") not in (None, 1):
        return
    wanted = fixed(options, "schedule")
    is_enough = n_ranks.sum(axis=1) <= mesh.n_micro_batches  # micro-batches for 1f1b
    for schedule in SCHEDULES:
        if schedule not in space.pipelines.schedules or wanted not in (None, schedule, PLAIN_SCHEDULE):
            continue
        possible = n_ranks[is_enough] if schedule == "1f1b" else n_ranks
        if (schedule, wanted) == ("gpipe", PLAIN_SCHEDULE):
            possible = n_ranks[~is_enough]
        if len(possible) > 0:
            yield schedule, possible


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
