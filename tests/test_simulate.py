"""The simulator on toy figures: whole seconds and bytes, so that every expected number is a short sum."""

import dataclasses
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.cost.table import CostTable, SegmentCost
from autoplan.errors import InputError, PlanMismatchError
from autoplan.parallel_plan import Mesh, StagePlan
from autoplan.schedules import build_schedule, stage_ranks
from autoplan.search.bounds import step_bound_s
from autoplan.simulator.simulate import memory_over_time, simulate
from autoplan.simulator.stage_pass import SegmentPass, replay_pass

FREE = SegmentCost(*[0.0] * 10, *[0] * 5)


def segment(**figures):
    """A segment that costs nothing but `figures`."""
    return dataclasses.replace(FREE, **figures)


def table_of(costs, *, mesh=None, cut_s=0.0, gathers=False, reduces=False, keeps=False, slowdown=1.0, **fields):
    """A table with one kind per entry of `costs`: a SegmentCost, or a pair (without, with recomputation)."""
    pairs = tuple(cost if isinstance(cost, tuple) else (cost, cost) for cost in costs)
    n_cuts = len(pairs) - 1
    defaults = {"per_step_s": 0.0, "reserved_fixed_bytes": 0, "reserved_ratio": 1.0, "memory_limit_bytes": 10**6}
    return CostTable(
        mesh=mesh or Mesh(),
        kinds=tuple(range(len(pairs))),
        recompute_choices=("none", "full"),
        costs=pairs,
        cut_s=(cut_s,) * n_cuts,
        gathers_per_micro_batch=gathers,
        reduces_per_micro_batch=reduces,
        keeps_gathered=keeps,
        overlap_slowdown=slowdown,
        **{**defaults, **fields},
    )


def whole(n_segments, *, recomputed=()):
    """One stage of all segments."""
    return (StagePlan(0, n_segments, recomputed),)


def one_each(n_stages):
    """One segment per stage."""
    return tuple(StagePlan(index, index + 1) for index in range(n_stages))


def pipeline(pp, n_micro_batches, *, schedule="1f1b", n_chunks=1):
    return Mesh(pp=pp, n_micro_batches=n_micro_batches, schedule=schedule, n_chunks=n_chunks)


# ---------------------------------------------------------------------------------------------- one device


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
    assert simulate(table, one_each(2)).step_s == 4.0


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


# ------------------------------------------------------------------------------- gathers and reductions


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
    table = table_of([sharded(gather_s=3, reduce_s=2)] * 2, gathers=True, reduces=True, slowdown=1.5)
    assert simulate(table, whole(2)).breakdown.exposed_dp_s == 8 + 0.5 * (3 + 3 + 2)


def test_gather_longer_than_compute_is_exposed_in_part():
    # gather 0 [0, 6], segment 0 [6, 10], gather 1 [6, 12], segment 1 [12, 16]; the pass computes 8 of 16 s
    work = (SegmentPass(busy_s=4, gather_s=6),) * 2
    times = replay_pass(work, slowdown=1.0)
    assert (times.elapsed_s, times.exposed_s, times.left_s) == (16, 8, 0)
    assert times.spans == (("gather", 0, 0, 6), ("gather", 1, 6, 12))
    # slowdown 2: beside segment 0, 4 s of gather 1 take 8 s, [6, 14]; its last 2 s [14, 16]; segment 1 [16, 20]
    slow = replay_pass(work, slowdown=2.0)
    assert (slow.elapsed_s, slow.exposed_s) == (20, 12)
    assert slow.spans == (("gather", 0, 0, 6), ("gather", 1, 6, 16))


def test_gathers_once_per_step_are_not_repeated():
    # gather 0 is exposed once, in the first of 3 forward passes; gather 1 is hidden there
    table = table_of([sharded(gather_s=3)] * 2, mesh=pipeline(1, 3), keeps=True)
    assert simulate(table, whole(2)).breakdown.exposed_dp_s == 3


def test_gathers_per_micro_batch_are_repeated_in_forward_and_backward():
    table = table_of([sharded(gather_s=3)] * 2, mesh=pipeline(1, 3), gathers=True)
    assert simulate(table, whole(2)).breakdown.exposed_dp_s == 3 * (3 + 3)


