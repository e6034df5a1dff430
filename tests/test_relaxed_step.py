"""The relaxed step: no longer than any step that does as much, and the simulated one where all layers are alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
from brute_force import plain_table, random_plans

from autoplan.cost.table import CostTable
from autoplan.overlap import Overlap
from autoplan.parallel_plan import Mesh, StagePlan
from autoplan.search.paths.peak_moments import shape_of
from autoplan.search.plans import piece_edges
from autoplan.search.program.formulation import formulate
from autoplan.search.ranges import Segments
from autoplan.search.relaxed_step import RelaxedStep
from autoplan.simulator.simulate import simulate
from autoplan.solver.linear_model import INFINITY
from autoplan.solver.solve import minimize


def test_an_unlimited_program_can_always_be_solved() -> None:
    table = replace(plain_table(Mesh(pp=4, n_micro_batches=4)), memory_limit_bytes=2**60)
    form = formulate(table, shape_of(table.mesh))
    assert form.model.upper[form.total] == INFINITY
    # equal stages of 2 segments: (4 + 3) x 6 s + transfers there and back, 2 x 3 x 0.25 s, and to the last rank, which
    # has no more than one at a time, 3 x 0.25 s, on the longest path
    solution = minimize(form.model, time_limit_s=None)
    assert solution.objective is not None
    assert solution.objective * form.unit_s == pytest.approx(44.25)


def relaxed_choices(seed: int) -> Iterator[tuple[CostTable, RelaxedStep, list[StagePlan], list[list[int]]]]:
    """Random plans with several stages per rank, with the pieces of each stage and its segments recomputed."""
    for table, stages in random_plans(seed, count=30, n_segments=6):
        if table.mesh.n_chunks == 1:
            continue
        segments, edges = Segments.of(table, None), piece_edges(table)
        hard = [bool(spared > easy) for spared, easy in zip(segments.spared_bytes, segments.easy_bytes, strict=True)]
        sizes = [edges.index(stage.stop) - edges.index(stage.start) for stage in stages]
        again = [
            sum(hard[i] and (i in stage.recomputed) != segments.is_again[i] for i in range(stage.start, stage.stop))
            for stage in stages
        ]
        yield table, RelaxedStep.of(table, segments), list(stages), [sizes, again]


@pytest.mark.parametrize("seed", range(12))
def test_a_relaxed_step_is_no_longer_than_any_that_does_as_much_or_more(seed: int) -> None:
    rng = random.Random(seed)
    found = list(relaxed_choices(seed))
    assert found
    for table, step, stages, (sizes, again) in found:
        smaller = [[rng.randint(1, size) for size in sizes] for _ in range(3)]
        fewer = [[rng.randint(0, count) for count in again] for _ in range(3)]
        least_s = step.least_s(np.array([sizes, *smaller]), np.array([again, *fewer]))
        assert max(least_s) <= simulate(table, tuple(stages)).step_s * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
@pytest.mark.parametrize("cut_s", [0.25, 6.0])
def test_a_relaxed_step_of_given_cuts_is_the_simulated_one_with_transfers_of_their_own(
    schedule: str, cut_s: float
) -> None:
    mesh = Mesh(pp=4, n_micro_batches=8, schedule=schedule)
    table = replace(plain_table(mesh), cut_s=tuple(cut_s * (1 + 0.1 * segment) for segment in range(7)))
    sizes = [1, 3, 2, 2]
    stages = tuple(StagePlan(stop - size, stop, ()) for size, stop in zip(sizes, accumulate(sizes), strict=True))
    (least_s,) = RelaxedStep.of_cuts(table, recompute=None).least_s(np.array([sizes]), np.zeros((1, 4)))
    assert least_s == pytest.approx(simulate(table, stages).step_s, rel=1e-9)


@pytest.mark.parametrize(("schedule", "n_chunks"), [("interleaved", 2), ("interleaved", 4), ("zero_bubble_v", 2)])
@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("cut_s", [0.25, 6.0])
def test_a_relaxed_step_of_layers_all_alike_is_the_simulated_one(
    schedule: str, n_chunks: int, reduces: bool, cut_s: float
) -> None:
    mesh = Mesh(pp=2, n_chunks=n_chunks, n_micro_batches=8, schedule=schedule)
    table = plain_table(mesh, cut_s=cut_s)
    costs = tuple(tuple(replace(cost, reduce_s=0.7) for cost in choices) for choices in table.costs)
    table = replace(table, costs=costs, reduces_per_micro_batch=reduces, overlap=Overlap(0.25, 0.1))
    n_stages, n_pieces = mesh.n_stages, len(piece_edges(table)) - 1
    edges = [stage * n_pieces // n_stages for stage in range(n_stages + 1)]
    stages = tuple(StagePlan(start, stop, ()) for start, stop in pairwise(edges))
    sizes = np.array([[stage.stop - stage.start for stage in stages]])
    (least_s,) = RelaxedStep.of(table, Segments.of(table, None)).least_s(sizes, np.zeros(sizes.shape))
    assert least_s == pytest.approx(simulate(table, stages).step_s, rel=1e-9)
