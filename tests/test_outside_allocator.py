"""Communicators of a plan, and what they take beside the context."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import predictions

from autoplan import api
from autoplan.answers.answer import plan_from_dict
from autoplan.cost import outside_allocator
from autoplan.cost.outside_allocator import communicators, outside_allocator_bytes
from autoplan.parallel_plan import Mesh, Plan
from autoplan.units import MiB

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
TIED = ("gpt2_xl", "bert_large", "t5_large")
NOT_OFFERED_BYTES = 616 * MiB  # of an H200, by its driver to torch


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    pp, replicas, shards, tp = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(4))
    zero_stage = draw(st.sampled_from([1, 2, 3])) if shards > 1 else 0
    return Mesh(pp=pp, dp=replicas * shards, tp=tp, zero_stage=zero_stage, zero_shard_degree=shards)


def ranks_of_groups(mesh: Mesh) -> dict[str, frozenset[int]]:
    """The processes that rank 0 communicates with, by axis, from rank = ((pp * replicas + r) * shards + s) * tp + t."""
    degrees = {"tp": mesh.tp, "shard": mesh.zero_shard_degree, "replica": mesh.dp // mesh.zero_shard_degree}
    found, stride = {}, 1
    for axis, degree in degrees.items():
        found[axis] = frozenset(range(0, degree * stride, stride))
        stride *= degree
    return found


@given(meshes())
def test_every_different_set_of_several_processes_has_one_communicator(mesh: Mesh) -> None:
    different = {frozenset(range(mesh.n_devices)), *ranks_of_groups(mesh).values()}
    different.discard(frozenset({0}))
    found = communicators(mesh, has_tied_weights=False)
    assert len(found) == len(set(found)) == len(different)


def has_all_to_alls(plan: Plan, case: predictions.Case) -> bool:
    """Whether the layouts of a plan that ran have some, by what its price adds for them."""
    asked = predictions.as_it_ran(predictions.problem(case, "h200_x4"), case, plan)
    eager = replace(predictions.as_traced(plan, asked.graph), mesh=replace(plan.mesh, compile=False))
    n_bytes = api.cost_table(asked, eager).reserved_fixed_bytes
    return n_bytes > outside_allocator_bytes(plan.mesh, has_tied_weights=case.model in TIED)


def few_blocks_of_all_neighbours(mesh: Mesh) -> int:
    """What these programs took, which had one group for all."""
    return 184 * MiB if mesh.pp > 1 else 0


def check_runs(*, runs: str, models: tuple[str, ...]) -> int:
    """Compare what was measured outside of the allocator with the estimate; returns how many runs had all-to-alls."""
    cases = {(case.links, case.name): case for case in predictions.cases()}
    n_with = 0
    for row in predictions.read(RESULTS / f"predictions_{runs}.jsonl"):
        case, plan = cases[row["links"], row["case"]], plan_from_dict(row["plan"], where=runs)
        if row["links"] != "nvlink" or row["exit_code"] or (plan.mesh.tp > 1 and case.model not in models):
            continue
        has_some = plan.mesh.tp > 1 and has_all_to_alls(plan, case)
        n_with += has_some
        ways = {"has_tied_weights": case.model in TIED, "has_all_to_alls": has_some}
        with patch.object(outside_allocator, "_neighbours_bytes", few_blocks_of_all_neighbours):
            n_bytes = outside_allocator_bytes(plan.mesh, **ways) - NOT_OFFERED_BYTES
        found = max(row["outside_allocator_bytes_per_rank"])
        assert abs(found - n_bytes) < 64 * MiB, (row["case"], found / MiB, n_bytes / MiB)
    return n_with


def test_sends_through_one_group_took_no_more_than_is_planned_for_a_group_per_neighbour() -> None:
    read = predictions.read(RESULTS / "predictions_h100_x4_2026-11-27_send_blocks.jsonl")
    rows = [row for row in read if row["send_blocks"] == (4 if "interleaved" in row["case"] else None)]
    assert len(rows) == 9
    for row in rows:
        mesh = plan_from_dict(row["plan"], where=row["case"]).mesh
        n_bytes = outside_allocator_bytes(mesh, has_tied_weights="bert" in row["case"]) - NOT_OFFERED_BYTES
        assert 0 <= n_bytes - max(row["outside_allocator_bytes_per_rank"]) < 512 * MiB, row["case"]


N_WITH = {"h200_x2_2026-11-22_one_machine": 1, "h200_x4_2026-11-22": 2, "h100_2026-11-23": 0, "h100_x2_2026-11-24": 2}


@pytest.mark.parametrize(
    "runs", [pytest.param(runs, marks=[pytest.mark.nightly] * (runs != "h100_2026-11-23")) for runs in N_WITH]
)
def test_programs_took_as_much_outside_of_the_allocator(runs: str) -> None:
    assert check_runs(runs=runs, models=("bert_large", "llama")) == N_WITH[runs]


@pytest.mark.nightly
@pytest.mark.parametrize("runs", N_WITH)
def test_so_did_those_of_the_other_models(runs: str) -> None:
    check_runs(runs=runs, models=tuple({case.model for case in predictions.cases()}))


def test_weights_tied_across_stages_have_a_communicator_of_their_own() -> None:
    assert communicators(Mesh(pp=2), has_tied_weights=True) == ("all", "tied weights")
    assert communicators(Mesh(dp=2), has_tied_weights=True) == ("all",)  # one stage holds them once


def test_hybrid_sharding_communicates_among_shards_and_among_replicas() -> None:
    mesh = Mesh(dp=4, zero_stage=3, zero_shard_degree=2)
    assert communicators(mesh, has_tied_weights=False) == ("all", "replica", "shard")


def test_replicas_of_several_groups_of_hosts_communicate_as_those_of_one_would() -> None:
    both = [(Mesh(dp=2, tp=2), 2), (Mesh(dp=4, tp=2), 1)]
    assert len({communicators(mesh, has_tied_weights=False, n_groups=n) for mesh, n in both}) == 1
    assert communicators(Mesh(), has_tied_weights=False, n_groups=2) == ("all",)


def test_the_table_of_the_evidence_has_what_is_planned_for() -> None:
    def mib(mesh: Mesh, **ways: bool) -> str:
        return f"{outside_allocator_bytes(mesh, has_tied_weights=False, **ways) // MiB:,}"

    both = Mesh(tp=2, dp=2)
    rows = [line.split(" | ") for line in (RESULTS.parent / "evidence" / "what_is_wrong.md").read_text().splitlines()]
    now = {cells[0].removeprefix("| "): cells[2] for cells in rows if len(cells) == 4}
    planned = {
        "one process, and": f"{mib(Mesh())} MiB",
        "2 replicas": f"{mib(Mesh(dp=2))} MiB",
        "2 stages (": f"{mib(Mesh(pp=2))} MiB",
        "tp 2 x dp 2 (": f"{mib(both)} ({mib(both, has_all_to_alls=True)}) MiB",
    }
    for start, text in planned.items():
        assert [cell for name, cell in now.items() if name.startswith(start)] == [text]