def test_reduction_once_per_step_comes_in_the_last_micro_batch():
    # only the last of 3 backward passes reduces: segment 1's is hidden beside segment 0, segment 0's 2 s are exposed
    table = table_of([sharded(reduce_s=2)] * 2, mesh=pipeline(1, 3), slowdown=1.5)
    assert simulate(table, whole(2)).breakdown.exposed_dp_s == 0.5 * 2 + 2


def test_backward_pass_takes_the_segments_from_last_to_first():
    # segment 0 comes last in backward, so its reduction of 5 s is the exposed one
    assert simulate(table_of([sharded(reduce_s=5), sharded(reduce_s=1)]), whole(2)).breakdown.exposed_dp_s == 5


def test_reduction_left_over_goes_on_beside_the_next_micro_batch():
    # one segment, 2 micro-batches: the first reduction runs beside the second forward pass (2 s of it slowed by
    # 1.5), the second one is exposed
    table = table_of([sharded(reduce_s=2)], mesh=pipeline(1, 2), reduces=True, slowdown=1.5)
    assert simulate(table, whole(1)).breakdown.exposed_dp_s == 0.5 * 2 + 2


def test_gather_waits_for_the_reduction_before_it():
    # F0 1+4, B0 1+8, reduce 2 then gather 1 before F1 4, B1 1+8, reduce 2: exposed 1 + 1 + (2 + 1) + 1 + 2
    table = table_of([sharded(gather_s=1, reduce_s=2)], mesh=pipeline(1, 2), gathers=True, reduces=True)
    assert simulate(table, whole(1)).breakdown.exposed_dp_s == 8


def test_reductions_slower_than_compute_pile_up():
    # backward 1 + 1 s, each reduction 5 s: reduce 1 [1, 6], reduce 0 [6, 11], left over 10 - 1 = 9 at the end
    work = (SegmentPass(busy_s=1, reduce_s=5),) * 2
    times = replay_pass(work, slowdown=1.0)
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


def tick(queue):
    for entry in queue:
        if entry[1] > 0:
            entry[1] -= 1
            break
    return 1


seconds = st.integers(0, 5)


@given(st.lists(st.builds(SegmentPass, seconds, seconds, seconds), min_size=1, max_size=5), seconds)
def test_pass_agrees_with_a_replay_second_by_second(work, left_s):
    times = replay_pass(tuple(work), slowdown=1.0, left_s=left_s)
    assert (times.elapsed_s, times.left_s) == ticks_of(work, left_s=left_s)


def test_communication_on_the_timeline_is_named_after_its_segments():
    # two stages of two segments, gathers of 1 s hidden but the first, reductions of 1 s: backward from the last segment
    table = table_of([sharded(gather_s=1, reduce_s=1)] * 4, mesh=pipeline(2, 1), gathers=True, reduces=True)
    estimate = simulate(table, (StagePlan(0, 2), StagePlan(2, 4)), with_timeline=True)
    names = [event.name for event in estimate.timeline if event.stream == "communication" and event.rank == 1]
    assert names == ["gather 2", "gather 3", "gather 3", "gather 2", "reduce 3", "reduce"]


# ------------------------------------------------------------------------------------------------ pipelines


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("pp", "n_micro_batches"), [(2, 2), (4, 8), (3, 5)])
def test_bubble_of_equal_stages_is_stages_minus_one_over_micro_batches(schedule, pp, n_micro_batches):
    # ideal: M x (1 + 2); the first rank ends last, after (M + pp - 1) x 3
    table = table_of([segment(forward_s=1, backward_s=2)] * pp, mesh=pipeline(pp, n_micro_batches, schedule=schedule))
    estimate = simulate(table, one_each(pp))
    ideal_s = 3 * n_micro_batches
    assert estimate.breakdown.compute_s == ideal_s
    assert estimate.breakdown.bubble_s / ideal_s == pytest.approx((pp - 1) / n_micro_batches)
    assert estimate.step_s == 3 * (n_micro_batches + pp - 1)


