"""The search over meshes that keep attention: equal to brute force, looked at only where that may matter."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from brute_force import Toy, all_stages, best_by_trying, make_plan, random_toy, with_space

from autoplan.hardware import load_hardware_profile
from autoplan.options import Options
from autoplan.planning.problem import trace_model
from autoplan.search import search
from autoplan.search.bounds import step_bound_s
from autoplan.search.meshes import list_meshes
from autoplan.search.result import SearchResult
from autoplan.search.twins import has_twin, recomputes_kept, twin_of
from autoplan.simulator.simulate import simulate
from autoplan.space.priced import priced_space

EXACT = Options(max_micro_batch_size=2, top=1, require_optimal=True)
EXAMPLES = Path(__file__).parent.parent / "examples"


def toy_with_attention(seed: int, *, share: float = 0.6, **changes: object) -> Toy:
    """A random toy, of which recomputation may keep attention; short of memory as often as not."""
    toy = random_toy(seed, **changes)  # type: ignore[arg-type]
    return replace(with_space(toy, keeps_attention=(False, True)), attention_share=share)


def run(toy: Toy, options: Options = EXACT) -> SearchResult:
    return search(toy.space, price=toy.price, options=options, make_plan=make_plan)


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.nightly) for block in range(1, 25))])
def test_with_attention_that_may_be_kept_the_search_equals_brute_force(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        toy = toy_with_attention(seed, n_segments=4, n_devices=4 if seed % 4 == 0 else 2, global_batch=4)
        want, result = best_by_trying(toy, EXACT), run(toy)
        assert result.status == ("infeasible" if want is None else "optimal"), seed
        assert want is None or result.best.estimate.step_s == pytest.approx(want, rel=1e-6), seed


@pytest.mark.parametrize("seed", range(8))
def test_no_bound_by_arithmetic_tells_a_mesh_from_its_twin_which_needs_as_much_memory_or_more(seed: int) -> None:
    # so a twin may wait until its mesh has been looked at; and where that does not fit, the twin does not
    toy = toy_with_attention(seed, n_segments=4, n_devices=2)
    for mesh in filter(has_twin, list_meshes(toy.space, EXACT)[0]):
        table, twin = toy.price(mesh), toy.price(twin_of(mesh))
        assert step_bound_s(twin) == step_bound_s(table)
        for stages in islice(all_stages(toy, mesh), 3, 40, 9):
            whole, kept = simulate(table, stages), simulate(twin, stages)
            assert all(a <= b for a, b in zip(whole.needed_bytes, kept.needed_bytes, strict=True))
            assert kept.step_s <= whole.step_s * (1 + 1e-12)


def test_a_plan_that_keeps_attention_recomputes_some_and_none_is_there_twice() -> None:
    n_kept = 0
    for seed in range(40):
        toy = toy_with_attention(seed, share=0.95, n_segments=4, n_devices=2, tight=True)
        result = run(toy, replace(EXACT, top=5))
        found = [item for item in (result.best, *result.alternatives) if item is not None]
        assert len({(item.plan.mesh, item.plan.stages) for item in found}) == len(found)
        for plan in (item.plan for item in found if item.plan.mesh.keeps_attention):
            assert recomputes_kept(toy.price(plan.mesh), plan.stages)
            n_kept += 1
    assert n_kept > 0


def test_where_attention_is_hardly_worth_its_memory_no_mesh_has_a_twin() -> None:
    for seed in range(10):
        toy = toy_with_attention(seed, share=0.01, n_segments=4, n_devices=2)
        assert not any(item.mesh.keeps_attention for item in run(toy).rejected)


def planned(context: int, *fix: tuple[str, str]) -> SearchResult:
    """A Llama under data parallelism on eight GPUs, which has little room there."""
    graph = trace_model(EXAMPLES / "llama.py", overrides={"size": "8b", "context": context})
    hardware = load_hardware_profile("dgx_h100_x8")
    options = Options(fix=(("tp", "1"), ("pp", "1"), *fix), top=1)
    offered = priced_space(graph, hardware, options, global_batch=8 * 131072 // context)
    return search(offered.space, price=offered.price, options=options, make_plan=offered.make_plan)


@pytest.mark.nightly
def test_at_32k_tokens_attention_is_kept() -> None:
    long, whole = planned(32768), planned(32768, ("keep_attention", "off"))
    assert long.best is not None
    assert whole.best is not None
    assert whole.best.plan.recompute != "none"
    assert long.best.plan.mesh.keeps_attention
    assert long.best.estimate.step_s < whole.best.estimate.step_s


@pytest.mark.nightly
def test_at_1k_tokens_attention_is_kept_only_where_that_is_fixed() -> None:
    short = planned(1024, ("recompute", "full"))
    assert short.best is not None
    assert not short.best.plan.mesh.keeps_attention
    fixed = planned(1024, ("recompute", "full"), ("keep_attention", "on"))
    assert fixed.best is not None
    assert fixed.best.plan.mesh.keeps_attention
