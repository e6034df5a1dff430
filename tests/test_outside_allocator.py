"""Communicators of a plan, and what they take beside the context."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autoplan.cost.outside_allocator import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    communicators,
    outside_allocator_bytes,
)
from autoplan.parallel_plan import Mesh


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


@given(meshes(), st.booleans())
def test_a_process_takes_its_context_and_as_much_for_each_communicator(mesh: Mesh, has_tied_weights: bool) -> None:
    n_bytes = outside_allocator_bytes(mesh, has_tied_weights=has_tied_weights)
    n_communicators = len(communicators(mesh, has_tied_weights=has_tied_weights))
    assert n_bytes == CONTEXT_BYTES + n_communicators * COMMUNICATOR_BYTES
    assert n_bytes > CONTEXT_BYTES or mesh.n_devices == 1


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
