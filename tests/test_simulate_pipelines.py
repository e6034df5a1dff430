"""The simulator on toy figures: pipelines, by hand."""

import dataclasses

import pytest
from simulator_toys import HALF, one_each, pipeline, segment, table_of

from autoplan.simulator.replay import replay_plan
from autoplan.simulator.simulate import memory_over_time, simulate


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
@pytest.mark.parametrize("pp", [2, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(pp, n_chunks):
    # 8 micro-batches, forward 4 s and backward 8 s per rank: 1f1b idles 12 (pp - 1) s
    n_stages = pp * n_chunks
    cost = segment(forward_s=4 / n_chunks, backward_s=8 / n_chunks)
    table = table_of([cost] * n_stages, mesh=pipeline(pp, 8, schedule="interleaved", n_chunks=n_chunks))
    estimate, bubble_s = simulate(table, one_each(n_stages)), 12 * (pp - 1) / n_chunks
    assert estimate.breakdown.bubble_s == bubble_s
    assert estimate.step_s == 8 * 12 + bubble_s
    # sending takes no time, so no rank waits for a transfer that is under way
    assert [clock.exposed_pp_s for clock in replay_plan(table, one_each(n_stages)).clocks] == [0.0] * pp


@pytest.mark.parametrize("n_micro_batches", [7, 8, 12])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_the_bubble_of_zero_bubble_v_is_one_pass_less_than_ranks(pp, n_micro_batches):
    # forward, input gradient and weight gradient 1 s each
    cost = segment(forward_s=1, backward_s=2, weight_backward_s=1)
    mesh = pipeline(pp, n_micro_batches, schedule="zero_bubble_v", n_chunks=2)
    estimate = simulate(table_of([cost] * 2 * pp, mesh=mesh), one_each(2 * pp))
    assert estimate.breakdown.bubble_s == pp - 1
    assert estimate.step_s == n_micro_batches * 6 + pp - 1


def test_a_result_waits_for_what_goes_the_same_way_before_it_and_for_the_receiving_rank_to_call_it():
    # Interleaved, 2 ranks, 4 micro-batches, F 1 s, transfers 6 s. 0F0 [0, 1], 1F0 [7, 8]; behind it rank 1 calls what
    # 0F1 gives: [8, 14]. What 1F0 gives goes the other way, [8, 14]: 2F0 [14, 15], what that gives [15, 21], 3F0
    # [21, 22]. Likewise 2F1 [21, 22], what it gives [22, 28]. Rank 0 goes on with 0F2 [22, 23], which rank 1 has called
    # behind 3F0; but the link is not free before 28.
    mesh = pipeline(2, 4, schedule="interleaved", n_chunks=2)
    table = table_of([segment(forward_s=1, backward_s=2)] * 4, mesh=mesh, cut_s=6)
    estimate = simulate(table, one_each(4), with_timeline=True)
    sends = {event.name: (event.start_s, event.stop_s) for event in estimate.timeline if "send" in event.stream}
    expected = {"0F0": (1, 7), "0F1": (8, 14), "1F0": (8, 14), "2F0": (15, 21), "2F1": (22, 28), "0F2": (28, 34)}
    assert {name: sends[name] for name in expected} == expected


def test_transfers_of_one_stage_a_rank_pass_while_ranks_compute_if_these_receive_ahead():
    # 2 ranks, 8 micro-batches, F 1 s, B 2 s, transfers 1 s. In front of a pass each costs its second, but those that go
    # both ways at once. Ahead, the second rank waits for the first one alone, [0, 2], and is busy for 24 s; then the
    # last gradient travels, and rank 0 has one pass left.
    costs = [segment(forward_s=1, backward_s=2)] * 2
    steps_s = {
        schedule: simulate(table_of(costs, mesh=pipeline(2, 8, schedule=schedule), cut_s=1), one_each(2)).step_s
        for schedule in ("gpipe", "1f1b", "interleaved")
    }
    assert steps_s["interleaved"] == 2 + 24 + 1 + 2
    assert steps_s["interleaved"] < min(steps_s["gpipe"], steps_s["1f1b"])


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


def test_the_breakdown_is_that_of_the_rank_it_names():
    # 0F0 [0, 1], 1F0 [1, 2], 1B0 [2, 4], 0B0 [4, 6]; rank 1 then has 5 s of optimizer, until 9, rank 0 none, until 6
    costs = [segment(forward_s=1, backward_s=2), segment(forward_s=1, backward_s=2, optimizer_s=5)]
    estimate = simulate(table_of(costs, mesh=pipeline(2, 1)), one_each(2))
    assert (estimate.slowest_rank, estimate.step_s) == (1, 9)
    parts = estimate.breakdown
    assert (parts.compute_s, parts.bubble_s, parts.optimizer_s) == (3, 1, 5)


def test_transfer_under_way_is_told_from_the_bubble():
    # 0F0 [0, 1], sent [1, 1.5], 1F0 [1.5, 2.5], 1B0 [2.5, 4.5], sent [4.5, 5], 0B0 [5, 7]
    table = table_of([segment(forward_s=1, backward_s=2)] * 2, mesh=pipeline(2, 1), cut_s=0.5)
    estimate = simulate(table, one_each(2))
    assert estimate.step_s == 7
    assert (estimate.breakdown.exposed_pp_s, estimate.breakdown.bubble_s) == (0.5, 3.5)


def test_a_result_leaves_when_the_rank_that_receives_it_is_free():
    # gpipe, 2 micro-batches, transfer 3 s: 0F0 [0, 1], 0F1 [1, 2]; 1F0 [4, 5], so the second activation leaves at 5.
    # 1F1 [8, 9], 1B0 [9, 11], sent [11, 14], 1B1 [11, 13], 0B0 [14, 16], sent [16, 19], 0B1 [19, 21]
    table = table_of([segment(forward_s=1, backward_s=2)] * 2, mesh=pipeline(2, 2, schedule="gpipe"), cut_s=3.0)
    estimate = simulate(table, one_each(2), with_timeline=True)
    sends = [(e.name, e.start_s, e.stop_s) for e in estimate.timeline if e.stream == "send activations"]
    assert sends == [("0F0", 1, 4), ("0F1", 5, 8)]
    assert estimate.step_s == 21


def test_results_of_a_sendrecv_travel_at_once_and_both_ranks_wait():
    # 1f1b, 2 ranks, 3 micro-batches, transfer 1 s, 1.5 s beside one in the other direction.
    # 0F0 [0, 1], sent [1, 2], 1F0 [2, 3], 1B0 [3, 5]; 0F1 [1, 2] and that in a sendrecv [5, 6.5]:
    # 0B0 [6.5, 8.5], 1F1 [6.5, 7.5], 1B1 [7.5, 9.5]; 0F2 [8.5, 9.5], sendrecv [9.5, 11]: 0B1 [11, 13], 1F2 [11, 12],
    # 1B2 [12, 14], sent [14, 15], 0B2 [15, 17]
    table = table_of([segment(forward_s=1, backward_s=2)] * 2, mesh=pipeline(2, 3), cut_s=1.0)
    estimate = simulate(dataclasses.replace(table, sendrecv_s=(1.5,)), one_each(2), with_timeline=True)
    boxes = {event.name: (event.start_s, event.stop_s) for event in estimate.timeline if event.stream == "compute"}
    assert {name: boxes[name] for name in ("0B0", "1F1", "0B1", "1F2", "0B2")} == {
        "0B0": (6.5, 8.5), "1F1": (6.5, 7.5), "0B1": (11, 13), "1F2": (11, 12), "0B2": (15, 17)
    }  # fmt: skip
    assert estimate.step_s == 17
    assert (estimate.breakdown.exposed_pp_s, estimate.breakdown.bubble_s) == (1.5 + 1.5 + 1, 3 + 0 + 1)


def test_stages_on_one_rank_send_nothing():
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
    # runs beside it: its 2 s take 3 s, and as rank 0 waits for it, the step takes 1 s longer.
    plain = segment(forward_s=1, backward_s=2)
    reducing = dataclasses.replace(plain, reduce_s=2)
    mesh = pipeline(2, 2, schedule="interleaved", n_chunks=2)
    before = simulate(table_of([plain] * 4, mesh=mesh), one_each(4))
    after = simulate(table_of([plain] * 3 + [reducing], mesh=mesh, overlap=HALF), one_each(4), with_timeline=True)
    boxes = {event.name: (event.start_s, event.stop_s) for event in after.timeline if event.rank == 1}
    assert boxes["1B0"] == (boxes["3B1"][1], boxes["3B1"][1] + 3)
    assert boxes["reduce"] == boxes["1B0"]
    assert after.step_s == before.step_s + 1


def test_reduction_goes_on_at_full_speed_while_its_rank_waits():
    # rank 0: 0F0 [0, 10], 0F1 [10, 20], 0B0 [20, 22], 0F2 [22, 32]. Rank 1: 1F0 [10, 11], 1B0 [11, 13], waits until
    # 20. Of 8 s of reduction 7 are done by then; 1 s more runs beside 1F1, which takes 1.5 s.
    # 1B1 [21.5, 23.5], its reduction is done at 31.5, before 1F2 starts: that one takes 1 s.
    costs = [segment(forward_s=10, backward_s=2), segment(forward_s=1, backward_s=2, reduce_s=8)]
    table = table_of(costs, mesh=pipeline(2, 3), reduces=True, overlap=HALF)
    timeline = simulate(table, one_each(2), with_timeline=True).timeline
    boxes = {event.name: (event.start_s, event.stop_s) for event in timeline if event.stream == "compute"}
    assert [boxes[name] for name in ("1F1", "1B1", "1F2", "1B2")] == [(20, 21.5), (21.5, 23.5), (32, 33), (33, 35)]
    reductions = [(event.start_s, event.stop_s) for event in timeline if event.stream == "communication"]
    assert reductions == [(13, 20), (20, 21.5), (23.5, 31.5), (35, 43)]
