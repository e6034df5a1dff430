"""Mixed clusters: data parallelism over groups of different devices, each with its own share of the batch."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mixed_toys import EXACT, best_of_shares_by_trying, layered, mixed_space, toy_shares, two_toys
from test_mixed import CLUSTER, GPT, SMALL

from autoplan import api
from autoplan.answers.answer import Answer, answer_from_json, answer_to_dict, answer_to_json
from autoplan.cost.between import Exchange
from autoplan.cost.mixed_price import make_mixed_pricer
from autoplan.errors import InputError
from autoplan.hardware.cluster import GroupLink, load_cluster
from autoplan.html_report import plan_page
from autoplan.options import Options
from autoplan.output.folder import rejected_csv, report_files
from autoplan.output.verify import _per_pipeline_rank
from autoplan.parallel_plan import BatchShare, GroupRanks, Mesh, StagePlan
from autoplan.report.plan import plan_report
from autoplan.rules import load_rules
from autoplan.search.bounds import step_bound_s
from autoplan.search.mixed.search import search_mixed
from autoplan.search.mixed.share_families import mesh_of, share_families
from autoplan.search.mixed.shares import ShareQueue, micro_batch_counts
from autoplan.simulator.simulate import memory_over_time, simulate
from autoplan.solver.linear_model import INFINITY
from autoplan.space.mixed_space import mixed_space as real_mixed_space

# ------------------------------------------------------------------------------------------------------------ search


@pytest.mark.parametrize("seed", range(8))
def test_the_queue_has_every_mesh_and_no_bound_exceeds_its_fastest_plan(seed: int) -> None:
    toys = tuple(replace(toy, memory_limit_bytes=2**50) for toy in two_toys(seed))
    space = mixed_space(toys)
    queue, found = ShareQueue(space, EXACT, known_s=INFINITY), []
    while (popped := queue.pop(known_s=INFINITY)) is not None:
        bound_s, mesh, groups = popped
        found.append((bound_s, mesh))
        fastest_s = best_of_shares_by_trying(toys, space.price(mesh, groups))
        assert fastest_s is not None
        assert bound_s <= fastest_s * (1 + 1e-9)
    assert [bound_s for bound_s, _ in found] == sorted(bound_s for bound_s, _ in found)
    assert sorted(mesh for _, mesh in found) == sorted(mesh for mesh, _ in toy_shares(toys))
    assert queue.bound_s == INFINITY


@pytest.mark.parametrize("seed", range(8))
def test_no_mesh_is_ruled_out_that_may_be_faster_than_what_is_known(seed: int) -> None:
    toys = tuple(replace(toy, memory_limit_bytes=2**50) for toy in two_toys(seed))
    space = mixed_space(toys)
    fastest = [(best_of_shares_by_trying(toys, space.price(*own)), own[0]) for own in toy_shares(toys)]
    times_s = sorted(step_s for step_s, _ in fastest if step_s is not None)
    for known_s in (times_s[len(times_s) // 8], times_s[len(times_s) // 2]):
        queue, found = ShareQueue(space, EXACT, known_s=known_s), set()
        while (popped := queue.pop(known_s=known_s)) is not None:
            found.add(popped[1])
        assert {mesh for step_s, mesh in fastest if step_s is not None and step_s < known_s * (1 - 1e-9)} <= found
        assert len(found) < len(fastest)


def test_no_bound_of_a_real_mesh_exceeds_that_of_its_table(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    cluster, graph = load_cluster(tmp_path / "cluster.toml"), api.trace_model(GPT, overrides=SMALL)
    space = real_mixed_space(graph, cluster, Options(precision="fp32"), global_batch=24)
    rng, degrees = random.Random(0), set()
    for family in share_families(space, Options(), known_s=INFINITY):
        degrees.add(family.mesh.tp)
        for row in rng.sample(range(len(family.bounds_s)), k=min(5, len(family.bounds_s))):
            dps, sizes = family.dp[row].tolist(), family.sizes[row].tolist()
            steps = [dp * size for dp, size in zip(dps, sizes, strict=True)]
            for counts in list(micro_batch_counts(24, steps, [24, 24]))[:2]:
                mesh = mesh_of(family.mesh, tuple(map(BatchShare, dps, sizes, counts)))
                tables = space.price(mesh, (GroupRanks(0, 1), GroupRanks(1, 1))).rank_tables
                least_s = (family.starts_s[row] + family.slopes_s[row] * np.array(counts)[:, None]).max(axis=1)
                assert all(least_s <= np.array(list(map(step_bound_s, tables))) * (1 + 1e-9))
                assert family.bounds_s[row] <= max(map(step_bound_s, tables)) * (1 + 1e-9)
    assert degrees == {1, 2}


def test_every_number_of_micro_batches_that_makes_up_the_batch_is_found_once() -> None:
    # 4 a + 6 b = 32: (2, 4) and (5, 2); with at most 4 of the first only one of them
    assert list(micro_batch_counts(32, [4, 6], [32, 32])) == [(2, 4), (5, 2)]
    assert list(micro_batch_counts(32, [4, 6], [4, 32])) == [(2, 4)]
    # a + b + c = 4
    assert list(micro_batch_counts(4, [1, 1, 1], [4, 4, 4])) == [(1, 1, 2), (1, 2, 1), (2, 1, 1)]
    assert list(micro_batch_counts(5, [2, 2], [9, 9])) == []


def test_groups_share_the_batch_where_its_sum_is_cheap_and_the_layers_where_it_is_not() -> None:
    toys = layered(12, layer_s=1.0), layered(12, layer_s=2.0)
    cheap, dear = (
        search_mixed(mixed_space(toys, between_s), options=replace(EXACT, fix=(("micro_batch", size),))).best
        for between_s, size in ((0.0, "1"), (20.0, "4"))
    )
    assert cheap is not None and dear is not None
    # cheap, 16 samples: 11 on the fast device take as long as 5.5 on the slow one
    # dear: a pipeline sends 4 micro-batches there and back, the shares add up 12 layers; with 16 micro-batches of one
    # sample it would send more than they add up
    assert cheap.plan.mesh.shares == (BatchShare(1, 1, 11), BatchShare(1, 1, 5))
    assert dear.plan.mesh.shares == ()


@pytest.mark.parametrize(
    "fix",
    [
        ("pp", "2"),
        ("stages_per_rank", "2"),
        ("batch_norm", "synchronized"),
        ("grad_compression", "bf16"),
        ("zero", "1"),
        ("micro_batch", "3"),
    ],
)
def test_nothing_is_shared_where_the_options_do_not_allow_it(fix: tuple[str, str]) -> None:
    space = mixed_space((layered(4, layer_s=1.0), layered(4, layer_s=2.0)))
    assert ShareQueue(space, EXACT, known_s=INFINITY).bound_s < INFINITY
    assert ShareQueue(space, replace(EXACT, fix=(fix,)), known_s=INFINITY).pop(known_s=INFINITY) is None


def test_nothing_is_shared_where_the_model_synchronizes_its_batch_norm() -> None:
    space = mixed_space((layered(4, layer_s=1.0), layered(4, layer_s=2.0)))
    synchronizing, local = replace(space, batch_norm="synchronized"), replace(EXACT, fix=(("batch_norm", "local"),))
    assert ShareQueue(synchronizing, EXACT, known_s=INFINITY).pop(known_s=INFINITY) is None
    assert ShareQueue(synchronizing, local, known_s=INFINITY).bound_s < INFINITY


# ------------------------------------------------------------------------------------------------------------- price


def test_an_exchange_goes_around_the_groups_and_back_over_their_uplinks() -> None:
    link = GroupLink("ethernet", latency_s=0.001, bytes_per_s_per_group=1e9, bus_efficiency=0.5)
    # 2 x 2 hops, each 0.001 s + 4 columns x 6 MB / 3 groups / 0.5 GB/s
    assert Exchange(link, n_groups=3, n_columns=4).seconds(6e6) == pytest.approx(4 * (0.001 + 0.016))


def test_a_share_costs_what_its_group_alone_does_and_the_exchange(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    cluster, graph = load_cluster(tmp_path / "cluster.toml"), api.trace_model(GPT, overrides=SMALL)
    price = make_mixed_pricer(graph, cluster=cluster, precision="fp32", shardings={}, rules=load_rules())
    mesh = mesh_of(Mesh(zero_stage=1, zero_shard_degree=2), (BatchShare(2, 4, 3), BatchShare(2, 2, 2)))
    table = price(mesh, (GroupRanks(0, 1), GroupRanks(1, 1)))
    assert table.mesh.global_batch_size == 32
    for index, own in enumerate(table.rank_tables):
        alone = price(mesh.of_share(index), (GroupRanks(index, 1),))
        assert own.batch_bytes == alone.batch_bytes
        for (cost, *_), (without, *_) in zip(own.costs, alone.costs, strict=True):
            # each of 2 shard ranks sends half of its shard there and back, at 80 % of 12.5 GB/s
            sent_s = 2 * (50e-6 + 2 * cost.reduced_bytes / 2 / 10e9) if cost.reduced_bytes else 0.0
            assert cost.reduce_s == pytest.approx(without.reduce_s + sent_s)
            assert replace(cost, reduce_s=without.reduce_s) == without
    stages = (StagePlan(0, len(table.kinds)), StagePlan(0, len(table.kinds), recomputed=(1, 2)))
    parts = [simulate(own, (stage,)) for own, stage in zip(table.rank_tables, stages, strict=True)]
    estimate = simulate(table, stages)
    assert estimate.step_s == max(part.step_s for part in parts)
    assert parts[estimate.slowest_rank].breakdown == estimate.breakdown
    assert estimate.needed_bytes == tuple(part.needed_bytes[0] for part in parts)
    assert (estimate.limit_bytes(0), estimate.limit_bytes(1)) == tuple(part.memory_limit_bytes for part in parts)
    assert len(memory_over_time(table, stages)) == 2


def test_one_rank_of_a_group_pays_for_being_one_of_several(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    cluster, graph = load_cluster(tmp_path / "cluster.toml"), api.trace_model(GPT, overrides=SMALL)
    price = make_mixed_pricer(graph, cluster=cluster, precision="fp32", shardings={}, rules=load_rules())
    table = price(mesh_of(Mesh(), (BatchShare(1, 1, 1), BatchShare(1, 1, 1))), (GroupRanks(0, 1), GroupRanks(1, 1)))
    alone = price(Mesh(), (GroupRanks(0, 1),))
    assert table.rank_tables[0].reserved_fixed_bytes > alone.reserved_fixed_bytes  # a communicator
    assert table.costs[1][0].reducing_bytes > alone.costs[1][0].reducing_bytes == 0


# ------------------------------------------------------------------------------------------------------- real models


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[api.Problem, Answer]]:
    """Plans with four data-parallel ranks, and with two of two tensor-parallel ranks each."""
    path = tmp_path_factory.mktemp("cluster") / "cluster.toml"
    path.write_text(CLUSTER)
    found = {}
    for name, fix in {"dp 4": (("dp", "4"),), "dp 2, tp 2": (("dp", "2"), ("tp", "2"), ("pp", "1"))}.items():
        options = Options(global_batch=20, precision="fp32", fix=fix)
        problem = api.make_problem(GPT, hw=str(path), overrides=SMALL, options=options)
        found[name] = problem, api.solve(problem)
    return found


def test_a_shared_plan_is_written_read_scored_and_reported(answers: dict[str, tuple[api.Problem, Answer]]) -> None:
    problem, answer = answers["dp 4"]
    plan = answer.best.plan
    assert [share.dp for share in plan.mesh.shares] == [2, 2]
    assert plan.mesh.global_batch_size == 20
    assert answer_from_json(answer_to_json(answer)) == answer
    for item in (answer.best, *answer.result.alternatives):
        assert api.score(problem, item.plan).best.estimate.step_s == pytest.approx(item.estimate.step_s)
    one, other = plan.mesh.shares
    counts = f"{one.micro_batch_size}x{one.n_micro_batches}+{other.micro_batch_size}x{other.n_micro_batches}"
    assert plan_report(answer).count("2+2") >= 2
    assert counts in plan_report(answer)
    for text in (" ".join(plan_report(answer).split()), plan_page(answer)):
        assert f"2 on dgx_a100_x8/2 ({one.n_samples} samples)" in text
        assert f"2 on v100_x8/2 ({other.n_samples} samples)" in text
        assert "31.7 GiB" in text
        assert "80.0 GiB" in text
    assert "group 1 (2 data-parallel ranks on v100_x8/2)" in plan_page(answer)
    assert "pipeline rank" not in plan_page(answer) and "\ngroup  state  allocated" in plan_report(answer)
    trace = report_files(answer, memory=api.memory_curves(problem, plan))["trace.json.gz"]
    assert b"group 0 (2 data-parallel ranks on dgx_a100_x8/2)" in gzip.decompress(trace)
    shared = [item for item in answer.result.rejected if item.mesh.shares]
    assert f",{counts}," not in rejected_csv(shared)
    assert rejected_csv(shared).count("2+2: ") == len(shared)


def test_plans_of_before_there_were_shares_are_read(answers: dict[str, tuple[api.Problem, Answer]]) -> None:
    _, answer = answers["dp 4"]
    plain = replace(answer.best, plan=replace(answer.best.plan, mesh=Mesh(dp=2)))
    answer = replace(answer, result=replace(answer.result, best=plain, alternatives=(), rejected=(), baselines=()))
    content = answer_to_dict(answer)
    assert content["best"]["plan"]["mesh"].pop("shares") == []
    assert answer_from_json(json.dumps(content)) == answer


WRONG = {
    "sum": ({"dp": 5}, "two or more, together dp, which is 5"),
    "degree": ({"zero_stage": 1, "zero_shard_degree": 4}, "a multiple of zero_shard_degree, which is 4"),
    "count": ({"shares": (BatchShare(2, 1, 0), BatchShare(2, 1, 1))}, r"shares\[0\].n_micro_batches"),
    "groups": (
        {"shares": tuple(BatchShare(dp, 1, 2) for dp in (1, 1, 2)), "micro_batch_size": 1, "n_micro_batches": 2},
        "one for each of the 2 groups",
    ),
    "first": ({"n_micro_batches": 77}, r"the micro-batches of shares\[0\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_shares_that_do_not_fit_together_are_refused(case: str, answers: dict[str, tuple[api.Problem, Answer]]) -> None:
    (problem, answer), (changes, message) = answers["dp 4"], WRONG[case]
    mesh = replace(answer.best.plan.mesh, zero_stage=0, zero_shard_degree=1)
    with pytest.raises(InputError, match=message):
        api.score(problem, replace(answer.best.plan, mesh=replace(mesh, **changes)))


def run_program(folder: Path, *arguments: str) -> list[dict[str, float]]:
    """The steps of a run on four processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "train.py"]
    program = ["--device", "cpu", "--dtype", "float64", "--out-json", "steps.json", *arguments]
    subprocess.run([*launcher, *program], cwd=folder, check=True, timeout=300)
    return json.loads((folder / "steps.json").read_text())["steps"]


