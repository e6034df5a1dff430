"""Measured profiles: plans take exactly what was measured, or what follows from it, and say so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from profile_rows import (
    BATCHES,
    GPT,
    SIZES,
    rows_of_one_stage,
    segment_rows,
    tables,
    whole_plan,
)

from autoplan import api
from autoplan.answers.answer import answer_from_json, answer_to_json, step_interval_s
from autoplan.graph import GraphFacts
from autoplan.measured_profile.segment_key import WHOLE, assignment_key, content_key
from autoplan.measured_profile.segment_times import MeasuredProfile, SegmentTime
from autoplan.parallel_plan import Mesh, StagePlan
from autoplan.report.plan import plan_report
from autoplan.space.priced import price_plan, priced_space

pytest_plugins = ["profile_fixtures"]

# ---------------------------------------------------------------- prices


@pytest.mark.parametrize("size", BATCHES)
def test_a_plan_takes_exactly_the_measured_seconds(problem, measured, size, monkeypatch) -> None:
    monkeypatch.setattr("autoplan.cost.segment_cost.KEPT_TENSOR_HOST_S", 0.0)  # longer than these blocks take
    table, _ = tables(problem, size)
    for kind, segment in problem.graph.first_of_kind().items():
        (row,) = rows_of_one_stage(measured.rows, segment, micro_batch_size=size)
        cost = table.costs[kind][0]
        assert (cost.forward_s, cost.backward_s, cost.saved_bytes) == (
            row["forward_s"],
            row["backward_s"],
            row["saved_bytes"],
        )
        if segment.is_block:
            assert 0 < table.costs[kind][1].recompute_s < row["forward_s"]  # its last product does not run again
    assert set(table.sources) == {"measured"}


def test_in_a_graph_a_plan_takes_what_blocks_took_in_one(problem) -> None:
    def priced(**times):
        rows = (replace(row, **{name: factor * row.forward_s for name, factor in times.items()}) for row in rows_of)
        known = replace(problem.measured, segments=tuple(rows))
        plan = whole_plan(problem, cuda_graph=True)
        table = price_plan(problem.graph, problem.hardware, plan, measured=known)
        kind = next(segment.kind for segment in problem.graph.segments if segment.is_block)
        return table.costs[kind]

    rows_of = problem.measured.segments
    (as_in_stream, _), (halved, recomputed) = priced(), priced(graph_forward_s=0.5, graph_backward_s=0.25)
    backward_s = 0.25 * as_in_stream.forward_s
    assert (halved.forward_s, halved.backward_s) == pytest.approx((0.5 * as_in_stream.forward_s, backward_s))
    assert 0 < recomputed.recompute_s < halved.forward_s
    assert priced(graph_forward_s=2.0, graph_backward_s=1e3)[0] == as_in_stream  # a graph adds no time


def test_the_optimizer_takes_the_measured_time_per_element(problem) -> None:
    # one device, float32: nothing is packed or reduced, so the step is elements x time per element
    per_element_s = next(row["per_element_s"] for row in problem_rows(problem) if row["what"] == "optimizer")
    table, _ = tables(problem)
    total_s = sum(table.costs[kind][0].optimizer_s for kind in table.kinds)
    assert total_s == pytest.approx(per_element_s * problem.graph.n_parameters())


def problem_rows(problem):
    return [json.loads(line) for line in Path(problem.options.profile).read_text().splitlines()]


def test_a_tensor_parallel_plan_uses_what_was_measured_for_its_assignment(problem, measured) -> None:
    offered = priced_space(problem.graph, problem.hardware, problem.options, global_batch=8, measured=problem.measured)
    sharding = dict(offered.space.shardings)[2][0]
    mesh = Mesh(tp=2, sharding=sharding, micro_batch_size=2)
    plan = offered.make_plan(mesh, (StagePlan(0, len(problem.graph.segments)),))
    assignments = {assignment.kind: assignment for assignment in plan.shardings}
    table = offered.price(mesh)
    for kind, segment in problem.graph.first_of_kind().items():
        key = assignment_key(problem.graph, segment, assignments[kind])
        rows = segment_rows(measured.rows, segment=segment.name, assignment=key, micro_batch_size=2)
        assert [row["forward_s"] for row in rows] == [table.costs[kind][0].forward_s]
    again = price_plan(problem.graph, problem.hardware, plan, measured=problem.measured)
    assert [whole for whole, _ in table.costs] == [whole for whole, _ in again.costs]


def test_another_micro_batch_is_scaled_from_the_nearest_measured_one(problem, measured) -> None:
    # 8 samples: computed(8) x measured(2) / computed(2), because 2 is nearer to 8 than 1 is
    (table, computed), (_, computed_2) = tables(problem, 8), tables(problem, 2)
    for kind, segment in problem.graph.first_of_kind().items():
        (row,) = rows_of_one_stage(measured.rows, segment, micro_batch_size=2)
        ratio = row["backward_s"] / computed_2.costs[kind][0].backward_s
        assert table.costs[kind][0].backward_s == pytest.approx(computed.costs[kind][0].backward_s * ratio)
    block = next(kind for kind, segment in problem.graph.first_of_kind().items() if segment.is_block)
    (row,) = segment_rows(measured.rows, segment="blocks.0", tp=1, micro_batch_size=2, module="own")
    assert table.costs[block][0].saved_bytes == 4 * row["saved_bytes"]
    assert set(table.sources) == {"scaled"}


def test_of_what_was_not_measured_the_host_takes_the_median_correction(problem) -> None:
    # only the block is measured, eagerly: its ratio corrects the host of the other segments, and no time of the device
    facts, first = GraphFacts.of(problem.graph), problem.graph.first_of_kind()
    block = next(kind for kind, segment in first.items() if segment.is_block)
    content = content_key(problem.graph, facts, first[block])
    eager = [row for row in problem.measured.segments if not row.execution.compile]
    only = [row for row in eager if row.content == content and row.assignment == WHOLE and row.is_own]
    slow = tuple(replace(row, host_forward_s=1.0) for row in only)
    problem = replace(
        problem, hardware=replace(problem.hardware, device=replace(problem.hardware.device, launch_s=1e-6))
    )
    table, computed = tables(replace(problem, measured=replace(problem.measured, segments=tuple(only))))
    waiting, _ = tables(replace(problem, measured=replace(problem.measured, segments=slow)))
    for kind in first:
        if kind != block:
            assert table.costs[kind][0].forward_s == waiting.costs[kind][0].forward_s
            assert table.costs[kind][0].forward_s == computed.costs[kind][0].forward_s
            assert table.costs[kind][0].saved_bytes == computed.costs[kind][0].saved_bytes
            assert waiting.costs[kind][0].launch_forward_s > 0.1 > table.costs[kind][0].launch_forward_s
    assert sorted(table.sources) == ["calibrated", "calibrated", "measured"]


def test_an_assignment_that_was_not_measured_takes_the_correction_of_its_degree(problem, measured) -> None:
    rows = tuple(replace(row, assignment="another") if row.tp == 2 else row for row in problem.measured.rows({}))
    changed = replace(problem.measured, segments=rows)
    mesh = Mesh(tp=2, sharding=segment_rows(measured.rows, tp=2)[0]["boundary"], micro_batch_size=2)
    prices = [
        priced_space(problem.graph, problem.hardware, problem.options, global_batch=8, measured=measured).price(mesh)
        for measured in (problem.measured, changed)
    ]
    assert {prices[0].sources, prices[1].sources} == {("measured",) * 3, ("scaled",) * 3}
    for (known, *_), (scaled, *_) in zip(prices[0].costs, prices[1].costs, strict=True):
        assert scaled.forward_s == pytest.approx(
            known.forward_s
        )  # the same micro-batch: computed x measured / computed


def test_host_time_counts_where_it_is_longer_than_the_device(problem) -> None:
    # device 3 ms forward, host 5 ms: 2 ms of launch; backward device 9 ms, host 4 ms: none
    facts = GraphFacts.of(problem.graph)
    rows = tuple(
        SegmentTime(content_key(problem.graph, facts, segment), WHOLE, 1, "", 1, 3e-3, 9e-3, 5e-3, 4e-3, 1000, 500)
        for segment in problem.graph.first_of_kind().values()
    )
    problem = replace(problem, measured=MeasuredProfile(rows, None, "toy"))
    precision = problem.options.precision
    sizes = {parameter.name: parameter.spec.n_bytes(1, precision) for parameter in problem.graph.parameters}
    segments = problem.graph.first_of_kind().values()
    for segment, (plain, *_) in zip(segments, tables(problem)[0].costs, strict=True):
        assert plain.launch_forward_s == pytest.approx(2e-3) and plain.launch_backward_s == 0.0
        assert plain.saved_bytes == 1000
        assert plain.working_bytes == 500 + sum(sizes[name] for name in segment.parameters)  # gradients of weights


def test_keys_do_not_depend_on_depth_but_on_width() -> None:
    def block_key(**sizes):
        graph = api.trace_model(GPT, overrides=SIZES | sizes)
        segment = next(s for s in graph.segments if s.is_block)
        return content_key(graph, GraphFacts.of(graph), segment)

    assert block_key() == block_key(n_layers=3)
    assert block_key() != block_key(width=64)


# ---------------------------------------------------------------- answers


def test_the_answer_says_how_the_times_were_found(problem) -> None:
    answer = api.score(problem, api.solve(problem).best.plan)
    sources = answer.best.estimate.segment_sources
    assert len(sources) == len(problem.graph.segments)
    text, values = plan_report(answer), json.loads(answer_to_json(answer))
    assert "segments: " in text and all(f"{sources.count(source)} {source}" in text for source in set(sources))
    assert values["segment_sources"] == dict(zip(answer.workload.segment_names, sources, strict=True))
    assert "measured.json: CPU, torch" in values["provenance"]["times of segments"]
    assert answer_from_json(answer_to_json(answer)).best.estimate.segment_sources == sources


def test_the_interval_is_the_narrower_the_more_was_measured(answer) -> None:
    busy = replace(answer.best.estimate.breakdown, launch_s=0.0)  # where the host decides, a profile does not narrow it

    def width(*sources):
        estimate = replace(answer.best.estimate, segment_sources=sources, breakdown=busy)
        low_s, high_s = step_interval_s(replace(answer.best, estimate=estimate))
        return high_s - low_s

    assert width("measured", "measured") <= width("measured", "scaled") < width("calibrated", "scaled") <= width()
