"""Gathers that begin with the step, in pipelines whose parameters stay gathered: whole seconds and bytes."""

import dataclasses
import random

import numpy as np
import pytest
from brute_force import OVERLAPS
from hypothesis import given
from hypothesis import strategies as st
from test_simulate import HALF, NO_SLOWDOWN, one_each, pipeline, segment, table_of, tick

from autoplan.parallel_plan import StagePlan
from autoplan.search.relaxed_step import RelaxedStep
from autoplan.simulator.simulate import memory_over_time, simulate
from autoplan.simulator.stage_pass import SegmentPass, replay_first_forward


def layer(**figures):
    return segment(forward_s=4, backward_s=8, **figures)


def boxes_of(table, stages, *, rank):
    """Of one rank: (name, start, stop) of what it computes, and of what it gathers and reduces."""
    events = [event for event in simulate(table, stages, with_timeline=True).timeline if event.rank == rank]
    return [
        [(event.name, event.start_s, event.stop_s) for event in events if event.stream == stream]
        for stream in ("compute", "communication")
    ]


def test_a_rank_gathers_while_it_waits_for_its_first_input():
    # rank 0: gather [0, 3], 0F0 [3, 7]; rank 1 has gathered by then: 1F0 [7, 11], 1B0 [11, 19]; 0B0 [19, 27]
    table = table_of([layer(gather_s=3)] * 2, mesh=pipeline(2, 1))
    compute, communication = boxes_of(table, one_each(2), rank=1)
    assert compute[:2] == [("1F0", 7, 11), ("1B0", 11, 19)]
    assert communication == [("gather", 0, 3)]
    assert simulate(table, one_each(2)).step_s == 27


def test_under_zero_3_a_rank_gathers_when_its_input_is_there():
    # 3 s more on rank 1 before 1F0; backward, both ranks gather again: 27 + 3 + 3 + 3
    table = table_of([layer(gather_s=3)] * 2, mesh=pipeline(2, 1), gathers=True)
    assert simulate(table, one_each(2)).step_s == 36


def test_gathers_stop_while_a_transfer_arrives_and_what_is_left_is_exposed():
    # rank 0: gather [0, 1], 0F0 [1, 5], transfer [5, 7]. Rank 1 gathers 5 of 9 s by then, and 4 from 7 on.
    costs = [layer(gather_s=1), layer(gather_s=9)]
    table = table_of(costs, mesh=pipeline(2, 1), cut_s=2)
    compute, communication = boxes_of(table, one_each(2), rank=1)
    assert compute[0] == ("1F0", 7, 15)
    assert communication == [("gather", 0, 5), ("gather 1", 7, 11)]
    breakdown = simulate(table, one_each(2)).breakdown
    # on rank 0: its own gather of 1 s; it waits for 2 s of transfer back, and before for 2 + 4 + 4 + 8 s
    assert (breakdown.exposed_dp_s, breakdown.exposed_pp_s, breakdown.bubble_s) == (1, 2, 18)


def test_the_first_rank_gathers_for_its_later_stages_after_its_first_pass():
    # gather 0 [0, 3], 0F0 waits for it and ends at 7; of 0F1's 4 s three, beside the gather of stage 2, take 4.5
    mesh = pipeline(2, 2, schedule="interleaved", n_chunks=2)
    table = table_of([layer(gather_s=3)] * 4, mesh=mesh, overlap=HALF)
    compute, communication = boxes_of(table, one_each(4), rank=0)
    assert compute[:3] == [("0F0", 0, 7), ("0F1", 7, 12.5), ("2F0", 12.5, 16.5)]
    assert communication == [("gather 0", 0, 3), ("gather", 7, 11.5)]
    # rank 1 has gathered for both of its stages, 6 s, when its input arrives at 7
    assert boxes_of(table, one_each(4), rank=1)[1] == [("gather", 0, 6)]


def test_with_one_micro_batch_the_first_rank_gathers_for_a_later_stage_when_that_begins():
    # 0F0 [0, 7], on rank 1 1F0 [7, 11] and 2F0 [11, 15], gather 3 [15, 18], 3F0 until 22
    mesh = pipeline(2, 1, schedule="zero_bubble_v", n_chunks=2)
    compute, communication = boxes_of(table_of([layer(gather_s=3)] * 4, mesh=mesh), one_each(4), rank=0)
    assert compute[:2] == [("0F0", 0, 7), ("3F0", 15, 22)]
    assert communication == [("gather 0", 0, 3), ("gather 3", 15, 18)]


