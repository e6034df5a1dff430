"""Weights of paths: a bound for all sizes and ways to recompute, and the longest path through a schedule."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from brute_force import OVERLAPS, all_stages, plain_table, random_toy

from autoplan.cost.table import CostTable
from autoplan.options import Options
from autoplan.overlap import Overlap
from autoplan.parallel_plan import Mesh, StagePlan
from autoplan.search.meshes import list_meshes
from autoplan.search.paths.longest_paths import longest_paths
from autoplan.search.paths.peak_moments import shape_of
from autoplan.search.paths.rank_paths import CARRY_FORWARD, SYMBOLS, rank_paths
from autoplan.search.plans import piece_edges, stage_sizes
from autoplan.search.ranges import Array, Segments
from autoplan.search.several_stages.path_weights import Ways, raised_bounds_s
from autoplan.search.several_stages.rank_shares import Shares
from autoplan.search.several_stages.stage_needs import Needs
from autoplan.simulator.simulate import simulate

SCHEDULES = [("interleaved", 2, 8), ("interleaved", 4, 4), ("zero_bubble_v", 2, 9)]


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(6, 12))])
def test_weights_never_bound_a_choice_of_sizes_above_a_plan_of_it_that_fits(seed: int) -> None:
    rng = random.Random(seed)
    toy = random_toy(seed, n_segments=rng.choice([6, 7]), tight=True)
    toy = replace(toy, overlap=rng.choice(OVERLAPS))
    meshes = [mesh for mesh in list_meshes(toy.space, Options(max_micro_batch_size=4))[0] if mesh.n_chunks > 1]
    for mesh in rng.sample(meshes, min(6, len(meshes))):
        table = toy.price(mesh)
        edges = piece_edges(table)
        n_pieces = len(edges) - 1
        sized = product(*stage_sizes(mesh, n_pieces=n_pieces))
        sizes = np.array([own for own in sized if sum(own) == n_pieces])
        best_s: dict[tuple[int, ...], float] = defaultdict(lambda: float("inf"))
        for stages in all_stages(toy, mesh):
            estimate = simulate(table, stages)
            if estimate.fits:
                key = tuple(edges.index(stage.stop) - edges.index(stage.start) for stage in stages)
                best_s[key] = min(best_s[key], estimate.step_s)
        shares = Shares.of(table, shape_of(mesh), None)
        least_s = raised_bounds_s(
            shares,
            sizes,
            np.zeros(len(sizes)),
            Ways.of(shares, sizes),
            limit_s=1.5 * min(best_s.values(), default=10.0),
            is_late=lambda: False,
        )
        for own, bound_s in zip(sizes.tolist(), least_s, strict=True):
            assert bound_s <= best_s[tuple(own)] * (1 + 1e-9)


def _table_of_layers(mesh: Mesh, *, reduce_s: float) -> CostTable:
    """The plain table with 100 bytes kept per layer in flight, and nothing else; recomputing a layer takes 1 s."""
    table = plain_table(mesh)
    kept = replace(table.costs[0][0], reduce_s=reduce_s, saved_bytes=100, working_bytes=0)
    kept = replace(kept, state_bytes=0, gathered_bytes=0, gradient_bytes=0)
    again = replace(kept, saved_bytes=0, recompute_s=1.0)
    return replace(table, costs=((kept, again),), reduces_per_micro_batch=reduce_s > 0.0, overlap=Overlap(0.25, 0.1))


def _even_bound_s(table: CostTable) -> float:
    shares = Shares.of(table, shape_of(table.mesh), None)
    sizes = np.full((1, table.mesh.n_stages), len(table.kinds) // table.mesh.n_stages)
    ways = Ways.of(shares, sizes)
    (bound_s,) = raised_bounds_s(shares, sizes, np.zeros(1), ways, limit_s=1e3, is_late=lambda: False)
    return float(bound_s)


@pytest.mark.parametrize("reduce_s", [0.0, 0.7])
@pytest.mark.parametrize("n_chunks", [2, 4])
def test_weights_bound_layers_all_alike_by_the_simulated_step(n_chunks: int, reduce_s: float) -> None:
    mesh = Mesh(pp=2, n_chunks=n_chunks, n_micro_batches=8, schedule="interleaved")
    table = _table_of_layers(mesh, reduce_s=reduce_s)
    step_s = simulate(table, _even_stages(table)).step_s
    # reductions that are left also slow a pass that waits for its input, which no path knows
    assert step_s * 0.99 <= _even_bound_s(table) <= step_s * (1 + 1e-9)


@pytest.mark.parametrize("reduce_s", [0.0, 0.7])
def test_weights_find_the_least_that_the_best_recomputation_takes(reduce_s: float) -> None:
    mesh = Mesh(pp=2, n_chunks=2, n_micro_batches=4, schedule="interleaved")
    table = _table_of_layers(mesh, reduce_s=reduce_s)
    table = replace(table, memory_limit_bytes=table.constant_bytes + table.reserved_fixed_bytes + 700)
    steps_s = []
    for counts in product(range(3), repeat=4):
        stages = zip(_even_stages(table), counts, strict=True)
        again = tuple(replace(own, recomputed=tuple(range(own.start, own.start + count))) for own, count in stages)
        estimate = simulate(table, again)
        steps_s += [estimate.step_s] if estimate.fits else []
    assert min(steps_s) > simulate(table, _even_stages(table)).step_s
    assert 0.97 * min(steps_s) <= _even_bound_s(table) <= min(steps_s) * (1 + 1e-9)


def _even_stages(table: CostTable) -> tuple[StagePlan, ...]:
    size = len(table.kinds) // table.mesh.n_stages
    return tuple(StagePlan(start, start + size) for start in range(0, len(table.kinds), size))


@pytest.mark.parametrize(("schedule", "n_chunks", "n_micro_batches"), SCHEDULES)
@pytest.mark.parametrize("cut_s", [0.25, 6.0])
def test_the_longest_path_of_equal_stages_is_the_simulated_step(
    schedule: str, n_chunks: int, n_micro_batches: int, cut_s: float
) -> None:
    mesh = Mesh(pp=2, schedule=schedule, n_chunks=n_chunks, n_micro_batches=n_micro_batches)
    table = plain_table(mesh, cut_s=cut_s)
    sizes = np.full(table.mesh.n_stages, 8 // table.mesh.n_stages)
    times_s = _times_s(table, sizes)
    lengths_s = [float((counts * times_s).sum()) for counts, _ in longest_paths(table.mesh, times_s)]
    assert max(lengths_s) == pytest.approx(simulate(table, _even_stages(table)).step_s)


@pytest.mark.parametrize(("schedule", "n_chunks", "n_micro_batches"), SCHEDULES)
def test_no_chain_of_a_rank_is_longer_than_its_longest_path(schedule: str, n_chunks: int, n_micro_batches: int) -> None:
    mesh = Mesh(pp=2, schedule=schedule, n_chunks=n_chunks, n_micro_batches=n_micro_batches)
    times_s = np.random.default_rng(0).uniform(0.1, 2.0, (len(SYMBOLS), mesh.n_stages))
    times_s[SYMBOLS.index(CARRY_FORWARD)] = 0.0  # counted among those of CARRY
    longest = list(longest_paths(mesh, times_s))
    longest_s = {stage: float((counts * times_s).sum()) for counts, stage in longest}
    chains = [chain for paths in rank_paths(mesh) for chain in zip(paths.counts, paths.last_stages, strict=True)]
    compared = [(counts, stage) for counts, stage in chains if stage in longest_s]
    assert compared
    for counts, stage in compared:
        assert float((counts * times_s).sum()) <= longest_s[stage] + 1e-9


def _times_s(table: CostTable, sizes: Array) -> Array:
    needs = Needs.of(table, Segments.of(table, None))
    return needs.passes_s[:, np.arange(len(sizes)), sizes]
