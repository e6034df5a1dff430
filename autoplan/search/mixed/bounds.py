"""Bounds on pipelines over several groups of a mixed cluster, for many numbers of ranks at once.

A pipeline over ranks of several kinds has the bound (`pipeline_bounds_s`; per micro-batch f_gk and b_gk forward and
backward of segment k on group g, p_g ranks there, M micro-batches, c_gk = (M - 1) b_gk + (M - pp) f_gk, C_g its sum
over k)

    per_step + sum_k min_g (f_gk + b_gk) + sum_k min_g (c_gk / C_g) / sum_g (p_g / C_g)

since the first micro-batch goes there and back through all segments, and the busiest rank has at least the average of
all, each weighted by its speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autoplan.cost.table import CostTable, SegmentCost, backward_s, forward_s
from autoplan.parallel_plan import Mesh
from autoplan.search.bounds import memory_room_bytes
from autoplan.search.ranges import Array
from autoplan.solver.linear_model import INFINITY

N_MULTIPLES = 4  # steps by which `_whole_segments_s` looks for the least time
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class LeastPasses:
    """What each group needs for one micro-batch at the least, as (group, kind), and how many segments of a kind are."""

    forward_s: Array
    backward_s: Array
    n_of_kind: Array

    @classmethod
    def of(cls, table: CostTable) -> LeastPasses:
        """Of a table that has one rank on each group."""
        tables = _rank_tables(table)
        return cls(_by_kind(tables, forward_s), _by_kind(tables, backward_s), _n_of_kind(table))


def pipeline_bounds_s(least: LeastPasses, mesh: Mesh, n_ranks: Array) -> Array:
    """The bound of the module docstring without `per_step`, per row of `n_ranks`, which has a column per group."""
    forward, backward, n_of_kind = least.forward_s, least.backward_s, least.n_of_kind
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
    return n_of_kind @ (forward + backward).min(axis=0) + busiest_s


def between_ranks_s(table: CostTable, n_ranks: Array) -> Array:
    """What the first micro-batch at the least waits for between segments, per row of `n_ranks`.

    That is the host in two actions of every stage, and the transfers from group to group, there and back. `table` has
    one rank on each group; with more of them no action waits less.
    """
    legal_s = ([cut_s for cut_s in own.cut_s if cut_s is not None] for own in table.rank_tables[:-1])
    return 2.0 * (n_ranks.sum(axis=1) * table.action_s + sum(min(own) for own in legal_s))


def short_bytes(table: CostTable, n_ranks: Array) -> Array:
    """What the average rank lacks at the least, per row of `n_ranks`."""
    tables = _rank_tables(table)
    n_of_kind = _n_of_kind(table)
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


def _rank_tables(table: CostTable) -> list[CostTable]:
    return [table.at_rank(rank) for rank in range(table.mesh.pp)]


def _n_of_kind(table: CostTable) -> Array:
    return np.array([table.kinds.count(kind) for kind in range(len(table.costs))], dtype=float)


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
