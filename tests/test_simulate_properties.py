"""What holds of the simulated step of every plan, on drawn plans and figures."""

import dataclasses
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator_toys import NO_SLOWDOWN, pipeline, table_of

from autoplan.cost.table import SegmentCost
from autoplan.overlap import Overlap
from autoplan.parallel_plan import StagePlan
from autoplan.schedules import ordered_schedule, stage_ranks
from autoplan.simulator.simulate import memory_over_time, simulate

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
        overlap=draw(st.sampled_from([NO_SLOWDOWN, Overlap(0.25, 0.25), Overlap(0.75, 0.25), Overlap(0.0, 0.5)])),
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
    schedule = ordered_schedule(
        mesh.schedule, n_ranks=mesh.pp, n_micro_batches=mesh.n_micro_batches, n_chunks=mesh.n_chunks
    ).schedule
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
    free = dataclasses.replace(table, overlap=NO_SLOWDOWN)
    assert simulate(free, stages).step_s <= simulate(table, stages).step_s + 1e-9
