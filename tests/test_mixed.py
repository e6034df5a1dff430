"""Mixed clusters: pipelines over groups of different devices, against brute force and by law."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path

import pytest
from brute_force import all_stages, random_toy, with_space
from distributed.launch import run_program
from distributed.programs import EXAMPLES
from mixed_toys import EXACT, best_of_all, best_s, layered, mixed_space, two_toys

from autoplan import api
from autoplan.answers.answer import answer_from_json, answer_to_json
from autoplan.cost.between import between_s
from autoplan.cost.mixed_price import joined, make_mixed_pricer
from autoplan.cost.price import make_pricer
from autoplan.errors import InfeasibleError, PlanMismatchError, UsageError
from autoplan.hardware import load_hardware_profile
from autoplan.hardware.cluster import GroupLink, load_cluster
from autoplan.html_report import plan_page
from autoplan.options import Options
from autoplan.parallel_plan import GroupRanks, Mesh, StagePlan
from autoplan.report.explain import explain_report
from autoplan.report.plan import plan_report
from autoplan.rules import load_rules
from autoplan.search import GOOD_ENOUGH, search
from autoplan.search.mixed.meshes import MeshQueue, families_of, shapes
from autoplan.search.mixed.search import search_mixed
from autoplan.search.one_stage.partition import best_partition
from autoplan.search.result import SearchResult
from autoplan.simulator.simulate import simulate
from autoplan.solver.linear_model import INFINITY
from autoplan.space.mixed_space import mixed_space as real_mixed_space
from autoplan.space.priced import priced_space

# ------------------------------------------------------------------------------------------------------ brute force


NIGHTLY_BLOCKS = range(1, 8)


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.nightly) for block in NIGHTLY_BLOCKS)])
def test_the_plan_equals_brute_force_on_64_random_clusters(block: int) -> None:
    n_over_both = n_shared = 0
    for seed in range(8 * block, 8 * block + 8):
        toys, between_s = two_toys(seed), random.Random(seed).choice([0.0, 0.1, 0.5])
        want = best_of_all(toys, between_s)
        result = search_mixed(mixed_space(toys, between_s), options=EXACT)
        assert result.status == ("infeasible" if want is None else "optimal"), seed
        if want is not None:
            assert result.best is not None
            assert best_s(result) == pytest.approx(want, rel=1e-6), seed
            n_over_both += len(result.best.plan.groups) == 2
            n_shared += bool(result.best.plan.mesh.shares)
    assert n_over_both >= n_shared > 0


@pytest.mark.parametrize("seed", range(4))
def test_the_queue_gives_every_pipeline_that_may_fit_in_the_order_of_bounds(seed: int) -> None:
    space = mixed_space(two_toys(seed))
    found = [family for shape in shapes(space, EXACT) for family in families_of(space, shape)]
    want = [bound_s for family in found for bound_s in family.bounds_s.tolist() if bound_s < INFINITY]
    queue, meshes, bounds_s = MeshQueue(space, tuple(shapes(space, EXACT))), set(), []
    while (popped := queue.pop(known_s=INFINITY)) is not None:
        bounds_s.append(popped[0])
        meshes.add(popped[1:])
        assert queue.bound_s >= popped[0]
    assert bounds_s == sorted(want)
    assert len(meshes) == len(bounds_s)
    assert queue.bound_s == INFINITY
    half_s = sorted(want)[len(want) // 2]
    queue, n_below = MeshQueue(space, tuple(shapes(space, EXACT))), 0
    while queue.pop(known_s=half_s) is not None:
        n_below += 1
    assert n_below == sum(bound_s < half_s for bound_s in want)
    assert queue.bound_s >= half_s


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(5, 12))])
def test_no_bound_of_a_pipeline_exceeds_its_fastest_plan(seed: int) -> None:
    toys = two_toys(seed)
    space = mixed_space(toys)
    for family in (family for shape in shapes(space, EXACT) for family in families_of(space, shape)):
        for row, bound_s in enumerate(family.bounds_s):
            mesh, groups = family.member(row)
            table = space.price(mesh, groups)
            estimates = [simulate(table, stages) for stages in all_stages(toys[0], mesh)]
            fastest_s = min((item.step_s for item in estimates if item.fits), default=float("inf"))
            assert bound_s <= fastest_s * (1 + 1e-9)
            partition = best_partition(table, recompute=None)
            assert partition.bound_s <= fastest_s * (1 + 1e-9)


FIXES = {
    "dp": ("2", lambda plan: plan.mesh.dp == 2),
    "tp": ("2", lambda plan: plan.mesh.tp == 2),
    "pp": ("3", lambda plan: plan.mesh.pp == 3),
    "zero": ("2", lambda plan: plan.mesh.zero_stage == 2),
    "micro_batch": ("2", lambda plan: plan.mesh.micro_batch_size == 2),
    "schedule": ("gpipe", lambda plan: plan.mesh.pp == 1 or plan.mesh.schedule == "gpipe"),
    "chunks": ("1", lambda plan: plan.mesh.n_chunks == 1),
    "recompute": ("none", lambda plan: not any(stage.recomputed for stage in plan.stages)),
}


@pytest.mark.parametrize("name", FIXES)
def test_every_plan_has_what_was_fixed(name: str) -> None:
    value, has = FIXES[name]
    options, n_plans = replace(EXACT, fix=((name, value),), top=20), 0
    for seed in range(4):
        toys = tuple(replace(toy, memory_limit_bytes=2**50) for toy in two_toys(seed))
        try:
            result = search_mixed(mixed_space(toys), options=options)
        except InfeasibleError:  # too few cuts for three stages
            continue
        plans = [item.plan for item in (result.best, *result.alternatives) if item is not None]
        assert all(map(has, plans))
        n_plans += sum(len(plan.groups) == 2 for plan in plans)
    assert n_plans > 0


def test_schedule_plain_is_1f1b_and_gpipe_where_1f1b_lacks_micro_batches() -> None:
    def pipelines(fix: tuple[tuple[str, str], ...]) -> set[tuple[Mesh, tuple[int, ...], tuple[int, ...]]]:
        found = shapes(mixed_space(two_toys(0)), replace(EXACT, fix=fix))
        return {(own.mesh, own.groups, tuple(row)) for own in found for row in own.n_ranks.tolist()}

    def is_meant(mesh: Mesh, n_ranks: tuple[int, ...]) -> bool:
        return mesh.schedule == ("gpipe" if mesh.n_micro_batches < sum(n_ranks) else "1f1b")

    plain = pipelines((("schedule", "plain"),))
    assert plain == {item for item in pipelines(()) if is_meant(item[0], item[2])}
    assert {mesh.schedule for mesh, _, _ in plain} == {"1f1b", "gpipe"}


# ------------------------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_more_hosts_in_any_group_are_never_slower(seed: int, group: int) -> None:
    toys = two_toys(seed)
    larger = tuple(with_space(toy, n_devices=4) if index == group else toy for index, toy in enumerate(toys))
    few, more = (search_mixed(mixed_space(own), options=EXACT) for own in (toys, larger))
    assert few.best is None or more.best is not None
    assert few.best is None or more.best.estimate.step_s <= few.best.estimate.step_s * (1 + 1e-6)


@cache
def best_of_both_s(seed: int) -> float | None:
    return best_of_all(two_toys(seed), 0.1)


@pytest.mark.parametrize("limit_s", [0.0, 10.0, 100.0, 1000.0])
def test_what_is_proved_when_time_is_over_is_true(limit_s: float) -> None:
    for seed in range(6):
        toys, ticks = two_toys(seed), count()  # a second passes whenever somebody looks at the clock
        options = replace(EXACT, time_limit_s=limit_s)
        stopped = search_mixed(mixed_space(toys), options=options, clock=lambda ticks=ticks: float(next(ticks)))
        want_s = best_of_both_s(seed)
        if stopped.bound_s is not None and want_s is not None:
            assert stopped.bound_s <= want_s * (1 + 1e-6)
        assert stopped.status in ("optimal", "infeasible") or stopped.stopped_by == "time limit"


@pytest.mark.nightly
def test_more_devices_of_either_kind_never_make_a_real_plan_slower(tmp_path: Path) -> None:
    text, graph = (EXAMPLES / "a100_v100.toml").read_text(), api.trace_model(EXAMPLES / "llama.py")
    options = Options(global_batch=4096, precision="fp16")

    def found(n_a100_hosts: int, n_v100_hosts: int) -> SearchResult:
        file = tmp_path / f"{n_a100_hosts}_{n_v100_hosts}.toml"
        hosts = text.replace("n_hosts = 8", f"n_hosts = {n_a100_hosts}")
        file.write_text(hosts.replace("n_hosts = 4", f"n_hosts = {n_v100_hosts}"))
        space = real_mixed_space(graph, load_cluster(file), options, global_batch=4096)
        return search_mixed(space, options=options)

    a100 = priced_space(graph, load_hardware_profile("dgx_a100_x8", n_hosts=64), options, global_batch=4096)
    alone = search(a100.space, price=a100.price, options=options, make_plan=a100.make_plan)
    both, fewer = found(64, 64), (found(32, 64), found(64, 32))
    assert both.best is not None and both.gap is not None and both.gap < 0.01
    for result in (alone, *fewer):
        assert result.best is not None
        assert both.best.estimate.step_s <= result.best.estimate.step_s * (1.0 + GOOD_ENOUGH)


@pytest.mark.parametrize("seed", range(8))
def test_the_order_of_the_groups_in_the_file_changes_nothing(seed: int) -> None:
    toys = two_toys(seed)
    one, other = (search_mixed(mixed_space(own), options=EXACT) for own in (toys, toys[::-1]))
    assert best_s(one) == pytest.approx(best_s(other), rel=1e-9)


def test_a_group_twice_as_fast_gets_twice_the_layers() -> None:
    toys = layered(12, layer_s=1.0), layered(12, layer_s=2.0)
    result = search_mixed(mixed_space(toys, 0.0), options=replace(EXACT, fix=(("pp", "2"), ("micro_batch", "1"))))
    assert result.best is not None
    plan = result.best.plan
    layers = {own.group: stage.stop - stage.start for own, stage in zip(plan.groups, plan.stages, strict=True)}
    assert layers == {0: 8, 1: 4}  # 8 x 1 s = 4 x 2 s


@pytest.mark.parametrize("seed", range(8))
def test_two_equal_groups_and_a_network_as_fast_as_theirs_are_one_group(seed: int) -> None:
    toy = random_toy(seed, n_segments=5, n_devices=2)
    mesh = Mesh(pp=4, n_micro_batches=4) if sum(toy.space.cuts) >= 3 else Mesh(pp=2, n_micro_batches=4)
    if sum(toy.space.cuts) == 0:
        return
    groups = (GroupRanks(0, mesh.pp // 2), GroupRanks(1, mesh.pp // 2))
    one = toy.price(mesh)
    both = joined([one, one], [own.n_ranks for own in groups], [one.cut_s], per_step_s=one.per_step_s)
    for stages in all_stages(toy, mesh):
        assert simulate(both, stages) == simulate(one, stages)


def test_the_group_whose_links_drift_most_counts() -> None:
    one = layered(4, layer_s=1.0).price(Mesh(pp=2, n_micro_batches=4))
    tables = [replace(one, drift=drift) for drift in (0.0, 0.05)]
    assert joined(tables, [1, 1], [one.cut_s], per_step_s=0.0).drift == 0.05


def test_each_rank_has_the_memory_of_its_own_group() -> None:
    toy = layered(4, layer_s=1.0)
    mesh = Mesh(pp=2, n_micro_batches=4)
    large, small = (replace(toy, memory_limit_bytes=limit).price(mesh) for limit in (2**40, 2**20))
    stages = (StagePlan(0, 2), StagePlan(2, 4))
    estimate = simulate(joined([large, small], [1, 1], [large.cut_s], per_step_s=0.0), stages)
    assert (estimate.limit_bytes(0), estimate.limit_bytes(1)) == (2**40, 2**20)
    assert estimate.tightest_rank == 1
    assert not estimate.fits
    assert simulate(joined([large, large], [1, 1], [large.cut_s], per_step_s=0.0), stages).rank_limits_bytes == ()


def test_all_devices_of_a_rank_share_the_network_between_groups() -> None:
    link = GroupLink("ethernet", latency_s=0.001, bytes_per_s_per_group=1e9, bus_efficiency=0.5)
    # 0.001 s + 4 devices x 1 MB / 0.5 GB/s
    assert between_s(1e6, link, n_devices=4) == pytest.approx(0.001 + 0.008)


# ------------------------------------------------------------------------------------------------------- real models

CLUSTER = """
description = "two A100 and two V100"

