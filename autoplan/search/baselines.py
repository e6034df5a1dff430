"""The plain recipes people use without a planner; each is a candidate, so none that fits beats the search by its gap.

    DDP         dp = all devices, nothing sharded
    FSDP        dp = all devices, zero_stage 3, with or without recomputation
    hand rule   tp = the most within a host at which a split pays, pp = as little as fits, dp = the rest, zero_stage 1
                where the space has it, 1f1b, equal stages

Each recipe takes the micro-batch (and recomputation, except DDP) with which it is fastest among those that fit, and its
modules run in all the ways that those of the plans may (`SearchSpace.executions`, `cuda_graph`): what torch.compile and
CUDA graphs gain needs no planner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from autoplan.cost.table import CostTable
from autoplan.options import Options
from autoplan.parallel_plan import Mesh, StagePlan
from autoplan.search.bounds import shortfall_bytes, step_bound_s
from autoplan.search.meshes import (
    Price,
    SearchSpace,
    divisors,
    fixed_int,
    legal_tensor_degrees,
    micro_batch_sizes,
)
from autoplan.search.one_mesh import Judged
from autoplan.search.plans import repeated_segments
from autoplan.simulator.simulate import simulate


@dataclass(frozen=True, slots=True)
class Baseline:
    """A recipe as one plan; it may not fit."""

    name: str
    table: CostTable
    judged: Judged


def plain_recipes(
    space: SearchSpace, options: Options, *, price: Price, is_late: Callable[[], bool]
) -> tuple[Baseline, ...]:
    """The recipes that exist for this model and cluster, each at its best of what is tried before it is late.

    What the user fixed binds them only where it cuts the space itself: compressed gradients, how modules run. Where tp
    is fixed the space has layouts of no other degree, so there is a hand rule only if that is the devices of a host.
    """
    free = replace(options, fix=())
    groups = (
        ("DDP", [list(data_parallel(space, free, dp=space.n_devices, zero_stage=0))], (False,)),
        ("FSDP", [list(data_parallel(space, free, dp=space.n_devices, zero_stage=3))], (False, True)),
        ("hand rule", list(_hand_rule(space, free)) if _has_hand_rule(space, options) else [], (False, True)),
    )
    found = (
        best_of(name, tiers, recompute, space=space, price=price, is_late=is_late) for name, tiers, recompute in groups
    )
    return tuple(baseline for baseline in found if baseline is not None)


def data_parallel(space: SearchSpace, options: Options, *, dp: int, zero_stage: int) -> Iterator[Mesh]:
    """The meshes of `dp` data-parallel ranks and nothing else, one per micro-batch and way to run modules.

    Shards are over all ranks.
    """
    if space.global_batch % dp != 0 or (dp == 1 and zero_stage > 0) or zero_stage not in space.zero_stages:
        return
    graphs = space.graphs_of(tp=1, is_own=True)
    for size, way, is_captured in product(micro_batch_sizes(space, options, dp=dp), space.executions, graphs):
        yield Mesh(
            dp=dp,
            zero_stage=zero_stage,
            zero_shard_degree=dp if zero_stage else 1,
            micro_batch_size=size,
            n_micro_batches=space.global_batch // dp // size,
            wraps_head=space.wraps_head,
            cuda_graph=is_captured,
        ).run_as(way)


def _has_hand_rule(space: SearchSpace, options: Options) -> bool:
    """Whether the space has the layouts of its degree, which nobody can know of another one than is fixed."""
    return fixed_int(options, "tp") in (None, min(space.n_devices, space.n_devices_per_host))


def _hand_rule(space: SearchSpace, options: Options) -> Iterator[list[Mesh]]:
    """Per number of pipeline stages, fewest first, its meshes."""
    keys = dict(space.shardings)
    beyond = range(space.n_devices_per_host + 1, space.n_on_links + 1)
    tp = max(tp for tp in legal_tensor_degrees(space, options) if space.n_devices % tp == 0 and tp not in beyond)
    for pp in divisors(space.n_devices // tp):
        dp = space.n_devices // tp // pp
        shards = dp > 1 and 1 in space.zero_stages
        if pp > space.n_pieces or space.global_batch % dp != 0:
            continue
        yield [
            Mesh(
                pp=pp,
                dp=dp,
                tp=tp,
                zero_stage=1 if shards else 0,
                zero_shard_degree=dp if shards else 1,
                micro_batch_size=size,
                n_micro_batches=space.global_batch // dp // size,
                sharding=keys[tp][0],
                cuda_graph=is_captured,
            ).run_as(way)
            for size, way, is_captured in product(
                micro_batch_sizes(space, options, dp=dp),
                space.executions,
                space.graphs_of(tp=tp, is_own=tp == pp == 1),
            )
            if pp == 1 or space.global_batch // dp // size >= pp
        ]


def best_of(
    name: str,
    tiers: list[list[Mesh]],
    recompute: tuple[bool, ...],
    *,
    space: SearchSpace,
    price: Price,
    is_late: Callable[[], bool],
) -> Baseline | None:
    """The fastest plan that fits of the first tier that has one; else the plan found that lacks the least memory, and
    where by its bound none can fit one with the smallest micro-batch.

    Plans are replayed in the order of the bounds of their meshes, and none whose bound is not below the best.
    """
    seen: list[CostTable] = []
    missed: list[Baseline] = []
    for meshes in tiers:
        tables = [price(mesh) for mesh in meshes if not is_late()]
        best, short = _fastest_of(name, tables, recompute, space=space, is_late=is_late)
        if best is not None:
            return best
        seen += tables
        missed += short
    if missed or not seen:
        return min(missed, key=_short_bytes, default=None)
    table = min(seen, key=lambda own: (own.mesh.micro_batch_size, shortfall_bytes(own)))
    return min(_baselines(name, table, recompute, space=space), key=_short_bytes)


def _fastest_of(
    name: str,
    tables: list[CostTable],
    recompute: tuple[bool, ...],
    *,
    space: SearchSpace,
    is_late: Callable[[], bool],
) -> tuple[Baseline | None, list[Baseline]]:
    """The fastest plan that fits, and those replayed that do not."""
    best: Baseline | None = None
    missed: list[Baseline] = []
    for table in sorted((own for own in tables if shortfall_bytes(own) <= 0), key=step_bound_s):
        if is_late() or (best is not None and step_bound_s(table) >= best.judged.estimate.step_s):
            break
        for plan in _baselines(name, table, recompute, space=space):
            if not plan.judged.estimate.fits:
                missed.append(plan)
            elif best is None or plan.judged.estimate.step_s < best.judged.estimate.step_s:
                best = plan
    return best, missed


def _baselines(name: str, table: CostTable, recompute: tuple[bool, ...], *, space: SearchSpace) -> Iterator[Baseline]:
    """Even stages on one mesh, with and without recomputation as these say."""
    for again in recompute:
        yield Baseline(name, table, _judge(table, even_stages(space, table, recomputes=again)))


def _short_bytes(plan: Baseline) -> int:
    """What a plan that does not fit lacks."""
    estimate = plan.judged.estimate
    return max(map(estimate.short_bytes, range(len(estimate.needed_bytes))))


def _judge(table: CostTable, stages: tuple[StagePlan, ...]) -> Judged:
    return Judged(stages, simulate(table, stages))


def even_stages(space: SearchSpace, table: CostTable, *, recomputes: bool) -> tuple[StagePlan, ...]:
    """Stages with as equal a number of pieces as possible, recomputing every repeated segment or none."""
    edges = [0, *(index + 1 for index, legal in enumerate(space.cuts) if legal), space.n_segments]
    n_stages = table.mesh.n_stages
    bounds = [edges[index * (len(edges) - 1) // n_stages] for index in range(n_stages + 1)]
    chosen = repeated_segments(table) if recomputes else ()
    return tuple(
        StagePlan(start, stop, tuple(segment for segment in chosen if start <= segment < stop))
        for start, stop in zip(bounds, bounds[1:], strict=False)
    )