@pytest.mark.parametrize("n_chunks", [2, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(n_chunks):
    # 4 ranks, 8 micro-batches, forward 4 s and backward 8 s per rank: 1f1b idles 3 x 12 = 36 s, interleaved 36 / chunks
    n_stages = 4 * n_chunks
    cost = segment(forward_s=4 / n_chunks, backward_s=8 / n_chunks)
    table = table_of([cost] * n_stages, mesh=pipeline(4, 8, schedule="interleaved", n_chunks=n_chunks))
    estimate = simulate(table, one_each(n_stages))
    assert estimate.breakdown.bubble_s == 36 / n_chunks
    assert estimate.step_s == 8 * 12 + 36 / n_chunks


@pytest.mark.parametrize("n_micro_batches", [7, 8, 12])
def test_zero_bubble_v_bubble_is_one_pass_per_rank_but_one(n_micro_batches):
    # 4 ranks, 8 stages; forward, input gradient and weight gradient 1 s each: the bubble is 4 - 1 passes
    cost = segment(forward_s=1, backward_s=2, weight_backward_s=1)
    mesh = pipeline(4, n_micro_batches, schedule="zero_bubble_v", n_chunks=2)
    estimate = simulate(table_of([cost] * 8, mesh=mesh), one_each(8))
    assert estimate.breakdown.bubble_s == 3
    assert estimate.step_s == n_micro_batches * 6 + 3


def test_the_halves_of_a_backward_pass_take_their_parts_and_the_first_stage_has_one():
    # 2 ranks, 1 micro-batch, F 1 s, I 2 s, W 3 s; transfers of 0.5 s, none at the turn of the V.
    # 0F [0, 1], 1F [1.5, 2.5], 2F [2.5, 3.5], 3F [4, 5], 3I [5, 7], 3W [7, 10]; 2I [7.5, 9.5], 2W [9.5, 12.5],
    # 1I [12.5, 14.5], 1W [14.5, 17.5]; from 15 on stage 0, which has nothing to do for its inputs and 5 s for weights
    cost = segment(forward_s=1, backward_s=5, weight_backward_s=3)
    mesh = pipeline(2, 1, schedule="zero_bubble_v", n_chunks=2)
    estimate = simulate(table_of([cost] * 4, mesh=mesh, cut_s=0.5), one_each(4), with_timeline=True)
    boxes = {event.name: (event.start_s, event.stop_s) for event in estimate.timeline if event.stream == "compute"}
    expected = {"1F0": (1.5, 2.5), "2F0": (2.5, 3.5), "3I0": (5, 7), "3W0": (7, 10), "2I0": (7.5, 9.5)}
    expected |= {"2W0": (9.5, 12.5), "1I0": (12.5, 14.5), "1W0": (14.5, 17.5), "0I0": (15, 15), "0W0": (15, 20)}
    assert {name: boxes[name] for name in expected} == expected
    assert estimate.step_s == 20


def test_a_split_backward_pass_keeps_activations_and_pending_gradients_until_the_half_for_weights():
    # one rank with both stages, 1 micro-batch: 0F 1F 1I 1W 0I 0W. While 1W runs: state 100 + 200, saved 10 + 20,
    # pending 5, working 8 = 343; of stage 1 only gradients are left in 0W: 300 + 4 + 10 + 3 + 7 = 324, then 300 + 4 + 2
    costs = [
        segment(state_bytes=100, saved_bytes=10, pending_bytes=3, gradient_bytes=2, working_bytes=7),
        segment(state_bytes=200, saved_bytes=20, pending_bytes=5, gradient_bytes=4, working_bytes=8),
    ]
    table = table_of(costs, mesh=pipeline(1, 1, schedule="zero_bubble_v", n_chunks=2))
    assert simulate(table, one_each(2)).allocated_bytes == (343,)
    (curve,) = memory_over_time(table, one_each(2))
    assert [n_bytes for _, n_bytes in curve][-2:] == [324, 306]


def test_every_action_of_a_pipeline_waits_for_the_host():
    # each of two ranks does 4 x (2 + 2) and waits 4 x 2 x 1.5; the bubble is that of one micro-batch
    costs = (segment(forward_s=2, backward_s=2),) * 2
    estimate = simulate(table_of(costs, mesh=pipeline(2, 4), action_s=1.5), one_each(2))
    assert estimate.step_s == (4 + 1) * 2 * 3.5
    assert estimate.breakdown.launch_s == 4 * 2 * 1.5


def test_communication_does_not_go_on_while_an_action_waits_for_the_host():
    # the reduction of the only segment begins when its backward pass ends, and the optimizer waits for all of it
    costs = (segment(forward_s=2, backward_s=2, reduce_s=3),) * 2
    one, other = (simulate(table_of(costs, mesh=pipeline(2, 1), action_s=s), one_each(2)) for s in (0.0, 1.0))
    assert other.step_s == one.step_s + 4 * 1.0


def test_slowest_stage_sets_the_pace():
    # forward 1, 3, 1 s and backward 2, 6, 2 s, 4 micro-batches. Rank 1, from its first activation at 1 s on:
    # F0 [1, 4], F1 [4, 7], B0 [7, 13] (2B0 is done at 4 + 1 + 2 = 7), F2, B1, F3, B2, B3 without a pause: until
    # 1 + 4 x 9 = 37. Then 0B3 [37, 39].
    costs = [segment(forward_s=f, backward_s=2 * f) for f in (1, 3, 1)]
    estimate = simulate(table_of(costs, mesh=pipeline(3, 4)), one_each(3))
    assert estimate.step_s == 39
    assert (estimate.breakdown.compute_s, estimate.breakdown.bubble_s) == (4 * 3, 27)  # of rank 0, which ends last


def test_transfer_under_way_is_told_from_the_bubble():
    # 0F0 [0, 1], sent [1, 1.5], 1F0 [1.5, 2.5], 1B0 [2.5, 4.5], sent [4.5, 5], 0B0 [5, 7]
    table = table_of([segment(forward_s=1, backward_s=2)] * 2, mesh=pipeline(2, 1), cut_s=0.5)
    estimate = simulate(table, one_each(2))
    assert estimate.step_s == 7
    assert (estimate.breakdown.exposed_pp_s, estimate.breakdown.bubble_s) == (0.5, 3.5)


def test_sends_of_one_rank_follow_one_another():
    # gpipe, 2 micro-batches, transfer 3 s: activations leave at 1 and, as the link is busy until 4, at 4.
    # 1F0 [4, 5], 1F1 [7, 8], 1B0 [8, 10], sent [10, 13], 1B1 [10, 12], sent [13, 16], 0B0 [13, 15], 0B1 [16, 18]
    table = table_of([segment(forward_s=1, backward_s=2)] * 2, mesh=pipeline(2, 2, schedule="gpipe"), cut_s=3.0)
    estimate = simulate(table, one_each(2), with_timeline=True)
    sends = [(e.name, e.start_s, e.stop_s) for e in estimate.timeline if e.stream == "send activations"]
    assert sends == [("0F0", 1, 4), ("0F1", 4, 7)]
    assert estimate.step_s == 18


def test_stages_on_one_rank_exchange_nothing():
    mesh = pipeline(1, 2, schedule="interleaved", n_chunks=2)
    table = table_of([segment(forward_s=1, backward_s=2)] * 2, mesh=mesh, cut_s=100.0)
    assert simulate(table, one_each(2)).step_s == 12


def test_optimizer_waits_for_the_reductions_of_its_own_rank():
    # rank 1: 1F0 [1, 2], 1B0 [2, 4], reduce [4, 14], optimizer [14, 16]; rank 0: 0B0 [4, 6], no reduction, done at 8
    costs = [
        segment(forward_s=1, backward_s=2, optimizer_s=2),
        segment(forward_s=1, backward_s=2, optimizer_s=2, reduce_s=10),
    ]
    estimate = simulate(table_of(costs, mesh=pipeline(2, 1)), one_each(2))
    assert estimate.step_s == 16
    assert (estimate.breakdown.exposed_dp_s, estimate.breakdown.bubble_s) == (10, 1)


def test_reduction_of_one_stage_slows_the_next_stage_of_its_rank():
    # interleaved, 2 ranks, 2 micro-batches: stage 3 reduces for 2 s from the end of 3B1 on. 1B0 follows at once and
    # runs beside it: its 2 s take 4 s, and as rank 0 waits for it, the step takes 2 s longer.
    plain = segment(forward_s=1, backward_s=2)
    reducing = dataclasses.replace(plain, reduce_s=2)
    mesh = pipeline(2, 2, schedule="interleaved", n_chunks=2)
    before = simulate(table_of([plain] * 4, mesh=mesh), one_each(4))
    after = simulate(table_of([plain] * 3 + [reducing], mesh=mesh, slowdown=2.0), one_each(4), with_timeline=True)
    boxes = {event.name: (event.start_s, event.stop_s) for event in after.timeline if event.rank == 1}
    assert boxes["1B0"] == (boxes["3B1"][1], boxes["3B1"][1] + 4)
    assert boxes["reduce"] == boxes["1B0"]
    assert after.step_s == before.step_s + 2


def test_reduction_goes_on_at_full_speed_while_its_rank_waits():
    # rank 0: 0F0 [0, 10], 0F1 [10, 20], 0B0 [20, 22], 0F2 [22, 32]. Rank 1: 1F0 [10, 11], 1B0 [11, 13], waits until
    # 20. Of 8 s of reduction 7 are done by then; 1 s more runs beside 1F1, which takes 2 s at slowdown 2.
    # 1B1 [22, 24], its reduction is done at 32, just when 1F2 starts: that one takes 1 s.
    costs = [segment(forward_s=10, backward_s=2), segment(forward_s=1, backward_s=2, reduce_s=8)]
    table = table_of(costs, mesh=pipeline(2, 3), reduces=True, slowdown=2.0)
    timeline = simulate(table, one_each(2), with_timeline=True).timeline
    boxes = {event.name: (event.start_s, event.stop_s) for event in timeline if event.stream == "compute"}
    assert [boxes[name] for name in ("1F1", "1B1", "1F2", "1B2")] == [(20, 22), (22, 24), (32, 33), (33, 35)]
    reductions = [(event.start_s, event.stop_s) for event in timeline if event.stream == "communication"]
    assert reductions == [(13, 20), (20, 22), (24, 32), (35, 43)]


# ---------------------------------------------------------------------------------------------------- memory


def test_peak_memory_of_two_stages_by_hand():
    # 1f1b, 4 micro-batches: 2 in flight on rank 0, 1 on rank 1. Gradients accumulate, so all of them are held.
    # In each backward pass its last segment needs most, as then all activations are there:
    # rank 0: state 100 + 200, gradients 5 + 6, saved 2 x (10 + 20), working 8                     = 379
    # rank 1: state 300 + 400, gradients 7 + 8, saved 1 x (30 + 40), working 2                       = 787
    # reserved: 379 x 1.25 = 473.75 -> 474 and 787 x 1.25 = 983.75 -> 984; 50 more each
    costs = [
        segment(state_bytes=100, gradient_bytes=5, saved_bytes=10, working_bytes=7),
        segment(state_bytes=200, gradient_bytes=6, saved_bytes=20, working_bytes=8),
        segment(state_bytes=300, gradient_bytes=7, saved_bytes=30, working_bytes=9),
        segment(state_bytes=400, gradient_bytes=8, saved_bytes=40, working_bytes=2),
    ]
    table = table_of(costs, mesh=pipeline(2, 4), reserved_ratio=1.25, reserved_fixed_bytes=50)
    estimate = simulate(table, (StagePlan(0, 2), StagePlan(2, 4)))
    assert estimate.allocated_bytes == (379, 787)
    assert estimate.needed_bytes == (524, 1034)
    assert dict(estimate.memory_parts_bytes[1]) == {
        "state": 700,
        "workspaces": 0,
        "batches": 0,
        "gathered_parameters": 0,
        "gradients": 15,
        "saved_activations": 70,
        "messages": 0,
        "pending_gradients": 0,
        "working": 2,
        "fragmentation": 197,
        "context_and_communicators": 50,
    }


@given(st.integers(1, 6), st.integers(1, 8))
def test_saved_activations_are_those_of_the_micro_batches_in_flight(pp, n_micro_batches):
    costs = [segment(saved_bytes=1)] * pp
    one = simulate(table_of(costs, mesh=pipeline(pp, n_micro_batches)), one_each(pp))
    assert one.allocated_bytes == tuple(min(n_micro_batches, pp - rank) for rank in range(pp))
    all_of_them = simulate(table_of(costs, mesh=pipeline(pp, n_micro_batches, schedule="gpipe")), one_each(pp))
    assert all_of_them.allocated_bytes == (n_micro_batches,) * pp


def test_buffers_for_messages_are_there_for_every_micro_batch():
    # 1f1b, 3 micro-batches, messages of 5. Stage 0 receives 3 gradients and keeps 2 outputs until their backward pass;
    # stage 1 receives 3 inputs, and one gradient is still being sent
    table = table_of([FREE] * 2, mesh=pipeline(2, 3), message_bytes=(5,))
    assert simulate(table, one_each(2)).allocated_bytes == (25, 20)


def test_workspaces_are_allocated_all_the_time():
    (curve,) = memory_over_time(table_of([FREE], workspace_bytes=7), whole(1))
    assert {n_bytes for _, n_bytes in curve} == {7}


def test_a_gathered_segment_has_its_parameters_twice_in_forward_and_those_of_the_one_before_it_in_backward():
    # forward: received and copied, twice 5 = 10 at most; backward: 1 + 4 and so on, 9 at most
    costs = [segment(gathered_bytes=n_bytes) for n_bytes in (4, 1, 5, 4)]
    assert simulate(table_of(costs, gathers=True), whole(4)).allocated_bytes == (10,)
    in_backward = [dataclasses.replace(cost, reducing_bytes=2) for cost in costs]  # 4 + 5, beside the reduction of 0: 9
    assert simulate(table_of(in_backward, gathers=True), whole(4)).allocated_bytes == (10,)
    late = [*costs[:3], segment(gathered_bytes=4, late_gradient_bytes=3)]  # 5 + 1, and the late gradient 3: 9
    assert simulate(table_of(late, gathers=True), whole(4)).allocated_bytes == (10,)
    assert simulate(table_of(costs, keeps=True), whole(4)).allocated_bytes == (14,)
    assert simulate(table_of(costs[:1], gathers=True), whole(1)).allocated_bytes == (8,)


def test_gradients_of_the_first_pass_come_as_activations_go():
    # Backward takes the last segment first: 10 + 20 + 1, then 10 + 1 + its gradients 4, then gradients 4 + 30
    costs = [segment(saved_bytes=10, working_bytes=1, gradient_bytes=30)]
    costs.append(segment(saved_bytes=20, working_bytes=1, gradient_bytes=4))
    assert simulate(table_of(costs), whole(2)).allocated_bytes == (34,)
    # a second micro-batch finds all of them: 34 + 31
    assert simulate(table_of(costs, mesh=pipeline(1, 2)), whole(2)).allocated_bytes == (65,)


def test_the_input_of_a_reduction_is_kept_until_the_next_one():
    # while segment 0 runs backward: working 1, gradients of segment 1 reduced to 2, their reduction's input 8 = 11
    costs = [segment(working_bytes=1, gradient_bytes=2, reducing_bytes=8)] * 2
    assert simulate(table_of(costs), whole(2)).allocated_bytes == (11,)
    # a second micro-batch of ZeRO 2: working 1, both segments' gradients 2 x 2, the input 8
    assert simulate(table_of(costs, mesh=pipeline(1, 2), reduces=True), whole(2)).allocated_bytes == (13,)
    # the last input, 8 of segment 0, is freed before the next backward pass: 6 + 2 x 2 while segment 1 runs
    freed = [costs[0], segment(working_bytes=6, gradient_bytes=2, reducing_bytes=1)]
    assert simulate(table_of(freed, mesh=pipeline(1, 2), reduces=True), whole(2)).allocated_bytes == (10,)
    # accumulated gradients of 8 have no second input before the last pass; there, at segment 0: 1 + 8 + 2 + 8
    costs = [segment(working_bytes=1, gradient_bytes=8, reduced_bytes=2, reducing_bytes=8)] * 2
    assert simulate(table_of(costs, mesh=pipeline(1, 2)), whole(2)).allocated_bytes == (19,)


def test_what_is_outside_of_blocks_is_reduced_at_the_end_of_a_pass():
    # segments 0 and 2 are: gradients as computed 3 each, reduced 1 each, the reduction's input 6 each
    outer = segment(gradient_bytes=1, reduced_bytes=1, reducing_bytes=6, late_gradient_bytes=3)
    block = segment(gradient_bytes=2, reduced_bytes=2, reducing_bytes=5, saved_bytes=20)
    # at the end 2 + (6 + 6) + max(3 + 3, 1 + 1) = 20; while the block runs, 3 + 20
    assert simulate(table_of([outer, block, outer]), whole(3)).allocated_bytes == (23,)
    small = dataclasses.replace(block, saved_bytes=0)
    assert simulate(table_of([outer, small, outer]), whole(3)).allocated_bytes == (20,)


def test_interleaved_rank_holds_the_state_and_the_kept_parameters_of_all_its_stages():
    costs = [segment(state_bytes=n_bytes, gathered_bytes=100 * n_bytes) for n_bytes in (1, 2, 4, 8)]
    mesh = pipeline(2, 2, schedule="interleaved", n_chunks=2)
    assert simulate(table_of(costs, mesh=mesh, keeps=True), one_each(4)).allocated_bytes == (505, 1010)
    # gathered anew for each action, twice in forward: only the running stage's, of rank 0 at most 400, of rank 1 800
    assert simulate(table_of(costs, mesh=mesh, gathers=True), one_each(4)).allocated_bytes == (805, 1610)


def test_memory_falls_as_more_segments_are_recomputed():
    plain, again = segment(saved_bytes=10, working_bytes=3), segment(saved_bytes=2, working_bytes=5)
    table = table_of([(plain, again)] * 3, mesh=pipeline(1, 2))
    needed = [simulate(table, whole(3, recomputed=tuple(range(n)))).allocated_bytes[0] for n in range(4)]
    assert needed == [33, 25, 17, 11]  # 30 + 3, 22 + 3, 14 + 3, 6 + 5, while the last segment runs


def test_plan_fits_up_to_the_limit():
    table = table_of([segment(state_bytes=100)], reserved_fixed_bytes=20, memory_limit_bytes=120)
    assert simulate(table, whole(1)).fits
    assert not simulate(dataclasses.replace(table, memory_limit_bytes=119), whole(1)).fits


def test_memory_over_time_rises_and_falls_with_the_actions():
    # 2 micro-batches on one rank: F0 [0, 1], B0 [1, 3], F1 [3, 4], B1 [4, 6]; state 100, saved 10, working 1,
    # gradients 5 from the end of the first backward pass on
    cost = segment(forward_s=1, backward_s=2, state_bytes=100, saved_bytes=10, working_bytes=1, gradient_bytes=5)
    (curve,) = memory_over_time(table_of([cost], mesh=pipeline(1, 2)), whole(1))
    assert curve == (
        (0, 111), (1, 110), (1, 111), (3, 105), (3, 116), (4, 115), (4, 116), (6, 105),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ properties

quarters = st.integers(0, 12).map(lambda n: n / 4)
few_bytes = st.integers(0, 50)
segment_costs = st.builds(
    lambda *values: SegmentCost(*values[:15], weight_backward_s=values[1] * values[15], pending_bytes=values[16]),
    *[quarters] * 10,
    *[few_bytes] * 5,
    st.sampled_from([0.0, 0.25, 1.0]),
    few_bytes,
)


@st.composite
def plans(draw, max_pp=3):
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble_v"]))
    pp = draw(st.integers(1, max_pp))
    n_chunks = {"interleaved": draw(st.integers(2, 3)), "zero_bubble_v": 2}.get(schedule, 1)
    n_micro_batches = pp * draw(st.integers(1, 2)) if schedule == "interleaved" else draw(st.integers(1, 4))
    sizes = [draw(st.integers(1, 2)) for _ in range(pp * n_chunks)]
    costs = [(draw(segment_costs), draw(segment_costs)) for _ in range(sum(sizes))]
    stages = []
    for size in sizes:
        start = stages[-1].stop if stages else 0
        stages.append(StagePlan(start, start + size, tuple(range(start, start + draw(st.integers(0, size))))))
    table = table_of(
        costs,
        mesh=pipeline(pp, n_micro_batches, schedule=schedule, n_chunks=n_chunks),
        cut_s=draw(quarters),
        gathers=draw(st.booleans()),
        reduces=draw(st.booleans()),
        keeps=draw(st.booleans()),
        slowdown=draw(st.sampled_from([1.0, 1.25, 2.0])),
        per_step_s=draw(quarters),
        action_s=draw(quarters),
        reserved_ratio=draw(st.sampled_from([1.0, 1.1])),
        reserved_fixed_bytes=draw(few_bytes),
    )
    return table, tuple(stages)


@given(plans())
def test_breakdown_and_timeline_end_with_the_step(plan):
    estimate = simulate(*plan, with_timeline=True)
    assert estimate.breakdown.total_s == estimate.step_s
    assert max(event.stop_s for event in estimate.timeline) == pytest.approx(estimate.step_s)
    assert all(getattr(estimate.breakdown, field.name) >= 0 for field in dataclasses.fields(estimate.breakdown))


@given(plans())
def test_no_stream_does_two_things_at_once(plan):
    boxes = defaultdict(list)
    for event in simulate(*plan, with_timeline=True).timeline:
        boxes[event.rank, event.stream].append((event.start_s, event.stop_s))
    for events in boxes.values():
        ordered = sorted(events)
        assert all(first[1] <= second[0] + 1e-9 for first, second in zip(ordered, ordered[1:], strict=False))


@given(plans())
def test_estimate_is_the_same_twice_and_with_a_timeline(plan):
    assert simulate(*plan) == simulate(*plan) == simulate(*plan, with_timeline=True)


@given(plans())
def test_doubling_all_times_doubles_the_step(plan):
    table, stages = plan
    names = [field.name for field in dataclasses.fields(SegmentCost) if field.name.endswith("_s")]

    def doubled(cost):
        return dataclasses.replace(cost, **{name: 2 * getattr(cost, name) for name in names})

    twice = dataclasses.replace(
        table,
        costs=tuple(tuple(map(doubled, pair)) for pair in table.costs),
        cut_s=tuple(2 * cut_s for cut_s in table.cut_s),
        per_step_s=2 * table.per_step_s,
        action_s=2 * table.action_s,
    )
    assert simulate(twice, stages).step_s == 2 * simulate(table, stages).step_s
    assert simulate(twice, stages).needed_bytes == simulate(table, stages).needed_bytes


@given(plans())
def test_step_is_never_below_the_work_of_any_rank(plan):
    table, stages = plan
    mesh = table.mesh
    step_s = simulate(table, stages).step_s
    schedule = build_schedule(
        mesh.schedule, n_ranks=mesh.pp, n_micro_batches=mesh.n_micro_batches, n_chunks=mesh.n_chunks
    )
    ranks = stage_ranks(schedule)
    for rank in range(mesh.pp):
        costs = [
            table.cost_of(index, recomputed=index in stage.recomputed)
            for stage, owner in zip(stages, ranks, strict=True)
            if owner == rank
            for index in range(stage.start, stage.stop)
        ]
        names = ("forward_s", "backward_s", "recompute_s", "launch_forward_s", "launch_backward_s")
        work_s = sum(getattr(c, name) for c in costs for name in (*names, "tp_forward_s", "tp_backward_s"))
        assert step_s >= mesh.n_micro_batches * work_s + sum(c.optimizer_s for c in costs) + table.per_step_s - 1e-9


@given(plans())
def test_memory_parts_sum_to_reserved_and_the_curve_peaks_at_allocated(plan):
    estimate = simulate(*plan)
    assert [sum(n for _, n in parts) for parts in estimate.memory_parts_bytes] == list(estimate.needed_bytes)
    assert all(n >= 0 for parts in estimate.memory_parts_bytes for _, n in parts)
    curves = memory_over_time(*plan)
    assert tuple(max(n for _, n in curve) for curve in curves) == estimate.allocated_bytes
    for curve in curves:
        assert [time_s for time_s, _ in curve] == sorted(time_s for time_s, _ in curve)


@given(plans(max_pp=1))
def test_slowdown_never_makes_one_rank_faster(plan):
    table, stages = plan
    free = dataclasses.replace(table, overlap_slowdown=1.0)
    assert simulate(free, stages).step_s <= simulate(table, stages).step_s + 1e-9


# ---------------------------------------------------------------------------------------------- plans that are wrong


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
