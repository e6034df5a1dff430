"""Communicators of a plan, and what they take beside the context."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.answers.answer import plan_from_dict
from autoplan.cost.outside_allocator import communicators, outside_allocator_bytes
from autoplan.parallel_plan import Mesh
from autoplan.units import MiB

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
TIED = ("gpt2-xl", "bert-large", "t5-large")
NOT_OFFERED_BYTES = 616 * MiB  # of an H200, by its driver to torch
ALL_TO_ALL_BYTES = (442 * MiB, 1212 * MiB)  # over 2 and 4 ranks, where the layouts of a plan have some


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    pp, replicas, shards, tp = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(4))
    zero_stage = draw(st.sampled_from([1, 2, 3])) if shards > 1 else 0
    return Mesh(pp=pp, dp=replicas * shards, tp=tp, zero_stage=zero_stage, zero_shard_degree=shards)


def ranks_of_groups(mesh: Mesh) -> dict[str, frozenset[int]]:
    """The processes that rank 0 communicates with, by axis, from rank = ((pp * replicas + r) * shards + s) * tp + t."""
    degrees = {"tp": mesh.tp, "shard": mesh.zero_shard_degree, "replica": mesh.dp // mesh.zero_shard_degree}
    degrees["pp"] = mesh.pp
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


@pytest.mark.parametrize("runs", ["h200_x2_2026-11-22_one_machine", "h200_x4_2026-11-22", "h100_2026-11-23"])
def test_programs_took_as_much_outside_of_the_allocator(runs: str) -> None:
    rows = [json.loads(line) for line in (RESULTS / f"predictions_{runs}.jsonl").read_text().splitlines()]
    measured = [row for row in rows if row["links"] == "nvlink" and row["exit_code"] == 0]
    assert len(measured) > 20
    for row in measured:
        mesh = plan_from_dict(row["plan"], where=runs).mesh
        n_bytes = outside_allocator_bytes(mesh, has_tied_weights=row["case"].startswith(TIED)) - NOT_OFFERED_BYTES
        found = max(row["outside_allocator_bytes_per_rank"])
        ways = (0, *ALL_TO_ALL_BYTES) if mesh.tp > 1 else (0,)
        assert any(abs(found - n_bytes - more) < 64 * MiB for more in ways), (row["case"], found / MiB, n_bytes / MiB)


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
