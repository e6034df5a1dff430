"""Measured profiles: compiled blocks, and the loss."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import median

import pytest
from profile_rows import (
    BATCHES,
    DEGREES,
    MLP,
    rows_of_one_stage,
    segment_rows,
    tables,
    whole_plan,
)

from autoplan import api
from autoplan.answers.answer import answer_from_json, answer_to_json
from autoplan.errors import UsageError
from autoplan.graph import GraphFacts
from autoplan.measure_model.run import run_measurements
from autoplan.measured_profile.segment_key import content_key
from autoplan.measured_profile.segment_times import parse_measured_profile
from autoplan.parallel_plan import Execution
from autoplan.processes import start_process
from autoplan.report.measured_profile import results_table
from autoplan.report.plan import plan_report
from autoplan.space.priced import price_plan

pytest_plugins = ["profile_fixtures"]


def compiled_options(problem, *fix):
    return replace(problem, options=replace(problem.options, fix=(("pp", "1"), *fix)))


def best_plan(problem, *fix):
    return api.solve(compiled_options(problem, *fix)).best.plan


def compiled_at_no_time(problem):
    """The same measurements, but whatever runs compiled takes no time."""
    at_once = {"forward_s": 0.0, "backward_s": 0.0, "host_forward_s": 0.0, "host_backward_s": 0.0}
    rows = tuple(replace(row, **at_once) if row.execution.compile else row for row in problem.measured.segments)
    return replace(problem, measured=replace(problem.measured, segments=rows))


def test_blocks_and_the_loss_are_measured_compiled_and_nothing_else(measured) -> None:
    for degree in DEGREES:
        for size in BATCHES:
            rows = segment_rows(measured.rows, tp=degree, micro_batch_size=size, compiled=True)
            assert sorted(row["segment"] for row in rows) == ["blocks.0", "outer.1"]
            assert all(row["forward_s"] > 0 and row["backward_s"] > 0 and row["saved_bytes"] > 0 for row in rows)


def test_a_compiled_plan_takes_the_compiled_seconds_of_blocks_and_loss_and_the_eager_ones_of_the_rest(
    problem, measured
) -> None:
    table = price_plan(problem.graph, problem.hardware, whole_plan(problem, 2, compile=True), measured=problem.measured)
    for kind, segment in problem.graph.first_of_kind().items():
        is_compiled = segment.name != "outer.0"
        (row,) = rows_of_one_stage(measured.rows, segment, micro_batch_size=2, compiled=is_compiled)
        cost = table.costs[kind][0]
        assert (cost.forward_s, cost.backward_s, cost.saved_bytes) == tuple(
            row[name] for name in ("forward_s", "backward_s", "saved_bytes")
        )
    assert set(table.sources) == {"measured"}


def test_a_compiled_block_that_was_not_measured_takes_the_correction_of_what_was_compiled(problem) -> None:
    # only the loss segment is known compiled: its ratio, not that of eager segments, corrects the block
    first, facts = problem.graph.first_of_kind(), GraphFacts.of(problem.graph)
    key = {segment.name: content_key(problem.graph, facts, segment) for segment in first.values()}
    kind = {segment.name: number for number, segment in first.items()}
    rows = tuple(
        row for row in problem.measured.segments if not (row.execution.compile and row.content == key["blocks.0"])
    )
    known = replace(problem.measured, segments=rows)
    table = price_plan(problem.graph, problem.hardware, whole_plan(problem, compile=True), measured=known)
    (loss_1, loss_2) = (row for row in rows if row.execution.compile and row.tp == 1)
    computed = {size: tables(problem, size)[1].costs[kind["outer.1"]][0].forward_s for size in BATCHES}
    at_tp_1 = [row.forward_s / computed[row.micro_batch_size] for row in (loss_1, loss_2)]
    block_s = table.costs[kind["blocks.0"]][0].forward_s / tables(problem)[1].costs[kind["blocks.0"]][0].forward_s
    assert table.sources == ("measured", "calibrated", "measured")
    assert block_s == pytest.approx(median(at_tp_1))


def test_what_is_fixed_of_compile_reaches_the_plan_and_its_program(problem) -> None:
    for value in ("on", "off"):
        asked = compiled_options(problem, ("compile", value))
        answer = api.solve(asked)
        is_on = value == "on"
        assert answer.best.plan.mesh.compile is is_on
        assert f"compile={is_on}," in api.program_files(asked, answer)["train.py"]
        assert json.loads(answer_to_json(answer))["plan"]["compile"] is is_on
        assert (", compiled" in plan_report(answer)) is is_on
        assert answer_from_json(answer_to_json(answer)).best.plan == answer.best.plan


def test_a_search_compiles_where_that_was_measured_to_be_faster(problem) -> None:
    faster = compiled_at_no_time(problem)
    eager_only = replace(problem, measured=replace(problem.measured, segments=problem.measured.rows({})))
    assert best_plan(faster).mesh.compile
    assert not best_plan(faster, ("compile", "off")).mesh.compile
    assert not best_plan(eager_only).mesh.compile


def test_compiling_has_no_price_beside_what_was_measured_eager(problem) -> None:
    asked = replace(problem, measured=replace(problem.measured, segments=problem.measured.rows({})))
    with pytest.raises(UsageError, match="fix compile=on: found .*measured compiled"):
        best_plan(asked, ("compile", "on"))
    size = problem.options.global_batch
    plan = replace(whole_plan(problem, size, compile=True), graph_hash=problem.graph.content_hash())
    with pytest.raises(UsageError, match="mesh.compile: found"):
        api.score(asked, plan)
    assert api.score(replace(problem, measured=None), plan).best.plan.mesh.compile


def test_a_segment_that_does_not_compile_leaves_a_line_and_only_eager_plans(problem, measured) -> None:
    row = segment_rows(measured.rows, segment="blocks.0", tp=2, micro_batch_size=2, compiled=True)[0]
    failed = {key: row[key] for key in row if key not in ("forward_s", "backward_s", "saved_bytes")}
    failed |= {"status": "not compiled", "why": "no"}
    assert "not compiled" in results_table([failed])
    facts = GraphFacts.of(problem.graph)
    contents = {content_key(problem.graph, facts, segment) for segment in problem.graph.segments}
    text = "\n".join(json.dumps(failed if other is row else other) for other in measured.rows)
    known = parse_measured_profile(text, where="m", device="CPU", precision="fp32", contents=contents, model="gpt.py")
    assert [(row.segment, row.tp, row.execution.compile) for row in known.failed] == [("blocks.0", 2, True)]
    asked = compiled_at_no_time(replace(problem, measured=known))
    assert not best_plan(asked).mesh.compile
    assert best_plan(asked, ("compile", "on"), ("tp", "1")).mesh.compile
    with pytest.raises(UsageError, match=r"failed on blocks.0 \(tp 2\)"):
        best_plan(asked, ("compile", "on"))


@pytest.mark.nightly
def test_a_failing_compiler_does_not_stop_the_rest(hw, tmp_path) -> None:
    overrides = {"width": 8, "depth": 1}
    files = api.measurement_folder(
        MLP, hw=hw, overrides=overrides, degrees=(1,), micro_batch_sizes=(1,), precision="fp32", compile="both"
    )
    rows = run_measurements(
        files,
        out=tmp_path / "m.json",
        device="cpu",
        start=lambda command: start_process([*command, "--seconds", "0.005", "--backend", "no_such_backend"]),
    )
    segments = [row for row in rows if row["what"] == "segment"]
    compiled = {(row["module"], row["status"]) for row in segments if row["compiled"]}
    eager = {row["status"] for row in segments if not row["compiled"]}
    assert compiled == {("generated", "not compiled"), ("own", "not run")} and eager <= {"measured", "noisy"}
    assert all(row["why"] for row in rows if row["status"] in ("not compiled", "not run"))


def test_lines_from_before_compiling_and_own_modules_were_measured_are_eager_and_generated(problem, measured) -> None:
    facts = GraphFacts.of(problem.graph)
    contents = {content_key(problem.graph, facts, segment) for segment in problem.graph.segments}
    names = ("compiled", "memory_format", "module")
    rows = [{key: row[key] for key in row if key not in names} for row in segment_rows(measured.rows)]
    text = "\n".join(map(json.dumps, rows))
    found = parse_measured_profile(text, where="m", device="CPU", precision="fp32", contents=contents, model="gpt.py")
    assert len(found.segments) == len(rows) and found.executions == {Execution()}
    assert not any(row.is_own for row in found.segments) and found.rows({}, keeps_modules=True) == found.segments
