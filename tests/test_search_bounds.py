"""Bounds and programs are relaxations: never above the simulator, never without a plan that it accepts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest
from brute_force import OVERLAPS, Toy, all_stages, plain_table, random_plans, random_toy, with_space
from distributed.programs import EXAMPLES
from simulator_toys import one_each, pipeline, segment, table_of

from autoplan.api import trace_model
from autoplan.cost.table import CostTable
from autoplan.hardware import load_hardware_profile
from autoplan.options import Options
from autoplan.overlap import Overlap
from autoplan.parallel_plan import Mesh, StagePlan
from autoplan.schedules import splits_backward
from autoplan.search.bounds import compute_key, computes_least, least_passes_s, shortfall_bytes, step_bound_s
from autoplan.search.meshes import list_meshes
from autoplan.search.one_stage.partition import best_partition
from autoplan.search.one_stage.replayed_cuts import cuts_below
from autoplan.search.paths.critical_paths import critical_paths
from autoplan.search.paths.peak_moments import shape_of, shape_of_schedule
from autoplan.search.paths.rank_paths import counted_paths, rank_paths
from autoplan.search.paths.schedule_paths import (
    BACKWARD,
    CUT,
    FIRST_FORWARD,
    FORWARD,
    INPUTS,
    LAST_BACKWARD,
    LAST_WEIGHTS,
    WEIGHTS,
    initial_paths,
)
from autoplan.search.plans import all_plans, count_plans, obeys_recompute, runs_of
from autoplan.search.program.formulation import formulate
from autoplan.search.several_stages.joint_sizes import joint_bound
from autoplan.search.several_stages.rank_shares import Shares, narrowed_bound_s, shared_bound_s
from autoplan.simulator.simulate import simulate
from autoplan.solver.linear_model import INFINITY
from autoplan.solver.solve import minimize
from autoplan.space.priced import priced_space


@pytest.mark.parametrize("seed", range(25))
def test_the_bound_of_a_mesh_never_exceeds_a_simulated_step(seed: int) -> None:
    for table, stages in random_plans(seed, count=20):
        assert step_bound_s(table) <= simulate(table, stages).step_s * (1 + 1e-12)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_real_mesh_computes_less_than_the_one_that_stands_for_it(precision: str) -> None:
    graph = trace_model(EXAMPLES / "gpt.py", overrides={"size": "char", "n_layers": 2, "width": 48, "context": 32})
    options = Options(global_batch=16, precision=precision)
    offered = priced_space(graph, load_hardware_profile("dgx_a100_x8", n_hosts=2), options, global_batch=16)
    meshes = list_meshes(offered.space, options)[0]
    keys = tuple(map(compute_key, meshes))
    least_s = {key: least_passes_s(offered.price(mesh)) for key, mesh in computes_least(meshes, keys).items()}
    assert len(least_s) < len(meshes) / 2
    for mesh, key in zip(meshes, keys, strict=True):
        for least, own in zip(least_s[key], least_passes_s(offered.price(mesh)), strict=True):
            assert least <= own * (1 + 1e-12)


RECOMPUTE = (None, None, "none", "full", "selective")


def fastest_s(toy: Toy, table: CostTable, *, recompute: str | None) -> float:
    """The step time of the fastest plan of a mesh that fits, by trying all."""
    plans = (stages for stages in all_stages(toy, table.mesh) if obeys_recompute(table, stages, recompute=recompute))
    estimates = (simulate(table, stages) for stages in plans)
    return min((estimate.step_s for estimate in estimates if estimate.fits), default=INFINITY)


@dataclass(frozen=True, slots=True)
class Bounded:
    """Of one mesh, the bound, that under a limit, the fastest plan, and by how much `joint_bound` raises the bound."""

    bound_s: float
    limited_s: float
    best_s: float
    raised_s: float = 0.0

    def check(self) -> None:
        assert self.bound_s <= self.best_s * (1 + 1e-9)
        assert self.limited_s <= self.best_s * (1 + 1e-9)


def whole_pieces(toy: Toy, rng: random.Random, *, share: float, n_stages: int | None = None) -> Iterator[Bounded]:
    """The bounds of a share of the meshes of a toy (with so many stages), and the fastest plan by trying all."""
    toy = replace(toy, overlap=rng.choice(OVERLAPS))
    if rng.random() < 0.5:  # so that every segment is gathered
        toy = replace(toy, kind_costs=tuple(replace(cost, gather_s=max(cost.gather_s, 0.1)) for cost in toy.kind_costs))
    for mesh in list_meshes(toy.space, Options(max_micro_batch_size=4))[0]:
        if rng.random() > share or n_stages not in (None, mesh.n_stages):
            continue
        table = toy.price(mesh)
        recompute = None if splits_backward(mesh.schedule) else rng.choice(RECOMPUTE)
        best_s = fastest_s(toy, table, recompute=recompute)
        limit_s = rng.uniform(0.8, 1.3) * (best_s if best_s < INFINITY else 5.0)
        raised_s = 0.0
        if mesh.n_chunks > 1:
            shape = shape_of(mesh)
            bounds = [shared_bound_s(table, shape, recompute=recompute, limit_s=x) for x in (INFINITY, limit_s)]
            if bounds[0] < INFINITY:  # together, the ranks prove at least as much
                shares = Shares.of(table, shape, recompute)
                high_s = max(limit_s, bounds[0])
                narrowed_s = narrowed_bound_s(shares, bound_s=bounds[0], limit_s=high_s)
                joint = joint_bound(
                    shares, recompute=recompute, bound_s=narrowed_s, limit_s=high_s, is_late=lambda: False
                )
                assert bounds[0] <= narrowed_s <= joint.bound_s
                raised_s = joint.bound_s - narrowed_s
                bounds[1] = max(bounds[1], joint.bound_s)
                if joint.best is not None and obeys_recompute(table, joint.best.stages, recompute=recompute):
                    assert joint.best.estimate.fits
                    assert joint.best.estimate.step_s >= best_s * (1 - 1e-9)
        else:
            bounds = [best_partition(table, recompute=recompute, limit_s=x).bound_s for x in (INFINITY, limit_s)]
            cuts = cuts_below(table, recompute=recompute, limit_s=limit_s)
            if cuts is not None:
                bounds[1] = max(bounds[1], cuts[0][0] if cuts else limit_s)
        yield Bounded(bounds[0], bounds[1], best_s, raised_s)


@pytest.mark.parametrize(  # no plan of toys 1 and 2 fits, and none of those that are tried of toy 3
    "seed", [0, *range(4, 9), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(9, 18))]
)
def test_the_bound_by_whole_pieces_never_exceeds_the_fastest_plan(seed: int) -> None:
    rng = random.Random(seed)
    toy = random_toy(seed, n_segments=rng.choice([4, 5, 6]))
    found = list(whole_pieces(toy, rng, share=0.5))
    assert any(bounded.best_s < INFINITY for bounded in found)
    for bounded in found:
        bounded.check()


SLOW_TOYS = [pytest.param(seed, marks=pytest.mark.nightly) for seed in (0, 3, 6, 7, 9)]


@pytest.mark.parametrize("seed", [1, 4, *SLOW_TOYS])
def test_the_bound_of_eight_stages_on_four_ranks_never_exceeds_the_fastest_plan(seed: int) -> None:
    rng = random.Random(seed)
    toy = random_toy(seed, n_segments=9, n_devices=4, global_batch=4)
    toy = with_space(toy, cuts=(True,) * 8, zero_stages=(0,), shardings=((1, ("",)),))
    toy = replace(toy, kind_costs=tuple(replace(cost, saved_bytes=cost.saved_bytes // 4) for cost in toy.kind_costs))
    found = list(whole_pieces(toy, rng, share=1.0, n_stages=8))
    assert found and all(bounded.best_s < INFINITY for bounded in found)
    for bounded in found:
        bounded.check()
    assert any(bounded.raised_s > 1e-3 * bounded.best_s for bounded in found)


@pytest.mark.parametrize(
    ("schedule", "n_chunks"), [("interleaved", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble_v", 2)]
)
@pytest.mark.parametrize("pp", [2, 4])
def test_the_chains_of_a_long_schedule_grow_by_the_same_passes_each_round(
    schedule: str, n_chunks: int, pp: int
) -> None:
    rests = (0,) if schedule == "interleaved" else (0, 1)
    for n_micro_batches in (n_rounds * pp + rest for n_rounds in (3, 4, 7) for rest in rests):
        mesh = Mesh(pp=pp, n_chunks=n_chunks, n_micro_batches=n_micro_batches, schedule=schedule)
        counted = counted_paths(schedule, pp, n_chunks, n_micro_batches)
        for one, every in zip(rank_paths(mesh), counted, strict=True):
            assert (one.counts == every.counts).all()
            assert one.last_stages == every.last_stages


@pytest.mark.parametrize(
    ("schedule", "n_chunks"), [("1f1b", 1), ("interleaved", 1), ("interleaved", 2), ("zero_bubble_v", 2)]
)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_a_long_schedule_has_the_moments_of_a_short_one(schedule: str, n_chunks: int, pp: int) -> None:
    rests = (0,) if schedule == "interleaved" else (0, 1)
    for n_micro_batches in (n_rounds * pp + rest for n_rounds in (1, 3, 4, 7) for rest in rests):
        mesh = Mesh(pp=pp, n_chunks=n_chunks, n_micro_batches=n_micro_batches, schedule=schedule)
        assert shape_of(mesh).moments == shape_of_schedule(schedule, pp, n_chunks, n_micro_batches).moments


def test_a_partition_is_the_fastest_plan_where_nothing_is_communicated() -> None:
    # Equal to the best of all plans, not only not above it: 1F1B, one kind of segment, memory for some of it.
    n_exact = 0
    for seed in range(12):
        toy = random_toy(seed, n_segments=6)
        silent = (replace(cost, gather_s=0.0, reduce_s=0.0) for cost in toy.kind_costs[:1])
        toy = with_space(replace(toy, kind_costs=tuple(silent), message_bytes=0), kinds=(0,) * 6)
        table = toy.price(Mesh(pp=2, n_micro_batches=4))
        partition, best_s = best_partition(table, recompute=None), fastest_s(toy, table, recompute=None)
        if partition.stages and best_s < INFINITY:
            n_exact += 1
            assert simulate(table, partition.stages).step_s == pytest.approx(best_s, rel=1e-3)
    assert n_exact > 3


def reducing_table(*, outer: bool) -> CostTable:
    """ZeRO 2 on two stages: ten segments that save 20 bytes each; reductions take 45 in each, or in the first one."""
    plain = plain_table(Mesh(pp=2, dp=2, zero_stage=2, zero_shard_degree=2, n_micro_batches=8))
    block = replace(
        plain.costs[0][0], state_bytes=0, gathered_bytes=0, gradient_bytes=0, saved_bytes=20, working_bytes=0,
        reduce_s=0.5, reducing_bytes=0 if outer else 45,
    )  # fmt: skip
    again = replace(block, recompute_s=1.0, saved_bytes=0, working_bytes=20)
    first = replace(block, saved_bytes=0, reducing_bytes=45, late_gradient_bytes=1)
    return replace(
        plain, kinds=(outer, *(0,) * 9), costs=((block, again), (first, first)), cut_s=(0.0,) * 9,
        reduces_per_micro_batch=True, overlap=Overlap(0.5, 0.5), reserved_fixed_bytes=0, reserved_ratio=1.0,
        memory_limit_bytes=170,
    )  # fmt: skip


def fastest_of_two(table: CostTable) -> tuple[float, int]:
    """The step time of the fastest plan of two stages that fits, and how many segments it recomputes."""
    found = []
    for cut, first, second in product(range(1, 10), range(10), range(10)):
        if first <= cut and second <= 10 - cut:
            stages = (StagePlan(0, cut, tuple(range(first))), StagePlan(cut, 10, tuple(range(cut, cut + second))))
            estimate = simulate(table, stages)
            found += [(estimate.step_s, first + second)] if estimate.fits else []
    return min(found)


@pytest.mark.parametrize("outer", [False, True])
def test_what_is_reduced_takes_memory_that_segments_recompute_for(outer: bool) -> None:
    # Of blocks, the reduction of the last goes on while the one before runs; outside of them, until the next forward
    # pass is over. Both are beside all that is saved, so more is recomputed than if nothing were reduced.
    table = reducing_table(outer=outer)
    silent = tuple(tuple(replace(cost, reducing_bytes=0) for cost in costs) for costs in table.costs)
    best_s, n_recomputed = fastest_of_two(table)
    assert n_recomputed > fastest_of_two(replace(table, costs=silent))[1]
    cuts = cuts_below(table, recompute=None, limit_s=1.1 * best_s)
    assert cuts is not None
    assert cuts[0][0] == pytest.approx(best_s, rel=1e-9)
    assert best_partition(table, recompute=None).bound_s <= cuts[0][0]


def test_what_is_reduced_late_takes_memory_of_several_stages_per_rank_too() -> None:
    mesh = Mesh(pp=2, dp=2, zero_stage=2, zero_shard_degree=2, n_micro_batches=8, schedule="interleaved", n_chunks=2)
    table = replace(reducing_table(outer=True), mesh=mesh, memory_limit_bytes=200)
    silent = tuple(tuple(replace(cost, reducing_bytes=0) for cost in costs) for costs in table.costs)
    late_s, none_s = (
        shared_bound_s(own, shape_of(mesh), recompute=None) for own in (table, replace(table, costs=silent))
    )
    plans = (
        (StagePlan(0, 3, tuple(range(n))), StagePlan(3, 5), StagePlan(5, 7, tuple(range(5, 5 + k))), StagePlan(7, 10))
        for n, k in product(range(4), range(3))
    )
    fitting = [estimate for estimate in (simulate(table, plan) for plan in plans) if estimate.fits]
    assert none_s < late_s <= min(estimate.step_s for estimate in fitting)


@pytest.mark.parametrize("seed", range(25))
def test_the_program_never_believes_a_plan_slower_than_it_is_and_accepts_what_fits(seed: int) -> None:
    for table, stages in random_plans(seed, count=12):
        estimate = simulate(table, stages)
        form = formulate(table, shape_of(table.mesh))
        _fix(form.model.lower, form.model.upper, form, stages)
        solution = minimize(form.model, time_limit_s=None)
        if estimate.fits:
            assert solution.objective is not None
            assert solution.objective * form.unit_s <= estimate.step_s * (1 + 1e-7)


def _fix(lower: list[float], upper: list[float], form: object, stages: tuple[StagePlan, ...]) -> None:
    """Leave the program no plan but this one."""
    for index, stage in enumerate(stages):
        for number, run in enumerate(form.runs):  # type: ignore[attr-defined]
            width = len(run.piece)
            inside = range(max(stage.start, run.start), min(stage.stop, run.start + width * run.length))
            columns = [(form.count[index][number], len(inside) // width)]  # type: ignore[attr-defined]
            for slot, column in enumerate(form.recomputed[index][number]):  # type: ignore[attr-defined]
                columns.append((column, sum((s - run.start) % width == slot for s in stage.recomputed if s in inside)))
            for column, value in columns:
                lower[column] = upper[column] = float(value)


def test_a_shortfall_is_proof_that_no_plan_fits() -> None:
    n_proofs = 0
    for seed in range(15):
        toy = random_toy(seed, n_segments=4, tight=True)
        for mesh in list_meshes(toy.space, Options(max_micro_batch_size=2))[0]:
            table = toy.price(mesh)
            short_bytes = shortfall_bytes(table)
            if short_bytes == 0:
                continue
            n_proofs += 1
            for stages in all_stages(toy, mesh):
                assert max(simulate(table, stages).needed_bytes) >= table.memory_limit_bytes + short_bytes
    assert n_proofs > 50


def test_activations_of_one_stage_and_gradients_of_another_need_not_meet_on_a_rank() -> None:
    # interleaved, 2 ranks, 2 micro-batches; stages 0 and 1 have gradients of 8, stages 2 and 3 keep 4 per micro-batch.
    # Each rank peaks at 2 x 4 before its first backward pass, and at 8 in its last ones, never at 4 + 8.
    mesh = Mesh(pp=2, schedule="interleaved", n_chunks=2, n_micro_batches=2)
    plain = replace(plain_table(mesh).costs[0][0], state_bytes=0, gathered_bytes=0, working_bytes=0)
    early = replace(plain, saved_bytes=0, gradient_bytes=8)
    late = replace(plain, saved_bytes=4, gradient_bytes=0)
    table = replace(
        plain_table(mesh), kinds=(0, 0, 1, 1), costs=((early, early), (late, late)), cut_s=(0.0,) * 3,
        message_bytes=(), reduces_per_micro_batch=False, reserved_fixed_bytes=0, reserved_ratio=1.0,
        memory_limit_bytes=8,
    )  # fmt: skip
    assert simulate(table, tuple(StagePlan(i, i + 1) for i in range(4))).needed_bytes == (8, 8)
    assert shortfall_bytes(table) == 0


@pytest.mark.parametrize(
    ("schedule", "n_chunks", "n_micro_batches"),
    [("1f1b", 1, 6), ("gpipe", 1, 3), ("interleaved", 1, 8), ("interleaved", 2, 8), ("zero_bubble_v", 2, 9)],
)
@pytest.mark.parametrize("cut_s", [0.25, 6.0])  # the latter queue where ranks receive ahead
def test_the_critical_path_adds_up_to_the_simulated_step(
    schedule: str, n_chunks: int, n_micro_batches: int, cut_s: float
) -> None:
    mesh = Mesh(pp=4, schedule=schedule, n_chunks=n_chunks, n_micro_batches=n_micro_batches)
    table = plain_table(mesh, cut_s=cut_s)
    size = 8 // mesh.n_stages
    stages = tuple(StagePlan(index * size, (index + 1) * size) for index in range(mesh.n_stages))
    estimate = simulate(table, stages)
    times = {FIRST_FORWARD: size, FORWARD: size, BACKWARD: 2 * size, LAST_BACKWARD: 2 * size, CUT: cut_s}
    times |= {INPUTS: 1.5 * size, WEIGHTS: 0.5 * size, LAST_WEIGHTS: 0.5 * size}
    of_first_stage = {(INPUTS, 0): 0.0, (WEIGHTS, 0): 2 * size, (LAST_WEIGHTS, 0): 2 * size}
    lengths = [
        sum(of_first_stage.get((what, s), times.get(what, 0.0)) * count for (what, s), count in path.counts)
        for path in critical_paths(table, stages)
    ]
    assert max(lengths) == pytest.approx(estimate.step_s)


def test_the_first_paths_of_1f1b_are_tight_for_equal_stages_without_transfers() -> None:
    # 4 stages, 6 micro-batches: (6 + 3) x 3 s = 27 s
    mesh = Mesh(pp=4, n_micro_batches=6)
    times = {FIRST_FORWARD: 1.0, FORWARD: 1.0, BACKWARD: 2.0, LAST_BACKWARD: 2.0}
    lengths = [sum(times.get(what, 0.0) * count for (what, _), count in path.counts) for path in initial_paths(mesh)]
    assert max(lengths) == 27.0


def test_equal_neighbouring_pieces_form_one_run() -> None:
    mesh = Mesh()
    table = replace(plain_table(mesh), kinds=(0, 1, 2, 1, 2, 3, 3, 3), cut_s=(0.1, None, 0.1, None, 0.1, 0.1, 0.1))
    assert [(run.start, run.piece, run.length) for run in runs_of(table)] == [
        (0, (0,), 1),
        (1, (1, 2), 2),
        (5, (3,), 3),
    ]


def test_boundaries_that_cost_more_end_a_run() -> None:
    table = replace(plain_table(Mesh()), cut_s=(0.1, 0.1, 0.9, 0.1, 0.1, 0.1, 0.1))
    assert [run.length for run in runs_of(table)] == [3, 5]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("seed", range(8))
def test_all_plans_are_counted_and_each_is_listed_once(seed: int, schedule: str) -> None:
    toy = random_toy(seed, n_segments=6)
    n_chunks = 1 if schedule == "1f1b" else max(1, min(2, toy.space.n_pieces // 2))
    mesh = Mesh(pp=min(2, toy.space.n_pieces), n_micro_batches=4, schedule=schedule, n_chunks=n_chunks)
    runs = runs_of(toy.price(mesh))
    listed = list(all_plans(runs, mesh))
    assert len(listed) == len(set(listed)) == count_plans(runs, mesh)
    assert set(listed) == set(all_stages(toy, mesh))


def test_a_stage_that_ends_inside_a_run_has_no_reduction_before_its_first_segment() -> None:
    # Backward of stage 0 (two segments of a run of three): gather 1.5, compute 1 beside a gather of 1.5 (0.5 exposed),
    # compute 1. A reduction of 2 beside the first segment, as inside the stage, would add 2 more that do not exist.
    mesh = Mesh(pp=2, dp=2, zero_stage=3, zero_shard_degree=2, n_micro_batches=4)
    table = plain_table(mesh)
    cost = replace(table.costs[0][0], backward_s=1.0, gather_s=1.5, reduce_s=2.0)
    table = replace(
        table, kinds=(0, 0, 0, 1), costs=((cost, cost), (cost, cost)), cut_s=(0.0,) * 3,
        message_bytes=(), overlap=Overlap(0.0, 0.0), gathers_per_micro_batch=True, reduces_per_micro_batch=True,
        memory_limit_bytes=2**60,
    )  # fmt: skip
    stages = (StagePlan(0, 2), StagePlan(2, 4))
    form = formulate(table, shape_of(mesh))
    _fix(form.model.lower, form.model.upper, form, stages)
    form.model.costs[form.total] = 0.0
    form.model.costs[form.times[BACKWARD, 0]] = 1.0
    assert minimize(form.model, time_limit_s=None).objective == pytest.approx(4.0 / form.unit_s)


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble_v"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_no_bound_exceeds_a_step_whose_transfers_take_as_long_as_its_reductions(
    schedule: str, overlap: Overlap
) -> None:
    costs = [segment(forward_s=1, backward_s=2, reduce_s=1)] * 4
    mesh = pipeline(2, 8, schedule=schedule, n_chunks=2)
    table = table_of(costs, mesh=mesh, cut_s=1, reduces=True, overlap=overlap)
    step_s = simulate(table, one_each(4)).step_s
    assert 0.9 * step_s <= shared_bound_s(table, shape_of(mesh), recompute=None) <= step_s