def with_shares(problem: api.Problem, answer: Answer) -> Answer:
    """The plan with 2 x 3 samples for each rank of the first group, and 1 x 4 and recomputation for the other's."""
    dps = [share.dp for share in answer.best.plan.mesh.shares]
    mesh = mesh_of(answer.best.plan.mesh, (BatchShare(dps[0], 2, 3), BatchShare(dps[1], 1, 4)))
    blocks = tuple(i for i, segment in enumerate(problem.graph.segments) if segment.is_block)
    n_segments = len(problem.graph.segments)
    stages = (StagePlan(0, n_segments), StagePlan(0, n_segments, recomputed=blocks))
    return api.score(problem, replace(answer.best.plan, mesh=mesh, stages=stages, recompute="selective"))


def test_the_program_says_what_each_rank_takes_and_what_memory_it_needs(
    answers: dict[str, tuple[api.Problem, Answer]],
) -> None:
    problem, answer = answers["dp 4"]
    answer = with_shares(problem, answer)
    text = api.program_files(problem, answer)["train.py"]
    assert "shares=((2, 2, 3), (2, 1, 4))," in text
    assert f"device_bytes={answer.best.estimate.allocator_bytes}" in text
    assert len(answer.best.estimate.allocator_bytes) == 2
    assert 'share_recompute=((), ("blocks.0", "blocks.1")),' in text
    assert "selective recompute (0 + 2 of" in plan_report(answer)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["dp 4", "dp 2, tp 2"])