[[group]]
profile = "dgx_a100_x8/2"
n_hosts = 1

[[group]]
profile = "v100_x8/2"
n_hosts = 1

[between]
kind = "ethernet"
latency_per_step = { value = "50 us", source = "by hand" }
rate_per_group_one_direction = { value = "100 Gbit/s", source = "by hand" }
bus_efficiency = { value = "80 %", source = "by hand" }
"""
SMALL = {"size": "char", "n_layers": 2, "width": 48, "context": 32}
GPT = Path(__file__).parent.parent / "examples" / "gpt.py"


@pytest.fixture
def cluster_file(tmp_path: Path) -> str:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return str(path)


@pytest.mark.parametrize("compiles", ["off", pytest.param("on", marks=pytest.mark.nightly)])
def test_a_plan_over_both_groups_is_written_read_and_trains_like_one_process(
    compiles: str, cluster_file: str, tmp_path: Path
) -> None:
    options = Options(global_batch=16, precision="fp32", fix=(("dp", "2"), ("pp", "2"), ("compile", compiles)))
    problem = api.make_problem(GPT, hw=cluster_file, overrides=SMALL, options=options)
    answer = api.solve(problem)
    assert [(own.hardware, own.n_ranks) for own in answer.best.plan.groups] in (
        [("dgx_a100_x8/2", 1), ("v100_x8/2", 1)],
        [("v100_x8/2", 1), ("dgx_a100_x8/2", 1)],
    )
    assert answer_from_json(answer_to_json(answer)) == answer
    assert api.score(problem, answer.best.plan).best.estimate.step_s == pytest.approx(answer.best.estimate.step_s)
    api.emit(problem, answer, tmp_path / "out")
    script = (tmp_path / "out" / "launch" / "torchrun.sh").read_text()
    assert '--nnodes 2 --node-rank "$NODE_RANK"' in script
    assert "#   1: " in script
    report = tmp_path / "report.json"
    program = ["--device", "cpu", "--dtype", "float64", "--check", "--steps", "2", "--out-json", str(report)]
    run_program(tmp_path / "out", 4, *program, timeout_s=300.0)
    steps = json.loads(report.read_text())["steps"]
    assert all(max(step["differences"].values()) < 1e-9 for step in steps)


@pytest.mark.nightly
def test_what_compiling_gains_counts_on_every_group(cluster_file: str) -> None:
    options = Options(global_batch=32, precision="fp16")
    problem = api.make_problem(GPT, hw=cluster_file, overrides={"size": "1.5b"}, options=options)
    eager = api.solve(replace(problem, options=replace(options, fix=(("compile", "off"),)))).best
    answer = api.solve(problem)
    assert answer.best.plan.mesh.compile
    assert not eager.plan.mesh.compile
    assert answer.best.estimate.step_s < 0.98 * eager.estimate.step_s
    assert {len(eager.plan.groups), len(answer.best.plan.groups)} == {2}
    assert answer.result.bound_s <= answer.best.estimate.step_s
    assert api.score(problem, answer.best.plan).best.estimate.step_s == pytest.approx(answer.best.estimate.step_s)


def test_reports_say_where_the_ranks_are_and_what_memory_each_has(cluster_file: str) -> None:
    options = Options(global_batch=16, precision="fp32", fix=(("dp", "2"), ("pp", "2")))
    problem = api.make_problem(GPT, hw=cluster_file, overrides=SMALL, options=options)
    answer = api.solve(problem)
    for text in (plan_report(answer), explain_report(answer), plan_page(answer)):
        assert "1 on dgx_a100_x8/2" in text
        assert "1 on v100_x8/2" in text
        assert "31.7 GiB" in text
        assert "80.0 GiB" in text
    wrong = replace(answer.best.plan, groups=(GroupRanks(0, 2, "dgx_a100_x8/2"),))
    with pytest.raises(PlanMismatchError, match="4 devices of dgx_a100_x8/2 in group 0"):
        api.score(problem, wrong)
    with pytest.raises(PlanMismatchError, match="made for one kind of host"):
        api.score(problem, replace(answer.best.plan, groups=()))


def test_two_equal_groups_of_a_real_model_cost_what_one_group_does(tmp_path: Path) -> None:
    fast = CLUSTER.replace("dgx_a100_x8/2", "v100_x8/2").replace('"50 us"', '"1 us"').replace("100 Gbit", "4000 Gbit")
    (tmp_path / "equal.toml").write_text(fast)
    graph = api.trace_model(GPT, overrides={"size": "char"})
    cluster, whole = load_cluster(tmp_path / "equal.toml"), load_hardware_profile("v100_x8/2", n_hosts=2)
    parts = {"precision": "fp32", "shardings": {}, "rules": load_rules()}
    mesh = Mesh(pp=2, dp=2, micro_batch_size=2, n_micro_batches=4)
    groups = (GroupRanks(0, 1), GroupRanks(1, 1))
    both = make_mixed_pricer(graph, cluster=cluster, **parts)(mesh, groups)
    one = make_pricer(graph, hardware=whole, **parts)(mesh)
    half = len(graph.segments) // 2
    stages = (StagePlan(0, half), StagePlan(half, len(graph.segments)))
    # the network between the groups is faster than that between the hosts of one group
    assert 0.9 * simulate(one, stages).step_s < simulate(both, stages).step_s <= simulate(one, stages).step_s
    assert both.at_rank(0).costs == one.costs
    assert both.at_rank(1).costs == one.costs


REFUSED = {
    "hosts": ({"hosts": 2}, {}, ["--hosts", "n_hosts in the file"]),
    "cost": ({}, {"objective": "cost"}, ["--objective", "--hw dgx_a100_x8/2"]),
    "profile": ({}, {"profile": "measured.json"}, ["--profile", "several kinds"]),
    "tp": ({}, {"fix": (("tp", "4"),)}, ["--fix tp=4", "use tp=1 or tp=2"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_mixed_cluster_cannot_have_is_a_usage_error_that_says_what_to_do(case: str, cluster_file: str) -> None:
    arguments, options, expected = REFUSED[case]
    with pytest.raises(UsageError) as error:
        api.make_problem(GPT, hw=cluster_file, options=Options(**options), **arguments)
    for part in [*expected, "fix:"]:
        assert part in str(error.value)


def test_whatif_compares_a_mixed_cluster_with_its_groups(cluster_file: str) -> None:
    rows = api.whatif(
        GPT,
        hw=(cluster_file, "v100_x8/2"),
        hosts=(1, 2),
        n_samples=1e6,
        prices_usd_per_device_hour={cluster_file: 2.0},
        overrides={"size": "char"},
        precision="fp32",
    )
    assert [(row.n_hosts, row.n_devices) for row in rows] == [(2, 4), (1, 2), (2, 4)]
    mixed = rows[0]
    assert mixed.step_s < rows[1].step_s  # it has everything that the V100 alone have
    assert mixed.cost_usd == pytest.approx(2.0 * 4 * mixed.train_s / 3600)
