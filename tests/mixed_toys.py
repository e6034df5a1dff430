"""Toy models on mixed clusters of two groups, and the best plan of them by trying every one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import permutations, product

from brute_force import OVERLAPS, Toy, all_stages, best_by_trying, make_plan, random_toy, with_space

from autoplan.cost.mixed_price import joined, shared
from autoplan.cost.table import CostTable
from autoplan.options import Options
from autoplan.parallel_plan import BatchShare, GroupRanks, Mesh, Plan, StagePlan
from autoplan.search.mixed.meshes import Groups, GroupSpace, MixedSpace
from autoplan.search.result import SearchResult
from autoplan.simulator.simulate import simulate

EXACT = Options(max_micro_batch_size=2, top=1, require_optimal=True)


def table_between(toys: tuple[Toy, ...], between_s: float, mesh: Mesh, groups: Groups) -> CostTable:
    """The table of a toy pipeline, or of shares; a transfer from group to group takes `between_s`."""
    if mesh.shares:
        tables = [toys[own.group].price(mesh.of_share(index)) for index, own in enumerate(groups)]
        return shared(mesh, [summed_between(table, between_s) for table in tables], per_step_s=0.02)
    tables = [toys[own.group].price(mesh) for own in groups]
    cuts = tuple(between_s if legal else None for legal in toys[0].space.cuts)
    return joined(tables, [own.n_ranks for own in groups], [cuts] * (len(groups) - 1), per_step_s=0.02)


def summed_between(table: CostTable, between_s: float) -> CostTable:
    """Every segment's gradients are summed over groups: once per step, in the background."""
    name = "replicas_s" if table.reduces_per_micro_batch else "reduce_s"
    costs = [[replace(cost, **{name: getattr(cost, name) + between_s}) for cost in kind] for kind in table.costs]
    return replace(table, costs=tuple(map(tuple, costs)))


def mixed_space(toys: tuple[Toy, ...], between_s: float = 0.1) -> MixedSpace:
    def plan(mesh: Mesh, groups: Groups, stages: tuple[StagePlan, ...]) -> Plan:
        return Plan(mesh=mesh, stages=stages, groups=groups)

    return MixedSpace(
        groups=tuple(GroupSpace(toy.space, toy.price, make_plan) for toy in toys),
        pipelines=toys[0].space,
        price=lambda mesh, groups: table_between(toys, between_s, mesh, groups),
        make_plan=plan,
    )


def slower(toy: Toy, rng: random.Random) -> Toy:
    """The same model on other devices: each kind of segment slower or faster by a factor of its own, other memory."""
    costs = []
    for cost in toy.kind_costs:
        speed, names = rng.uniform(0.4, 3.0), ("forward_s", "backward_s", "weight_backward_s")
        costs.append(replace(cost, **{name: getattr(cost, name) * speed for name in names}))
    return replace(
        toy,
        kind_costs=tuple(costs),
        overlap=rng.choice(OVERLAPS[:3]),
        overlap_of_shards=rng.choice(OVERLAPS[:3]),
        memory_limit_bytes=int(toy.memory_limit_bytes * rng.uniform(0.4, 2.0)),
    )


def two_toys(seed: int, *, n_devices: int = 2) -> tuple[Toy, Toy]:
    rng = random.Random(seed)
    toy = random_toy(seed, n_segments=rng.randint(3, 5), n_devices=n_devices)
    return toy, slower(toy, rng)


def layered(n_layers: int, *, layer_s: float) -> Toy:
    """A model of equal layers on one device, with room for everything."""
    toy = random_toy(0, n_segments=n_layers, n_devices=1, global_batch=16, tight=False)
    costs = tuple(
        replace(cost, forward_s=layer_s, backward_s=2 * layer_s, launch_forward_s=0.0, launch_backward_s=0.0)
        for cost in toy.kind_costs[:1]
    )
    toy = replace(toy, kind_costs=costs, cut_s=0.0, memory_limit_bytes=2**50)
    return with_space(toy, kinds=(0,) * n_layers, cuts=(True,) * (n_layers - 1), n_devices_per_host=1)