def test_what_is_outside_of_blocks_is_gathered_first():
    # rank 1 waits until 4; of 6 s two are left, for which its first block waits although its own gather takes 1 s
    costs = [layer(), layer(gather_s=1), layer(gather_s=5, late_gradient_bytes=1)]
    table = table_of(costs, mesh=pipeline(2, 1))
    compute, communication = boxes_of(table, (StagePlan(0, 1), StagePlan(1, 3)), rank=1)
    assert compute[0] == ("1F0", 4, 14)
    assert communication == [("gather", 0, 4), ("gather 1", 4, 6)]


def test_received_parameters_are_there_twice_while_a_block_copies_its_own():
    # rank 1, always: 3 x 10 gathered. In its first forward pass the third segment has two others' 2 x 1 of activations,
    # copies 10 more, and then computes with 1 of its own and 4 to work with; in a later one 3 + 4.
    cost = layer(gather_s=1, gathered_bytes=10, saved_bytes=1, working_bytes=4)
    table = table_of([cost] * 4, mesh=pipeline(2, 2))
    stages = (StagePlan(0, 1), StagePlan(1, 4))
    curve = dict(memory_over_time(table, stages)[1])
    first, later = (start_s for name, start_s, _ in boxes_of(table, stages, rank=1)[0] if name in ("1F0", "1F1"))
    assert curve[first] == 30 + 2 + 10
    assert curve[later] == 30 + 3 + 4
    # nothing is received where there is nobody to receive from
    alone = table_of([dataclasses.replace(cost, gather_s=0.0)] * 4, mesh=pipeline(2, 2))
    assert simulate(alone, stages).allocated_bytes[1] == 30 + 3 + 4


def ticks_of(work, *, done_s, later_s):
    """The same pass second by second, without slowdown, when so much was gathered before: (elapsed, left over)."""
    queue = [[place, item.gather_s] for place, item in enumerate(work)] + [["later", later_s]]
    for _ in range(done_s):
        tick(queue)
    elapsed = 0
    for place, item in enumerate(work):
        while queue[place][1] > 0:
            elapsed += tick(queue)
        for _ in range(item.busy_s):
            elapsed += tick(queue)
    return elapsed, sum(rest for _, rest in queue)


seconds = st.integers(0, 5)


@given(st.lists(st.builds(SegmentPass, seconds, seconds), min_size=1, max_size=5), seconds, st.integers(0, 30))
def test_a_first_forward_pass_agrees_with_a_replay_second_by_second(work, later_s, done_s):
    left_s = max(0, sum(item.gather_s for item in work) + later_s - done_s)
    times = replay_first_forward(tuple(work), overlap=NO_SLOWDOWN, left_s=left_s, later_s=later_s)
    assert (times.elapsed_s, times.left_s) == ticks_of(work, done_s=done_s, later_s=later_s)


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_of_one_stage_per_rank_knows_what_is_left_to_gather(seed):
    # gathers far slower than compute: every rank waits for its own, and the bound must see it
    rng = random.Random(seed)
    sizes = [rng.randint(1, 3) for _ in range(rng.randint(2, 4))]
    cost = segment(forward_s=rng.uniform(0.1, 1.0), backward_s=rng.uniform(0.1, 2.0), gather_s=rng.uniform(2.0, 5.0))
    mesh = pipeline(len(sizes), rng.randint(4, 6))
    table = table_of([cost] * sum(sizes), mesh=mesh, overlap=OVERLAPS[seed % len(OVERLAPS)])
    stops = np.cumsum(sizes)
    stages = tuple(StagePlan(int(stop) - size, int(stop)) for stop, size in zip(stops, sizes, strict=True))
    (least_s,) = RelaxedStep.of_cuts(table, recompute=None).least_s(np.array([sizes]), np.zeros((1, len(sizes))))
    assert least_s == pytest.approx(simulate(table, stages).step_s, rel=1e-9)
