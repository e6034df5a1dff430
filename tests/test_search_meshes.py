"""Which meshes are tried at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoplan.errors import InfeasibleError, InputError
from autoplan.options import Options
from autoplan.parallel_plan import Mesh
from autoplan.search import SearchSpace
from autoplan.search.meshes import (
    data_parallel_degrees,
    device_counts,
    least_micro_batch_size,
    legal_tensor_degrees,
    list_meshes,
    nearest_shared_batch,
    tensor_degrees,
)

SPACE = SearchSpace(
    n_devices=8,
    n_devices_per_host=4,
    global_batch=16,
    kinds=(0, 1, 1, 1, 1, 2),
    cuts=(True,) * 5,
    shardings=((1, ("",)), (2, ("a", "b")), (4, ("a",)), (8, ("a",))),
)


def meshes(space: SearchSpace = SPACE, **options: object) -> tuple[Mesh, ...]:
    return list_meshes(space, Options(**options))[0]  # type: ignore[arg-type]


def test_every_mesh_divides_the_batch_exactly_and_appears_once() -> None:
    found = meshes()
    assert len(set(found)) == len(found)
    assert all(mesh.global_batch_size == 16 for mesh in found)


def test_every_mesh_is_in_canonical_form() -> None:
    for mesh in meshes():
        assert (mesh.zero_stage == 0) == (mesh.zero_shard_degree == 1)
        assert mesh.dp > 1 or mesh.zero_stage == 0
        assert mesh.pp > 1 or (mesh.schedule, mesh.n_chunks) == ("1f1b", 1)
        assert mesh.n_chunks == 1 or mesh.schedule in ("interleaved", "zero_bubble_v")
        assert (mesh.tp == 1) == (mesh.sharding == "")
        assert mesh.n_micro_batches > 1 or mesh.zero_stage != 2


def test_one_micro_batch_is_sharded_by_stage_1_and_by_stage_2_where_that_is_fixed() -> None:
    one = {mesh.zero_stage for mesh in meshes() if mesh.n_micro_batches == 1 and mesh.dp > 1}
    several = {mesh.zero_stage for mesh in meshes() if mesh.n_micro_batches > 1 and mesh.dp > 1}
    assert (one, several) == ({0, 1, 3}, {0, 1, 2, 3})
    second = meshes(fix=(("zero", "2"),))
    assert {mesh.zero_stage for mesh in second} == {2} and any(mesh.n_micro_batches == 1 for mesh in second)


def test_tensor_parallelism_leaves_a_host_only_on_links_that_join_hosts() -> None:
    assert tensor_degrees(n_devices_per_host=4, n_on_links=4) == (1, 2, 4)
    # 18 hosts: those of 2, 4, 8 and 16 of them
    assert tensor_degrees(n_devices_per_host=4, n_on_links=72) == (1, 2, 4, 8, 16, 32, 64)
    assert legal_tensor_degrees(SPACE, Options()) == (1, 2, 4)
    joined = replace(SPACE, n_devices_joined=8)
    assert legal_tensor_degrees(joined, Options()) == (1, 2, 4, 8)
    assert set(meshes(joined)) > set(meshes())  # more joined devices take no mesh away
    with pytest.raises(InfeasibleError, match="on the links of a host, which join 8 devices"):
        meshes(joined, fix=(("dp", "3"),))


def test_zero_shards_over_the_host_or_all_on_its_links() -> None:
    rack = replace(SPACE, n_devices=16, n_devices_joined=8)
    found = {mesh.zero_shard_degree for mesh in meshes(rack) if (mesh.dp, mesh.tp, mesh.zero_stage) == (16, 1, 3)}
    assert found == {4, 8, 16}


def test_schedule_plain_is_1f1b_and_gpipe_where_1f1b_lacks_micro_batches() -> None:
    def is_meant(mesh: Mesh) -> bool:
        return mesh.schedule == ("gpipe" if mesh.n_micro_batches < mesh.pp else "1f1b")

    found = meshes(fix=(("schedule", "plain"),))
    assert set(found) == set(filter(is_meant, meshes()))
    assert {mesh.schedule for mesh in found} == {"1f1b", "gpipe"}


def test_schedules_exist_only_for_the_micro_batches_they_need() -> None:
    for mesh in meshes():
        assert mesh.schedule != "1f1b" or mesh.n_micro_batches >= mesh.pp
        assert mesh.schedule != "interleaved" or mesh.n_micro_batches % mesh.pp == 0
        assert mesh.schedule != "zero_bubble_v" or (mesh.n_micro_batches >= mesh.pp and mesh.n_chunks == 2)


def test_a_split_backward_pass_goes_without_zero_3_and_recomputation() -> None:
    assert {mesh.zero_stage for mesh in meshes() if mesh.schedule == "zero_bubble_v"} == {0, 1, 2}
    for recompute in ("full", "selective"):
        assert "zero_bubble_v" not in {mesh.schedule for mesh in meshes(fix=(("recompute", recompute),))}
    assert "zero_bubble_v" in {mesh.schedule for mesh in meshes(fix=(("recompute", "none"),))}


def test_each_sharding_of_a_degree_is_tried() -> None:
    assert {mesh.sharding for mesh in meshes() if mesh.tp == 2} == {"a", "b"}


def test_tensor_parallel_stays_within_a_host_unless_it_is_fixed() -> None:
    assert {mesh.tp for mesh in meshes()} == {1, 2, 4}
    assert {mesh.tp for mesh in meshes(fix=(("tp", "8"),))} == {8}


def test_hybrid_sharding_uses_the_ranks_of_one_host() -> None:
    # dp 8 with tp 1: a host of 4 devices holds 4 of the 8 ranks
    degrees = {mesh.zero_shard_degree for mesh in meshes() if mesh.dp == 8 and mesh.zero_stage == 3}
    assert degrees == {8, 4}


def test_a_pipeline_has_no_more_stages_than_the_model_has_pieces() -> None:
    narrow = replace(SPACE, cuts=(True, False, True, False, False))  # 3 pieces
    assert max(mesh.n_stages for mesh in meshes(narrow)) <= 3


def test_fixed_values_are_obeyed() -> None:
    fix = (("dp", "2"), ("pp", "2"), ("zero", "1"), ("micro_batch", "2"), ("schedule", "gpipe"))
    found = meshes(fix=fix)
    assert found
    for mesh in found:
        values = (mesh.dp, mesh.pp, mesh.zero_stage, mesh.micro_batch_size, mesh.schedule)
        assert values == (2, 2, 1, 2, "gpipe")


def test_fixed_chunks_are_the_stages_of_each_rank_however_many() -> None:
    # free: powers of two, up to 4 a rank and 32 in all
    long = replace(SPACE, kinds=(0,) * 40, cuts=(True,) * 39, global_batch=32)
    assert {mesh.n_chunks for mesh in meshes(long)} == {1, 2, 4}
    for n_chunks in (3, 5):  # 5 x 8 ranks: each segment a stage
        found = meshes(long, fix=(("stages_per_rank", str(n_chunks)), ("pp", "8")))
        assert {(mesh.schedule, mesh.n_chunks) for mesh in found} == {("interleaved", n_chunks)}
    assert all(mesh.n_chunks == 1 for mesh in meshes(long, fix=(("stages_per_rank", "1"),)))
    assert "zero_bubble_v" in {mesh.schedule for mesh in meshes(long, fix=(("stages_per_rank", "2"),))}
    with pytest.raises(InfeasibleError, match="instead of stages_per_rank=6, with the rest as it is: 1, 2, 4"):
        meshes(long, fix=(("stages_per_rank", "6"), ("pp", "8")))


def test_the_largest_micro_batch_is_an_option() -> None:
    assert max(mesh.micro_batch_size for mesh in meshes(max_micro_batch_size=4)) == 4
    assert set(meshes(max_micro_batch_size=2)) < set(meshes(max_micro_batch_size=4))


def test_nothing_that_divides_names_the_legal_degrees() -> None:
    odd = replace(SPACE, global_batch=10)
    with pytest.raises(InfeasibleError, match=r"legal dp \(divides the global batch\): 1, 2, 5\n"):
        meshes(odd, fix=(("dp", "4"),))


@pytest.mark.parametrize(
    ("fix", "global_batch", "line"),
    [
        ("dp=3", 16, "instead of dp=3, with the rest as it is: 1, 2, 4, 8\n"),
        ("dp=3", 16, "or a global batch that dp x micro-batch = 3 divides: 15 or 18\n"),
        # 2 micro-batches of 8 are too few for 4 stages under 1f1b, and enough under gpipe
        ("pp=4,schedule=1f1b,micro_batch=8", 16, "instead of micro_batch=8, with the rest as it is: 1, 2, 4\n"),
        ("pp=4,schedule=1f1b,micro_batch=8", 16, "instead of schedule=1f1b, with the rest as it is: gpipe\n"),
        ("pp=2,schedule=zero_bubble_v,zero=3", 16, "instead of zero=3, with the rest as it is: 0, 1, 2\n"),
        ("pp=2,schedule=zero_bubble_v,recompute=full", 16, "instead of recompute=full, with the rest as it is: none\n"),
        ("pp=2,schedule=zero_bubble_v,cuda_graph=on", 16, "instead of cuda_graph=on, with the rest as it is: off\n"),
        ("pp=7", 16, "instead of pp=7, with the rest as it is: 1, 2, 4\n"),  # 6 pieces, on 8 devices
    ],
)
def test_nothing_legal_names_the_nearest_legal_values_of_what_is_fixed(fix: str, global_batch: int, line: str) -> None:
    pairs = tuple(tuple(part.split("=")) for part in fix.split(","))
    with pytest.raises(InfeasibleError) as caught:
        meshes(replace(SPACE, global_batch=global_batch), fix=pairs)
    assert line in str(caught.value)


def test_a_fix_that_is_no_number_is_an_input_error() -> None:
    with pytest.raises(InputError, match="fix dp: found 'four'"):
        meshes(fix=(("dp", "four"),))


@pytest.mark.parametrize("n_hosts", range(1, 17))
def test_the_space_grows_with_the_cluster(n_hosts: int) -> None:
    # hosts of up to four significant bits: each larger cluster has all device counts of each smaller one
    smaller = set(device_counts(replace(SPACE, n_devices=4 * n_hosts)))
    larger = set(device_counts(replace(SPACE, n_devices=4 * (n_hosts + 1))))
    assert smaller < larger


def test_meshes_of_a_smaller_cluster_are_meshes_of_a_larger_one() -> None:
    assert set(meshes(replace(SPACE, n_devices=4))) < set(meshes())


@pytest.mark.parametrize(
    ("batch", "degrees", "n_samples", "near"),
    [
        (16, (1, 2, 4, 8), 1, 16),
        (1009, (1,), 1, 1008),  # a prime
        (3, (1,), 1, None),  # 8 are far more
        (6, (1, 2), 1, 8),
        (20, (1, 2, 4), 1, 16),  # as near as 24
        (100_003, (1,), 100_003, 100_000),  # a prime above 8192; 12500 for each are 6250 micro-batches of 2
        # 100003 for each: the next are 2 x 3 x 7 x 2381, of which 7143 micro-batches have 14, where 8192 ask for 13
        (800_024, (1, 2, 4, 8), 100_003, 800_032),
    ],
)
def test_the_nearest_batch_that_all_devices_share_has_small_micro_batches(batch, degrees, n_samples, near) -> None:
    assert data_parallel_degrees(batch, n_devices=8, n_devices_per_host=8) == degrees
    assert least_micro_batch_size(batch, dp_degrees=degrees) == n_samples
    assert nearest_shared_batch(batch, n_devices=8) == near


def test_nothing_legal_names_the_nearest_batch_that_all_devices_share() -> None:
    with pytest.raises(InfeasibleError, match="fix: choose dp .* or take a global batch of 8\n?$"):
        meshes(replace(SPACE, global_batch=7), max_micro_batch_size=0)