def toy_pipelines(toys: tuple[Toy, ...]) -> Iterator[tuple[Mesh, Groups]]:
    """Every pipeline over both groups of two devices: (ranks of each, tp, dp), micro-batch, ZeRO and schedule."""
    batch = toys[0].space.global_batch
    shapes = [(1, 1, 1, 1), (1, 2, 1, 1), (2, 1, 1, 1), (2, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)]
    for order, (first, second, tp, dp), size in product(permutations((0, 1)), shapes, (1, 2)):
        n, pp = batch // dp // size, first + second
        for zero, schedule in product(range(4) if dp > 1 else (0,), ("1f1b", "gpipe")):
            if n * size * dp != batch or (schedule == "1f1b" and n < pp) or pp > toys[0].space.n_pieces:
                continue
            sharding = "a" if tp > 1 else ""
            mesh = Mesh(pp, dp, tp, zero, dp if zero else 1, size, n, schedule, 1, sharding)
            yield mesh, (GroupRanks(order[0], first), GroupRanks(order[1], second))


def toy_shares(toys: tuple[Toy, ...]) -> Iterator[tuple[Mesh, Groups]]:
    """Every way to share the batch between the two groups of two devices: (ranks of each), tp, ZeRO, micro-batches."""
    batch = toys[0].space.global_batch
    for dps, tp, sizes in product([(1, 1), (1, 2), (2, 1), (2, 2)], (1, 2), product((1, 2), repeat=2)):
        if max(dps) * tp > 2 or (tp > 1 and sizes[0] != sizes[1]):
            continue
        for counts, zero in product(product(range(1, batch + 1), repeat=2), range(4) if dps == (2, 2) else (0,)):
            shares = tuple(map(BatchShare, dps, sizes, counts))
            if sum(share.n_samples for share in shares) == batch:
                degree = 2 if zero else 1
                mesh = Mesh(1, sum(dps), tp, zero, degree, sizes[0], counts[0], "1f1b", 1, "a" if tp > 1 else "")
                yield replace(mesh, shares=shares), (GroupRanks(0, 1), GroupRanks(1, 1))


def best_of_shares_by_trying(toys: tuple[Toy, ...], table: CostTable) -> float | None:
    """The least step time of a mesh with shares: of each share all plans, which must agree on the last segment."""
    choices = [_all_of_share(toy, own) for toy, own in zip(toys, table.rank_tables, strict=True)]
    pairs = (pair for pair in product(*choices) if len({is_again for is_again, _ in pair}) == 1)
    return min((max(step_s for _, step_s in pair) for pair in pairs), default=None)


@lru_cache(maxsize=64)
def _all_of_share(toy: Toy, table: CostTable) -> list[tuple[bool, float]]:
    """Of all plans that fit: whether the last segment is recomputed, and the step time."""
    judged = ((stages, simulate(table, stages)) for stages in all_stages(toy, table.mesh))
    last = toy.space.n_segments - 1
    return [(last in stages[0].recomputed, item.step_s) for stages, item in judged if item.fits]


def best_of_all(toys: tuple[Toy, Toy], between_s: float) -> float | None:
    """The least step time of any plan that fits, by trying."""
    times = [best_by_trying(toy, EXACT) for toy in toys]
    times += [best_of_shares_by_trying(toys, table_between(toys, between_s, *own)) for own in toy_shares(toys)]
    for mesh, groups in toy_pipelines(toys):
        table = table_between(toys, between_s, mesh, groups)
        estimates = (simulate(table, stages) for stages in all_stages(toys[0], mesh))
        times.append(min((item.step_s for item in estimates if item.fits), default=None))
    return min((step_s for step_s in times if step_s is not None), default=None)


def best_s(result: SearchResult) -> float:
    assert result.status in ("optimal", "infeasible")
    return float("inf") if result.best is None else result.best.estimate.step_s
