"""The search: equal to brute force, monotone, deterministic, and honest when it stops or when nothing fits."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from brute_force import Toy, all_stages, best_by_trying, make_plan, random_toy, with_space
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.cost.table import CostTable
from autoplan.options import Options
from autoplan.parallel_plan import Mesh
from autoplan.search import GOOD_ENOUGH, search
from autoplan.search.meshes import list_meshes
from autoplan.search.plans import obeys_recompute
from autoplan.search.result import SearchResult
from autoplan.simulator.simulate import simulate

EXACT = Options(max_micro_batch_size=2, top=1, require_optimal=True)
FEW = settings(max_examples=12)
SEEDS = st.integers(0, 10**6)


def run(toy: Toy, options: Options = EXACT, **changes: object) -> SearchResult:
    return search(toy.space, price=toy.price, options=options, make_plan=make_plan, **changes)  # type: ignore[arg-type]


def best_s(result: SearchResult) -> float:
    """The step time found; infinite when nothing fits."""
    assert result.status in ("optimal", "infeasible")
    return float("inf") if result.best is None else result.best.estimate.step_s


# ------------------------------------------------------------------------------------------------------ brute force


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.nightly) for block in range(1, 25))])
def test_the_search_equals_brute_force_on_500_random_toys(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        global_batch = 6 if seed % 5 == 0 else 4
        toy = random_toy(seed, n_segments=4, n_devices=4 if seed % 4 == 0 else 2, global_batch=global_batch)
        want = best_by_trying(toy, EXACT)
        result = run(toy)
        assert result.status == ("infeasible" if want is None else "optimal"), seed
        assert want is None or best_s(result) == pytest.approx(want, rel=1e-6), seed
        assert want is None or result.gap == 0.0, seed


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 6))])
def test_the_search_equals_brute_force_on_six_segments(seed: int) -> None:
    toy = random_toy(1000 + seed, n_segments=6, n_devices=2)
    want = best_by_trying(toy, EXACT)
    assert best_s(run(toy)) == pytest.approx(float("inf") if want is None else want, rel=1e-6)


@pytest.mark.parametrize("seed", range(10))
def test_without_a_demand_for_proof_the_plan_is_within_the_gap_of_the_optimum(seed: int) -> None:
    toy = random_toy(seed, n_segments=4, n_devices=2)
    want = best_by_trying(toy, EXACT)
    result = run(toy, replace(EXACT, require_optimal=False))
    if want is None:
        assert result.status == "infeasible"
        return
    assert result.best is not None
    assert result.bound_s is not None
    assert result.bound_s * (1 - 1e-6) <= want <= result.best.estimate.step_s * (1 + 1e-6)
    assert result.status == ("optimal" if result.gap == 0.0 else "feasible")


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 10))])
def test_objective_cost_minimizes_step_time_x_devices(seed: int) -> None:
    toy = random_toy(seed, n_segments=4, n_devices=4, tight=False)
    options = replace(EXACT, objective="cost")
    want = best_by_trying(toy, options, weight=lambda mesh: mesh.n_devices)
    result = run(toy, options)
    assert result.best is not None
    assert best_s(result) * result.best.plan.mesh.n_devices == pytest.approx(want, rel=1e-6)
    assert result.gap == 0.0


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_fixed_recomputation_is_obeyed_and_still_optimal(recompute: str) -> None:
    def obeys(stages: tuple[object, ...]) -> bool:
        chosen = {segment for stage in stages for segment in stage.recomputed}  # type: ignore[attr-defined]
        full = {s for s, kind in enumerate(toy.space.kinds) if toy.space.kinds.count(kind) > 1} or set(range(4))
        return {"none": not chosen, "full": chosen >= full, "selective": bool(chosen)}[recompute]

    options = replace(EXACT, fix=(("recompute", recompute),))
    for seed in range(6):
        toy = random_toy(seed, n_segments=4, n_devices=2, tight=False)
        want = best_by_trying(toy, options, keep=obeys)
        result = run(toy, options)
        assert best_s(result) == pytest.approx(want, rel=1e-6)
        assert result.best is not None
        assert obeys(result.best.plan.stages)


# ------------------------------------------------------------------------------------------------------------ laws


@FEW
@given(seed=SEEDS)
def test_more_devices_never_hurt(seed: int) -> None:
    toy = random_toy(seed, n_segments=4, n_devices=2)
    assert best_s(run(with_space(toy, n_devices=4))) <= best_s(run(toy)) * (1 + 1e-6)


@FEW
@given(seed=SEEDS, factor=st.floats(1.0, 3.0))
def test_more_memory_never_hurts(seed: int, factor: float) -> None:
    toy = random_toy(seed, n_segments=4, n_devices=2, tight=True)
    larger = replace(toy, memory_limit_bytes=int(toy.memory_limit_bytes * factor))
    assert best_s(run(larger)) <= best_s(run(toy)) * (1 + 1e-6)


@FEW
@given(seed=SEEDS, factor=st.floats(0.1, 1.0))
def test_more_bandwidth_never_hurts(seed: int, factor: float) -> None:
    toy = random_toy(seed, n_segments=4, n_devices=4)
    assert best_s(run(replace(toy, comm_factor=factor))) <= best_s(run(toy)) * (1 + 1e-6)


@FEW
@given(seed=SEEDS)
def test_more_micro_batch_choices_never_hurt(seed: int) -> None:
    toy = random_toy(seed, n_segments=4, n_devices=2)
    more = replace(EXACT, max_micro_batch_size=4)
    assert best_s(run(toy, more)) <= best_s(run(toy)) * (1 + 1e-6)


@FEW
@given(seed=SEEDS)
def test_the_same_input_gives_the_same_result(seed: int) -> None:
    toy = random_toy(seed, n_segments=5)
    one, other = (
        replace(run(toy, replace(EXACT, require_optimal=False)), search_s=0.0, first_plan_s=None) for _ in range(2)
    )
    assert one == other


# --------------------------------------------------------------------------------------------------- what is returned


def loose_toy(seed: int = 2, **options: object) -> Toy:
    return random_toy(seed, tight=False, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(8))
def test_a_warm_start_changes_nothing_but_the_work(seed: int) -> None:
    toy = random_toy(seed)
    known = run(toy).best
    better = replace(toy, comm_factor=0.7, memory_limit_bytes=toy.memory_limit_bytes * 5 // 4)
    cold = run(better)
    warm = run(better, warm_start=None if known is None else known.plan)
    assert warm.status == cold.status
    assert best_s(warm) == pytest.approx(best_s(cold), rel=1e-9)


def test_a_warm_start_that_the_space_does_not_have_is_left_out() -> None:
    toy = loose_toy()
    known = run(toy).best
    assert known is not None
    fixed = replace(EXACT, fix=(("dp", "1"),))
    assert known.plan.mesh.dp > 1
    warm, cold = run(toy, fixed, warm_start=known.plan), run(toy, fixed)
    assert (warm.best, warm.status, warm.bound_s) == (cold.best, cold.status, cold.bound_s)


@pytest.mark.parametrize("seed", range(6))
def test_every_mesh_is_the_best_or_rejected_once(seed: int) -> None:
    toy = random_toy(seed)
    result = run(toy)
    named = Counter([rejection.mesh for rejection in result.rejected])
    if result.best is not None:
        named[result.best.plan.mesh] += 1
    assert named == Counter(list_meshes(toy.space, EXACT)[0])
    assert result.n_meshes == len(named)


def test_alternatives_are_other_meshes_in_order_of_their_step_time() -> None:
    result = run(loose_toy(), replace(EXACT, top=3))
    assert result.best is not None
    found = [result.best, *result.alternatives]
    assert len(result.alternatives) == 3
    assert len({candidate.plan.mesh for candidate in found}) == 4
    times = [candidate.estimate.step_s for candidate in found]
    assert times == sorted(times)
    assert all(candidate.bound_s <= candidate.estimate.step_s for candidate in found)


def test_no_alternative_would_be_faster_by_more_than_a_per_cent_with_any_other_cut() -> None:
    n_tried = 0
    for seed in range(12):
        toy = random_toy(seed, n_segments=8, n_devices=8, global_batch=2)
        result = run(toy, Options(top=8, fix=(("recompute", "none"),)))
        for candidate in result.alternatives:
            mesh = candidate.plan.mesh
            if mesh.pp > 1 and mesh.n_chunks == 1:
                plain = (stages for stages in all_stages(toy, mesh) if not any(stage.recomputed for stage in stages))
                replays = (simulate(toy.price(mesh), stages) for stages in plain)
                best_of_mesh_s = min(replay.step_s for replay in replays if replay.fits)
                n_tried += 1
                assert candidate.estimate.step_s <= best_of_mesh_s * 1.01
    assert n_tried > 40


@pytest.mark.parametrize(
    ("seeds", "n_wanted"), [(range(8), 10), pytest.param(range(8, 24), 20, marks=pytest.mark.nightly)], ids=str
)
def test_no_alternative_would_be_faster_with_the_stages_of_the_best_plan(seeds: range, n_wanted: int) -> None:
    n_alike = 0
    for seed in seeds:
        toy = random_toy(seed, n_segments=6, n_devices=4, global_batch=8)
        result = run(toy, Options(top=8, fix=(("pp", "2"),)))
        for candidate in result.alternatives:
            assert result.best is not None
            mesh, stages = candidate.plan.mesh, result.best.plan.stages
            if mesh.n_stages != len(stages):
                continue
            table = toy.price(mesh)
            same = simulate(table, stages)
            if same.fits and obeys_recompute(table, stages, recompute=None):
                n_alike += 1
                assert candidate.estimate.step_s <= same.step_s * (1 + 1e-9)
    assert n_alike > n_wanted


@pytest.mark.parametrize("seed", range(12))
def test_the_best_plan_is_never_slower_than_a_recipe_that_fits_by_more_than_the_gap(seed: int) -> None:
    result = run(random_toy(seed), Options(max_micro_batch_size=2))
    for baseline in result.baselines:
        if baseline.estimate.fits:
            assert result.best is not None
            assert result.best.estimate.step_s <= baseline.estimate.step_s * (1.0 + GOOD_ENOUGH)


def test_neither_solver_writes_anything(capfd: pytest.CaptureFixture[str]) -> None:
    run(random_toy(2), Options(max_micro_batch_size=2))  # its programs passed a limit of the second solver's presolve
    assert tuple(capfd.readouterr()) == ("", "")


def test_recipes_are_what_they_are_called() -> None:
    meshes = {candidate.baseline: candidate.plan.mesh for candidate in run(loose_toy()).baselines}
    assert set(meshes) == {"DDP", "FSDP", "hand rule"}
    assert (meshes["DDP"].dp, meshes["DDP"].zero_stage) == (4, 0)
    assert (meshes["FSDP"].dp, meshes["FSDP"].zero_stage) == (4, 3)
    assert (meshes["hand rule"].tp, meshes["hand rule"].pp, meshes["hand rule"].dp) == (2, 1, 2)


def test_recipes_divide_nothing_where_no_plan_may() -> None:
    result = run(with_space(loose_toy(), zero_stages=(0,)))
    assert {item.baseline for item in result.baselines} == {"DDP", "hand rule"}
    assert all(item.plan.mesh.zero_stage == 0 and item.plan.mesh.zero_shard_degree == 1 for item in result.baselines)


@pytest.mark.parametrize(("tp", "has_one"), [("2", True), ("1", False)])  # of hosts with two devices
def test_the_hand_rule_is_left_out_where_the_layouts_of_another_degree_are_fixed(tp: str, has_one: bool) -> None:
    toy = loose_toy()
    only = with_space(toy, shardings=tuple(pair for pair in toy.space.shardings if pair[0] in (1, int(tp))))
    names = [item.baseline for item in run(only, replace(EXACT, fix=(("tp", tp),))).baselines]
    assert names == ["DDP", "FSDP", *["hand rule"] * has_one]


def test_a_recipe_that_does_not_fit_is_still_reported_with_its_estimate() -> None:
    toy = replace(loose_toy(), memory_limit_bytes=2**20)
    baselines = run(toy).baselines
    assert {candidate.baseline for candidate in baselines} == {"DDP", "FSDP", "hand rule"}
    assert not any(candidate.estimate.fits for candidate in baselines)


def test_a_best_plan_that_is_a_recipe_says_so() -> None:
    toy = loose_toy(n_devices=1)
    result = run(with_space(toy, n_devices=1, n_devices_per_host=1))
    assert result.best is not None
    assert result.best.baseline == "DDP"


# ------------------------------------------------------------------------------------------------ stopping and nothing


def ticking(step_s: float) -> Callable[[], float]:
    """A clock that advances by `step_s` whenever it is read."""
    ticks = itertools.count()
    return lambda: next(ticks) * step_s


def hard_toy() -> Toy:
    """A toy whose recipes do not fit but some plans do: a search that stops at once has nothing."""
    for seed in range(105, 505):  # the first of them is one today
        toy = random_toy(seed)
        result = run(toy)
        if result.best is not None and not any(candidate.estimate.fits for candidate in result.baselines):
            return toy
    raise AssertionError("no such toy")


def test_a_time_limit_without_any_plan_is_unknown() -> None:
    result = run(hard_toy(), replace(EXACT, time_limit_s=5e-5), clock=ticking(1e-4))
    assert (result.status, result.best) == ("unknown", None)
    assert {rejection.reason for rejection in result.rejected} == {"time limit"}


def test_patience_waits_for_the_first_plan_and_then_a_time_limit_longer() -> None:
    toy = hard_toy()
    limited = replace(EXACT, time_limit_s=2.5)
    patient = run(toy, limited, clock=ticking(1.0), patience_s=1e6)
    assert patient.status == "feasible" and patient.best is not None
    assert patient.first_plan_s is not None and patient.search_s < patient.first_plan_s + 10.0
    assert run(toy, limited, clock=ticking(1.0), patience_s=2.5).status == "unknown"


def test_a_space_that_takes_long_to_list_is_listed_in_part_and_then_nothing_is_proved() -> None:
    toy = loose_toy(6)
    n_all = len(list_meshes(toy.space, EXACT)[0])
    result = run(toy, replace(EXACT, time_limit_s=5.0), clock=ticking(0.3))
    # a fifth of the time is 1 s: 3 ticks of 0.3 s, and the meshes of three degrees are listed in one each
    assert 0 < result.n_meshes < n_all
    assert (result.status, result.bound_s, result.stopped_by) == ("feasible", None, "time limit")
    assert result.best is not None and result.best.plan.mesh.n_devices == toy.space.n_devices


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_plain_recipes_take_half_the_time_at_most(share: float) -> None:
    toy, now_s, limit_s = loose_toy(6), [0.0], 100.0

    def price(mesh: Mesh) -> CostTable:
        now_s[0] += limit_s * share  # each mesh takes so long
        return toy.price(mesh)

    search(toy.space, price=price, options=Options(time_limit_s=limit_s), make_plan=make_plan, clock=lambda: now_s[0])
    assert now_s[0] <= limit_s * (1.0 + share)


def test_a_time_limit_returns_the_best_so_far_with_an_honest_gap() -> None:
    toy = loose_toy(6)
    optimum_s = best_s(run(toy))
    result = run(toy, replace(EXACT, time_limit_s=5e-5), clock=ticking(1e-4))
    assert result.status == "feasible"
    assert result.best is not None
    assert result.bound_s is not None
    assert result.bound_s <= optimum_s <= result.best.estimate.step_s
    assert result.gap is not None
    assert result.gap > 0.0


def test_where_time_ends_among_bounds_by_arithmetic_a_mesh_of_every_combination_of_degrees_is_cut() -> None:
    toy, now_s = replace(loose_toy(0, n_segments=6, n_devices=8, global_batch=8), comm_factor=20.0), [0.0]

    def price(mesh: Mesh) -> CostTable:
        now_s[0] += 0.001
        return toy.price(mesh)

    options = Options(time_limit_s=0.02, top=1, fix=(("schedule", "plain"),))  # of 130 meshes about 20 are priced
    result = search(
        toy.space, price=price, options=options, make_plan=make_plan, clock=lambda: now_s[0], patience_s=1e6
    )
    assert (result.status, result.stopped_by) == ("feasible", "time limit") and result.best is not None
    recipes_s = [recipe.estimate.step_s for recipe in result.baselines if recipe.estimate.fits]
    assert result.best.estimate.step_s < 0.6 * min(recipes_s)
    assert result.bound_s is not None and result.bound_s <= best_s(run(toy, replace(EXACT, fix=options.fix)))


def test_little_is_priced_after_the_time_limit() -> None:
    toy, now_s = random_toy(8, n_segments=6, n_devices=8, global_batch=8), [0.0]

    def price(mesh: Mesh) -> CostTable:
        now_s[0] += 0.01
        return toy.price(mesh)

    def priced_s(limit_s: float | None) -> float:
        now_s[0] = 0.0
        options = Options(time_limit_s=limit_s)
        search(toy.space, price=price, options=options, make_plan=make_plan, clock=lambda: now_s[0])
        return now_s[0]

    limit_s = 0.8 * priced_s(None)
    assert priced_s(limit_s) <= limit_s + 0.011


def test_ctrl_c_returns_the_best_so_far() -> None:
    toy = loose_toy(6)
    calls = itertools.count()
    limit = 20

    def price(mesh: Mesh) -> CostTable:
        if next(calls) == limit:
            raise KeyboardInterrupt
        return toy.price(mesh)

    result = search(toy.space, price=price, options=EXACT, make_plan=make_plan)
    assert result.status == "feasible"
    assert result.best is not None
    assert "interrupted" in {rejection.detail for rejection in result.rejected}
    assert len(result.rejected) == result.n_meshes - 1


def test_ctrl_c_before_anything_is_known_proves_nothing() -> None:
    def price(mesh: Mesh) -> CostTable:
        raise KeyboardInterrupt

    result = search(loose_toy().space, price=price, options=EXACT, make_plan=make_plan)
    assert (result.status, result.best, result.bound_s) == ("unknown", None, None)
    assert {rejection.detail for rejection in result.rejected} == {"interrupted"}


def test_nothing_fits_names_stage_and_bytes_of_the_closest_mesh() -> None:
    toy = replace(loose_toy(), memory_limit_bytes=2**24)
    result = run(toy)
    assert (result.status, result.best, result.bound_s) == ("infeasible", None, None)
    assert {rejection.reason for rejection in result.rejected} == {"memory"}
    assert all((rejection.short_bytes or 0) > 0 for rejection in result.rejected)
    assert sum("stage" in rejection.detail and "needs" in rejection.detail for rejection in result.rejected) > 0
    assert any(rejection.detail.startswith("stage ") for rejection in result.rejected)


ROOT = Path(__file__).parent.parent
ONE_RUN = """
from pathlib import Path
from autoplan.api import trace_model
from autoplan.hardware import load_hardware_profile
from autoplan.options import Options
from autoplan.search import GOOD_ENOUGH, search
from autoplan.space.priced import priced_space

options = Options(global_batch=64)
graph = trace_model(Path("examples/gpt.py"), overrides={"size": "char"})
offered = priced_space(graph, load_hardware_profile("dgx_a100_x8", n_hosts=2), options, global_batch=64)
result = search(offered.space, price=offered.price, options=options, make_plan=offered.make_plan)
print(result.status, result.best, result.alternatives, result.baselines, result.rejected, result.bound_s)
"""


@pytest.mark.nightly
def test_five_runs_of_a_real_model_give_the_same_bytes(tmp_path: Path) -> None:
    def output(hash_seed: int) -> bytes:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONHASHSEED": str(hash_seed)}
        command = [sys.executable, "-c", ONE_RUN]
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True).stdout

    first = output(0)
    assert len(first) > 1000
    assert all(output(seed) == first for seed in range(1, 5))
