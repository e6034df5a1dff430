"""The simulator on toy figures: memory of the ranks of a step, by hand."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from simulator_toys import FREE, one_each, pipeline, segment, table_of, whole

from autoplan.parallel_plan import StagePlan
from autoplan.schedules import ordered_schedule
from autoplan.simulator.rank_memory import largest_moments
from autoplan.simulator.simulate import memory_over_time, simulate


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


def test_the_first_of_four_ranks_of_1f1b_may_peak_at_six_moments():
    # in passes that are alike, when the most micro-batches are in flight: 4; in its first pass and in its last one 1 is
    at, *_ = largest_moments(ordered_schedule("1f1b", n_ranks=4, n_micro_batches=20))
    in_flight = {moment.peak: moment.in_flight[0] for moment in at}
    assert len(at) == 6
    assert in_flight == {"opening": 1, "forward": 4, "first": 4, "following": 4, "later": 4, "last": 1}


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
    assert simulate(table_of(costs), whole(4)).allocated_bytes == (14,)
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
    # a second forward pass: until the loss the input of that reduction, 6 + 6; gradients 1 + 2 + 1, saved 20
    mesh = pipeline(1, 2)
    assert simulate(table_of([outer, block, outer], mesh=mesh, reduces=True), whole(3)).allocated_bytes == (36,)


def test_interleaved_rank_holds_the_state_and_the_kept_parameters_of_all_its_stages():
    costs = [segment(state_bytes=n_bytes, gathered_bytes=100 * n_bytes) for n_bytes in (1, 2, 4, 8)]
    mesh = pipeline(2, 2, schedule="interleaved", n_chunks=2)
    assert simulate(table_of(costs, mesh=mesh), one_each(4)).allocated_bytes == (505, 1010)
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