@pytest.mark.parametrize("compiles", [False, True])
def test_the_program_of_a_shared_plan_trains_like_one_process(
    compiles: bool, name: str, answers: dict[str, tuple[api.Problem, Answer]], tmp_path: Path
) -> None:
    problem, answer = answers[name]
    problem = replace(problem, options=replace(problem.options, global_batch=None))
    plan = with_shares(problem, answer).best.plan
    answer = api.score(problem, replace(plan, mesh=replace(plan.mesh, compile=compiles)))
    api.emit(problem, answer, tmp_path / "out")
    script = (tmp_path / "out" / "launch" / "torchrun.sh").read_text()
    assert '--nnodes 2 --node-rank "$NODE_RANK"' in script
    steps = run_program(tmp_path / "out", "--check", "--steps", "2")
    assert all(max(step["differences"].values()) < 1e-9 for step in steps)


@pytest.mark.nightly
def test_a_run_goes_on_from_its_checkpoint_and_under_a_plan_with_equal_shares(
    answers: dict[str, tuple[api.Problem, Answer]], tmp_path: Path
) -> None:
    problem, answer = answers["dp 4"]
    shared = with_shares(problem, answer)
    mesh = mesh_of(shared.best.plan.mesh, (BatchShare(2, 1, 5), BatchShare(2, 5, 1)))
    api.emit(problem, shared, tmp_path / "shared")
    api.emit(problem, api.score(problem, replace(shared.best.plan, mesh=mesh)), tmp_path / "equal")
    saved = ["--checkpoint-dir", str(tmp_path / "saved")]
    whole = [step["loss"] for step in run_program(tmp_path / "shared", "--steps", "4")]
    parts = [step["loss"] for step in run_program(tmp_path / "shared", "--steps", "2", *saved)]
    parts += [step["loss"] for step in run_program(tmp_path / "equal", "--steps", "3", *saved)]
    parts += [step["loss"] for step in run_program(tmp_path / "shared", "--steps", "4", *saved)]
    assert parts == pytest.approx(whole, rel=1e-9)


def test_measured_memory_is_that_of_the_ranks_of_each_share() -> None:
    mesh = mesh_of(Mesh(tp=2), (BatchShare(1, 1, 1), BatchShare(2, 1, 1)))
    assert _per_pipeline_rank([5, 7, 1, 2, 3, 4], mesh) == [7, 4]
    assert _per_pipeline_rank([5, 7, 1, 2], Mesh(pp=2, dp=2)) == [7, 2]
