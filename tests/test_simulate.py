"""The simulator on toy figures: one device, gathers and reductions beside compute, plans that are refused."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator_toys import FREE, HALF, NO_SLOWDOWN, one_each, pipeline, segment, table_of, tick, whole

from autoplan.errors import InputError, PlanMismatchError
from autoplan.overlap import Overlap
from autoplan.parallel_plan import StagePlan
from autoplan.search.bounds import step_bound_s
from autoplan.simulator.simulate import simulate
from autoplan.simulator.stage_pass import SegmentPass, replay_first_forward, replay_pass

# ---------------------------------------------------------------------------------------------------------- one device


def test_one_device_communicates_nothing_and_waits_for_nothing():
    # 2 segments, 3 micro-batches: 3 x (1 + 2) + 3 x (3 + 4) compute, 2 x 5 optimizer
    costs = (segment(forward_s=1, backward_s=2, optimizer_s=5), segment(forward_s=3, backward_s=4, optimizer_s=5))
    estimate = simulate(table_of(costs, mesh=pipeline(1, 3)), whole(2))
    assert estimate.step_s == 40.0
    assert dataclasses.asdict(estimate.breakdown) == {
        "compute_s": 30.0,
        "recompute_s": 0.0,
        "exposed_tp_s": 0.0,
        "exposed_dp_s": 0.0,
        "exposed_pp_s": 0.0,
        "bubble_s": 0.0,
        "optimizer_s": 10.0,
        "launch_s": 0.0,
        "exposed_batch_copy_s": 0.0,
    }


def test_serial_parts_of_a_step_add_up_each_in_its_own_term():
    cost = segment(
        forward_s=1, backward_s=2, recompute_s=4, tp_forward_s=8, tp_backward_s=16, launch_forward_s=32,
        launch_backward_s=64, optimizer_s=128,
    )  # fmt: skip
    estimate = simulate(table_of([cost], mesh=pipeline(1, 2), per_step_s=256.0), whole(1))
    # twice (1 + 2), 4, (8 + 16) and (32 + 64); once 128 + 256
    breakdown = estimate.breakdown
    assert (breakdown.compute_s, breakdown.recompute_s, breakdown.exposed_tp_s) == (6, 8, 48)
    assert (breakdown.launch_s, breakdown.optimizer_s) == (192, 384)
    assert estimate.step_s == 638


@pytest.mark.parametrize(("copy_s", "exposed_s"), [(8.0, 0.0), (9.0, 0.0), (12.0, 3.0)])
def test_a_step_is_never_shorter_than_the_copy_of_the_next_batch(copy_s, exposed_s):
    # 1 segment, 3 micro-batches of 1 + 2 seconds: 9
    table = table_of([segment(forward_s=1, backward_s=2)], mesh=pipeline(1, 3), batch_copy_s=copy_s)
    estimate = simulate(table, whole(1), with_timeline=True)
    assert (estimate.step_s, estimate.breakdown.exposed_batch_copy_s) == (9.0 + exposed_s, exposed_s)
    assert estimate.breakdown.total_s == estimate.step_s == step_bound_s(table)
    (copy,) = [event for event in estimate.timeline if event.stream == "copy"]
    assert (copy.start_s, copy.stop_s) == (0.0, copy_s)


def test_the_slowest_copy_of_any_rank_counts():
    mesh = pipeline(2, 1)
    ranks = tuple(table_of([FREE, FREE], mesh=mesh, batch_copy_s=copy_s) for copy_s in (1.0, 4.0))
    table = dataclasses.replace(ranks[0], rank_tables=ranks)
    estimate = simulate(table, one_each(2))
    assert (estimate.step_s, estimate.slowest_rank, estimate.breakdown.exposed_batch_copy_s) == (4.0, 1, 4.0)


def test_batches_on_the_device_are_held_all_step():
    plain, with_batch = (simulate(table_of([FREE], batch_bytes=n), whole(1)) for n in (0, 30))
    assert with_batch.allocated_bytes[0] - plain.allocated_bytes[0] == 30
    assert dict(with_batch.memory_parts_bytes[0])["batches"] == 30


def test_recomputed_segments_take_their_recompute_cost():
    plain, again = segment(forward_s=1, backward_s=2), segment(forward_s=1, backward_s=2, recompute_s=1)
    table = table_of([(plain, again)] * 3)
    assert simulate(table, whole(3)).step_s == 9
    assert simulate(table, whole(3, recomputed=(0, 2))).step_s == 11
    assert simulate(table, whole(3, recomputed=(0, 2))).breakdown.recompute_s == 2


# ---------------------------------------------------------------------------------------------- gathers and reductions


def sharded(*, gather_s=0.0, reduce_s=0.0):
    return segment(forward_s=4, backward_s=8, gather_s=gather_s, reduce_s=reduce_s)


def test_first_gather_and_last_reduction_are_exposed_and_the_others_hidden():
    # forward:  gather 0 [0, 3], segment 0 [3, 7] with gather 1 beside it, segment 1 [7, 11]: 3 exposed
    # backward: gather 1 for 3, segment 1 with gather 0, segment 0 with reduce 1: 3 exposed; then reduce 0: 2 exposed
    table = table_of([sharded(gather_s=3, reduce_s=2)] * 2, gathers=True, reduces=True)
    estimate = simulate(table, whole(2))
    assert estimate.breakdown.exposed_dp_s == 8
    assert estimate.step_s == 2 * (4 + 8) + 8


def test_hidden_communication_costs_the_slowdown():
    # as above, and 3 s (forward) + 3 s + 2 s (backward) run beside compute: each takes 1.5 times as long
    table = table_of([sharded(gather_s=3, reduce_s=2)] * 2, gathers=True, reduces=True, overlap=HALF)
    assert simulate(table, whole(2)).breakdown.exposed_dp_s == 8 + 0.5 * (3 + 3 + 2)


def test_gather_longer_than_compute_is_exposed_in_part():
    # gather 0 [0, 6], segment 0 [6, 10], gather 1 [6, 12], segment 1 [12, 16]; the pass computes 8 of 16 s
    work = (SegmentPass(busy_s=4, gather_s=6),) * 2
    times = replay_pass(work, overlap=NO_SLOWDOWN)
    assert (times.elapsed_s, times.exposed_s, times.left_s) == (16, 8, 0)
    assert times.spans == (("gather", 0, 0, 6), ("gather", 1, 6, 12))
    # slowed by a half: beside segment 0, 4 s of gather 1 take 6 s, [6, 12]; its last 2 s [12, 14]; segment 1 [14, 18]
    slow = replay_pass(work, overlap=HALF)
    assert (slow.elapsed_s, slow.exposed_s) == (18, 10)
    assert slow.spans == (("gather", 0, 0, 6), ("gather", 1, 6, 14))


def test_compute_and_communication_are_each_slowed_by_a_factor_of_their_own():
    # beta 1/2 and gamma 1/4: while both run compute takes 1.75 and communication 7/6 times as long, so that a second of
    # compute hides 1.5 s. Gather 0 [0, 2]; segment 0, 4 s, takes 7 s, [2, 9], beside 6 of the 7 s of gather 1, whose
    # last second is exposed, [9, 10]: 7 + 4/4 s as communication takes longer. Segment 1 [10, 14].
    overlap = Overlap(communication_exposed=0.5, compute_exposed=0.25)
    times = replay_pass((SegmentPass(busy_s=4, gather_s=2), SegmentPass(busy_s=4, gather_s=7)), overlap=overlap)
    assert (times.elapsed_s, times.exposed_s, times.left_s) == (14, 6, 0)
    assert times.spans == (("gather", 0, 0, 2), ("gather", 1, 2, 10))
    # 3 s left over are done beside 2 s of compute in 3.5 s, then 2 s alone: 4 + 3/2 s as compute takes longer
    times = replay_pass((SegmentPass(busy_s=4),), overlap=overlap, left_s=3)
    assert (times.elapsed_s, times.exposed_s, times.left_s) == (5.5, 1.5, 0)
    assert times.spans == (("left over", None, 0, 3.5),)
    # of 9 s left over 6 are done beside compute, in 7 s
    times = replay_pass((SegmentPass(busy_s=4),), overlap=overlap, left_s=9)
    assert (times.elapsed_s, times.exposed_s, times.left_s) == (7, 3, 3)
    # likewise where gathers were queued before: 3 s of the later stages are done after 2 s of the own ones
    work = (SegmentPass(busy_s=4, gather_s=2),)
    times = replay_first_forward(work, overlap=overlap, left_s=5, later_s=3)
    assert (times.elapsed_s, times.exposed_s, times.left_s) == (7.5, 3.5, 0)


@given(*[st.floats(0.01, 100)] * 2, *[st.floats(0.0, 0.95)] * 2)
def test_streams_begun_together_end_as_the_shares_say(compute_s, communication_s, beta, gamma):
    times = replay_pass((SegmentPass(compute_s),), overlap=Overlap(beta, gamma), left_s=communication_s)
    both_s = max(compute_s + beta * communication_s, communication_s + gamma * compute_s)
    assert times.elapsed_s + times.left_s == pytest.approx(both_s)


def test_gathers_once_per_step_are_not_repeated():
    # gather 0 is exposed once, in the first of 3 forward passes; gather 1 is hidden there
    table = table_of([sharded(gather_s=3)] * 2, mesh=pipeline(1, 3))
    assert simulate(table, whole(2)).breakdown.exposed_dp_s == 3


def test_gathers_per_micro_batch_are_repeated_in_forward_and_backward():
    table = table_of([sharded(gather_s=3)] * 2, mesh=pipeline(1, 3), gathers=True)
    assert simulate(table, whole(2)).breakdown.exposed_dp_s == 3 * (3 + 3)


def test_reduction_once_per_step_comes_in_the_last_micro_batch():
    # only the last of 3 backward passes reduces: segment 1's is hidden beside segment 0, segment 0's 2 s are exposed
    table = table_of([sharded(reduce_s=2)] * 2, mesh=pipeline(1, 3), overlap=HALF)
    assert simulate(table, whole(2)).breakdown.exposed_dp_s == 0.5 * 2 + 2


def test_replicas_sum_their_gradients_beside_the_last_backward_pass():
    # 2 micro-batches of 2 segments; in the second backward pass 3 s of replicas behind 2 s of each reduction: segment
    # 1's 5 s are hidden beside the 8 s of segment 0, whose own are exposed; in the first one they are 2 s each
    cost = dataclasses.replace(sharded(reduce_s=2), replicas_s=3)
    table = table_of([cost] * 2, mesh=pipeline(1, 2), reduces=True)
    estimate = simulate(table, whole(2))
    assert (estimate.breakdown.exposed_dp_s, estimate.breakdown.optimizer_s) == (5, 0)
    assert estimate.step_s == 2 * 2 * (4 + 8) + 5


def test_backward_pass_takes_the_segments_from_last_to_first():
    # segment 0 comes last in backward, so its reduction of 5 s is the exposed one
    assert simulate(table_of([sharded(reduce_s=5), sharded(reduce_s=1)]), whole(2)).breakdown.exposed_dp_s == 5


def test_reduction_left_over_goes_on_beside_the_next_micro_batch():
    # one segment, 2 micro-batches: the first reduction runs beside the second forward pass (2 s of it slowed by
    # 1.5), the second one is exposed
    table = table_of([sharded(reduce_s=2)], mesh=pipeline(1, 2), reduces=True, overlap=HALF)
    assert simulate(table, whole(1)).breakdown.exposed_dp_s == 0.5 * 2 + 2


def test_gather_waits_for_the_reduction_before_it():
    # F0 1+4, B0 1+8, reduce 2 then gather 1 before F1 4, B1 1+8, reduce 2: exposed 1 + 1 + (2 + 1) + 1 + 2
    table = table_of([sharded(gather_s=1, reduce_s=2)], mesh=pipeline(1, 2), gathers=True, reduces=True)
    assert simulate(table, whole(1)).breakdown.exposed_dp_s == 8


def test_reductions_slower_than_compute_pile_up():
    # backward 1 + 1 s, each reduction 5 s: reduce 1 [1, 6], reduce 0 [6, 11], left over 10 - 1 = 9 at the end
    work = (SegmentPass(busy_s=1, reduce_s=5),) * 2
    times = replay_pass(work, overlap=NO_SLOWDOWN)
    assert (times.elapsed_s, times.exposed_s, times.left_s) == (2, 0, 9)


def ticks_of(work, *, left_s):
    """The same pass second by second, without slowdown: (elapsed, left over). An independent oracle."""
    queue = [["left", left_s]] + [[("gather", 0), work[0].gather_s]]
    elapsed = 0
    for index, item in enumerate(work):
        while any(name == ("gather", index) and rest > 0 for name, rest in queue):
            elapsed += tick(queue)
        if index + 1 < len(work):
            queue.append([("gather", index + 1), work[index + 1].gather_s])
        for _ in range(item.busy_s):
            elapsed += tick(queue)
        queue.append([("reduce", index), item.reduce_s])
    return elapsed, sum(rest for _, rest in queue)


seconds = st.integers(0, 5)


@given(st.lists(st.builds(SegmentPass, seconds, seconds, seconds), min_size=1, max_size=5), seconds)
def test_pass_agrees_with_a_replay_second_by_second(work, left_s):
    times = replay_pass(tuple(work), overlap=NO_SLOWDOWN, left_s=left_s)
    assert (times.elapsed_s, times.left_s) == ticks_of(work, left_s=left_s)


def test_communication_on_the_timeline_is_named_after_its_segments():
    # two stages of two segments, gathers of 1 s hidden but the first, reductions of 1 s: backward from the last segment
    table = table_of([sharded(gather_s=1, reduce_s=1)] * 4, mesh=pipeline(2, 1), gathers=True, reduces=True)
    estimate = simulate(table, (StagePlan(0, 2), StagePlan(2, 4)), with_timeline=True)
    names = [event.name for event in estimate.timeline if event.stream == "communication" and event.rank == 1]
    assert names == ["gather 2", "gather 3", "gather 3", "gather 2", "reduce 3", "reduce"]


# ------------------------------------------------------------------------------------------------ plans that are wrong


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (whole(3), r"plan.stages: found '1 stages that end at segment 3'\n  expected: 2 stages \(pp 2 x n_chunks 1\)"),
        ((), "plan.stages: found '0 stages that end at segment 0'"),
        ((StagePlan(0, 1), StagePlan(1, 2)), "found '2 stages that end at segment 2'"),
        ((StagePlan(0, 1), StagePlan(2, 3)), r"plan.stages\[1\]: found 'segments 2 to 3"),
        ((StagePlan(0, 0), StagePlan(0, 3)), r"plan.stages\[0\]: found 'segments 0 to 0"),
        ((StagePlan(0, 1, (1,)), StagePlan(1, 3)), r"plan.stages\[0\]: found 'segments 0 to 1, recomputed \(1,\)"),
        ((StagePlan(0, 2), StagePlan(2, 3)), r"plan.stages\[1\].start: found 2\n  expected: a boundary at which"),
    ],
)
def test_stages_that_do_not_belong_to_the_table_are_refused(stages, message):
    table = dataclasses.replace(table_of([FREE] * 3, mesh=pipeline(2, 2)), cut_s=(0.0, None))
    with pytest.raises(PlanMismatchError, match=message):
        simulate(table, stages)


def test_schedule_that_does_not_exist_for_the_mesh_is_refused():
    mesh = pipeline(2, 3, schedule="interleaved", n_chunks=2)
    with pytest.raises(InputError, match="a multiple of pp = 2"):
        simulate(table_of([FREE] * 4, mesh=mesh), one_each(4))


def test_the_timeline_ends_with_the_step_when_the_optimizer_waits_for_the_host() -> None:
    cost = segment(forward_s=1, backward_s=2, optimizer_s=3, launch_once_s=1)  # 1 + 2 + 3
    estimate = simulate(table_of([cost]), whole(1), with_timeline=True)
    assert estimate.step_s == max(event.stop_s for event in estimate.timeline) == 6
    assert (estimate.breakdown.optimizer_s, estimate.breakdown.launch_s) == (2, 1)


def test_links_that_drift_make_a_step_uncertain_as_far_as_it_waits_for_them():
    # of 10 s, 2 are collectives of tensor parallelism
    cost = segment(forward_s=3, backward_s=5, tp_forward_s=1, tp_backward_s=1)
    steady, drifting = (simulate(table_of((cost,), drift=drift), whole(1)) for drift in (0.0, 0.1))
    assert (steady.step_s, steady.drift) == (10.0, 0.0)
    assert drifting == dataclasses.replace(steady, drift=pytest.approx(0.02))
