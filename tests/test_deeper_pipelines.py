"""Pipelines with more stages per rank than the space has: taken where they are much faster, and never called proved."""

from __future__ import annotations

from dataclasses import replace

import pytest
from brute_force import Toy, best_by_trying, make_plan, random_toy

from autoplan.cost.table import CostTable
from autoplan.options import Options
from autoplan.parallel_plan import Mesh
from autoplan.search import search
from autoplan.search.deeper_pipelines import WORTHWHILE
from autoplan.search.meshes import is_deeper, list_meshes
from autoplan.search.result import SearchResult

PIPELINE = Options(max_micro_batch_size=1, top=1, require_optimal=True, fix=(("pp", "4"), ("dp", "1"), ("tp", "1")))
ONE_STAGE = replace(PIPELINE, fix=(*PIPELINE.fix, ("stages_per_rank", "1")))


def long_pipeline(seed: int, *, max_chunks: int, global_batch: int = 4) -> Toy:
    """Eight segments, all alike, for four ranks; with two stages per rank there is one way to cut them."""
    toy = random_toy(seed, n_devices=4, global_batch=global_batch, tight=False)
    schedules = ("1f1b", "gpipe", "interleaved")
    space = replace(toy.space, kinds=(0,) * 8, cuts=(True,) * 7, max_chunks=max_chunks, schedules=schedules)
    return replace(toy, space=space, memory_limit_bytes=2**40)


def best_s(toy: Toy, options: Options) -> float:
    """The proved optimum of the space alone."""
    best = run(toy, options).best
    assert best is not None
    return best.estimate.step_s


def run(toy: Toy, options: Options = PIPELINE) -> SearchResult:
    return search(toy.space, price=toy.price, options=options, make_plan=make_plan)


@pytest.mark.parametrize("action_s", [0.0, 5.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_plan_beyond_the_space_is_the_answer_where_it_is_much_faster_than_all_of_the_space(
    seed: int, action_s: float
) -> None:
    narrow, wide = (replace(long_pipeline(seed, max_chunks=chunks), action_s=action_s) for chunks in (1, 2))
    of_space, of_both = (best_s(narrow, ONE_STAGE), best_s(wide, PIPELINE))
    result = run(narrow)
    assert result.best is not None
    is_beyond = of_both < of_space * (1.0 - WORTHWHILE)
    assert is_beyond == (action_s == 0.0)
    assert is_deeper(result.best.plan.mesh, narrow.space) == is_beyond
    assert result.best.estimate.step_s == pytest.approx(of_both if is_beyond else of_space, rel=1e-6)
    assert (result.status, result.gap) == ("optimal", 0.0)


@pytest.mark.nightly
@pytest.mark.parametrize("max_chunks", [1, 2])
def test_a_plan_beyond_the_space_is_as_fast_as_the_best_of_all_plans(max_chunks: int) -> None:
    best = run(long_pipeline(0, max_chunks=max_chunks)).best
    assert best is not None
    assert best.estimate.step_s == pytest.approx(best_by_trying(long_pipeline(0, max_chunks=2), PIPELINE), rel=1e-6)


def test_the_mesh_beyond_the_space_is_counted_and_the_others_are_rejected_once() -> None:
    toy = long_pipeline(0, max_chunks=1)
    result = run(toy)
    meshes = list_meshes(toy.space, PIPELINE)[0]
    assert result.n_meshes == len(meshes) + 1
    assert {item.mesh for item in result.rejected} == set(meshes)
    assert replace(run(toy), search_s=0.0, first_plan_s=None) == replace(result, search_s=0.0, first_plan_s=None)


@pytest.mark.parametrize(("name", "value"), [("stages_per_rank", "1"), ("schedule", "1f1b"), ("schedule", "plain")])
def test_nothing_beyond_the_space_is_tried_that_was_ruled_out(name: str, value: str) -> None:
    fixed = replace(PIPELINE, fix=(*PIPELINE.fix, (name, value)))
    for seed in range(4):
        best = run(long_pipeline(seed, max_chunks=1), fixed).best
        assert best is not None
        assert best.plan.mesh.n_chunks == 1


def test_a_pipeline_of_many_micro_batches_has_no_bubble_worth_it() -> None:
    # 3 / (3 + 128) of the step are 2.3 %, below `WORTHWHILE`: no more meshes are priced than are in the space
    toy, priced = long_pipeline(0, max_chunks=1, global_batch=128), list[Mesh]()

    def price(mesh: Mesh) -> CostTable:
        priced.append(mesh)
        return toy.price(mesh)

    search(toy.space, price=price, options=replace(PIPELINE, require_optimal=False), make_plan=make_plan)
    assert not any(is_deeper(mesh, toy.space) for mesh in priced)


def test_time_is_left_to_look_beyond_the_space() -> None:
    toy, now_s, priced = long_pipeline(0, max_chunks=1), [0.0], list[Mesh]()

    def price(mesh: Mesh) -> CostTable:
        now_s[0] += not is_deeper(mesh, toy.space)
        priced.append(mesh)
        return toy.price(mesh)

    def search_for(limit_s: float | None) -> SearchResult:
        now_s[0] = 0.0
        options = replace(PIPELINE, time_limit_s=limit_s)
        return search(toy.space, price=price, options=options, make_plan=make_plan, clock=lambda: now_s[0])

    search_for(None)
    before_s = next(place for place, mesh in enumerate(priced) if is_deeper(mesh, toy.space))
    best = search_for(before_s / 0.95).best  # all the rest takes more than nine tenths of the limit
    assert best is not None
    assert is_deeper(best.plan.mesh, toy.space)
