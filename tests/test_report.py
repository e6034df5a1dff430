"""Reports: the text of one answer."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from autoplan.answers.answer import (
    Answer,
    Request,
    answer_to_dict,
    answer_to_json,
    chance_short,
)
from autoplan.hardware import hardware_names, load_hardware_profile
from autoplan.options import Options
from autoplan.parallel_plan import OUTSIDE_ALLOCATOR, Mesh, StagePlan
from autoplan.plain_text import text_table
from autoplan.report.explain import explain_report
from autoplan.report.hardware import hardware_sheet
from autoplan.report.plan import plan_report, plan_table, program_header, status_text
from autoplan.report.rivals import host_risk, rivals_text
from autoplan.report.stages import stages_text
from autoplan.units import GiB

HOSTILE = "</script><img src=x onerror=alert(1)>[red]{{7*7}}\x1b[31m"


def test_plan_report_marks_the_chosen_row_and_says_what_does_not_fit(answer: Answer) -> None:
    text = plan_report(answer)
    (chosen,) = [line for line in text.splitlines() if "<- chosen" in line]
    assert "1.6 s" in chosen and "12%" in chosen and "8.0" in chosen
    assert re.search(r"too big +- +12\.5 +DDP", text)
    assert "gap 0" in text
    plan = replace(answer.best.plan, loss="chunked")
    chunked = replace(answer, result=replace(answer.result, best=replace(answer.best, plan=plan)))
    assert "<- chosen, chunked" in " ".join(plan_report(chunked).split())


def test_unproved_plan_says_how_much_slower_it_may_be_and_what_ended_the_search(answer: Answer) -> None:
    # 1.6 s against a bound of 1.28 s: 1.6 / 1.28 - 1 = 25 %, where the gap is 1 - 1.28 / 1.6 = 20 %
    def text_of(stopped_by: str) -> str:
        result = replace(answer.result, status="feasible", bound_s=1.28, stopped_by=stopped_by)
        return plan_report(replace(answer, result=result))

    assert "at most 25.0% slower" in text_of("time limit") and "stopped at the time limit" in text_of("time limit")
    assert "bounds would not rise" in text_of("stalled")
    assert "stopped" not in text_of("stalled") and "stopped" not in text_of("")


def test_idle_devices_are_called_useless_only_with_a_proof_about_time(answer: Answer) -> None:
    wide = replace(answer, workload=replace(answer.workload, n_devices=6))
    cheap = replace(wide, workload=replace(wide.workload, objective="cost"))
    unproved = replace(wide, result=replace(wide.result, status="feasible"))
    assert "2 devices left idle: no faster plan uses them" in plan_report(wide)
    for other in (cheap, unproved):
        assert "2 devices left idle" in plan_report(other) and "no faster plan" not in plan_report(other)
    assert "no other plan of the space is cheaper" in plan_report(cheap)


def test_ops_without_a_rule_are_in_report_and_json(answer: Answer) -> None:
    odd = replace(answer, workload=replace(answer.workload, ops_without_rule=("aten.foo",)))
    assert "priced by bytes and never split, no rule: aten.foo" in plan_report(odd)
    assert answer_to_dict(odd)["ops_without_rule"] == ["aten.foo"]


def test_explain_gives_component_differences_and_baseline_shortfall(answer: Answer) -> None:
    text = explain_report(answer)
    # the next best differs by 0.9 - 0.5 = 0.4 s of bubble, and in nothing else
    assert re.search(r"bubble\s+500 ms\s+900 ms\s+\+400 ms", text)
    # 12.5 GiB needed, 10 GiB there
    assert "DDP: does not fit, by 2.5 GiB" in text
    # FSDP 3.2 s against 1.6 s
    assert "FSDP: 3.2 s a step, 100% slower" in text
    assert "2.00 x as fast as the best plain recipe that fits (FSDP)" in text


def test_reports_say_of_which_rank_the_times_are_and_what_state_each_has(answer: Answer) -> None:
    for text in (plan_report(answer), explain_report(answer)):
        assert "where the time goes, rank 1\n" in text
        # 8 GiB needed, 7 of them state
        assert re.search(r"rank +state +allocated.*\n-+\n +0 +4\.00 .*\n +1 +7\.00 +7\.00 +7\.00 +8\.00 ", text)
    assert re.search(r"slowest +rank 1 +rank 1\n", text)
    assert answer_to_dict(answer)["breakdown_of_rank"] == 1
    one_rank = {"allocated_bytes": (GiB,), "needed_bytes": (GiB,), "memory_parts_bytes": ((("state", GiB),),)}
    for change in ({"slowest_rank": None}, {"slowest_rank": 0, **one_rank}):
        best = replace(answer.best, estimate=replace(answer.best.estimate, **change))
        assert "where the time goes\n" in plan_report(replace(answer, result=replace(answer.result, best=best)))


def test_explain_shows_parts_of_memory_whose_digits_add_up_to_what_the_fullest_rank_needs(answer: Answer) -> None:
    # each part is 0.0004 GiB more than its digits: the third rounds up, 3.0012 - 2.0008 = 1.001, and all sums are right
    sizes = dict.fromkeys(("state", "gradients", "working"), GiB + 4 * GiB // 10_000)
    sizes |= {"messages": 0, "fragmentation": GiB // 2, OUTSIDE_ALLOCATOR: 3 * GiB}
    parts = tuple((part, sizes[part]) for part in ("state", "gradients", "messages", "working", "fragmentation"))
    parts = ((("state", GiB),), (*parts, (OUTSIDE_ALLOCATOR, sizes[OUTSIDE_ALLOCATOR])))
    needed = tuple(sum(size for _, size in own) for own in parts)
    estimate = replace(answer.best.estimate, memory_parts_bytes=parts, needed_bytes=needed)
    best = replace(answer.best, estimate=estimate)
    text = explain_report(replace(answer, result=replace(answer.result, best=best)))
    table = text.split("where the memory goes, rank 1 ")[1].split("\n\n")[0].splitlines()[2:]
    assert [line.rpartition("%")[0].rsplit(maxsplit=2)[:2] for line in table] == [
        ["state", "1.000"],
        ["gradients", "1.001"],
        ["working", "1.000"],
        ["= allocated", "3.001"],
        ["fragmentation", "0.500"],
        ["= reserved", "3.501"],
        ["context and communicators", "3.000"],
        ["= needed", "6.501"],
    ]


def test_explain_says_that_a_recipe_is_faster_than_a_plan_that_was_fixed(answer: Answer) -> None:
    # FSDP 3.2 s against 4 s: 20 % less; the plan is 3.2 / 4 = 0.80 times as fast
    best = replace(answer.best, estimate=replace(answer.best.estimate, step_s=4.0))
    text = explain_report(replace(answer, result=replace(answer.result, best=best)))
    assert "FSDP: 3.2 s a step, 20% faster" in text
    assert "0.80 x as fast as the best plain recipe that fits (FSDP)" in text


def test_infeasible_report_names_the_shortage_and_every_remedy_in_order(infeasible: Answer) -> None:
    text = plan_report(infeasible)
    assert "every plan lacks at least 86.20 GiB" in text
    assert "stage 0 needs 96.2 GiB, device has 10.0 GiB: 86.20 GiB short" in text
    first, second = (text.index(f"{item.change}: ") for item in infeasible.result.remedies)
    assert first < second
    assert "zero=3 instead of zero=1: 2.5 s a step, 9.0 GiB" in text
    assert "2 hosts instead of 1: 1.5 s a step, 8.0 GiB" in text


def test_statements_name_what_was_fixed(answer: Answer, infeasible: Answer) -> None:
    def asked(answer: Answer) -> Answer:
        options = Options(fix=(("tp", "1"), ("zero", "1")))
        return replace(answer, request=Request("toy.py", (), "toy_x4", 1, options))

    def text_of(answer: Answer) -> str:
        return " ".join(plan_report(asked(answer)).split())

    assert "no other plan with tp=1, zero=1 is faster" in text_of(answer)
    assert "than any other with tp=1, zero=1" in text_of(
        replace(answer, result=replace(answer.result, status="feasible"))
    )
    assert "no plan with tp=1, zero=1 fits" in text_of(infeasible)
    wide = replace(answer, workload=replace(answer.workload, n_devices=6))
    assert "2 devices left idle: no faster plan with tp=1, zero=1 uses them" in text_of(wide)
    assert "of the space" in plan_report(answer) and "of the space" not in text_of(answer)


def test_rejections_are_counted_in_plain_words(answer: Answer) -> None:
    text = explain_report(answer)
    assert "  1 too large for the memory\n  1 worked out, and slower\n" in text


def test_reports_fit_80_columns_without_colour_codes(answer: Answer, infeasible: Answer) -> None:
    reports = [plan_report(answer), explain_report(answer), plan_report(infeasible), explain_report(infeasible)]
    assert max(len(line) for text in reports for line in text.splitlines()) <= 80
    assert not any("\x1b" in text for text in reports)


def test_sources_and_headlines_wrap_at_80_and_lose_no_word(answer: Answer) -> None:
    source = (
        "fit: 111 runs of GPT 0.2 to 1.3 billion on one host (VIA-Research/vTrain @f8dda84), benchmarks/published.py"
    )
    pairs = (("device.launch", source), ("device.kernel", "a stopwatch"), ("device.peak.bf16", source))
    values = (("device.launch", "10.9 us"), ("device.peak.bf16", "312 TFLOP/s"))
    workload = replace(answer.workload, provenance=pairs, values=values, tokens_per_sample=123_456_789_012)
    for text in (plan_report(replace(answer, workload=workload)), explain_report(replace(answer, workload=workload))):
        assert max(map(len, text.splitlines())) <= 80
    # figures of one source stand together, before it; an unknown value is left out
    assert (
        "Sources\n\nfigure            value  unit\n--------------------------------\n"
        "device.launch      10.9  us\ndevice.peak.bf16    312  TFLOP/s\n"
        "    fit: 111 runs of GPT 0.2 to 1.3 billion on one host (VIA-Research/vTrain\n"
        "    @f8dda84), benchmarks/published.py\n"
        "device.kernel\n    a stopwatch\n"
    ) in text


@pytest.mark.parametrize("name", hardware_names())
def test_a_profile_and_its_sources_are_shown_in_80_columns(name: str) -> None:
    hardware = load_hardware_profile(name)
    text = hardware_sheet(hardware)
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    assert [figure for figure, _ in hardware.values] == [figure for figure, _ in hardware.sources]
    assert all(f"{figure} {value}" in words for figure, value in hardware.values)
    assert all(" ".join(source.split()) in words for _, source in hardware.sources)


def test_table_shows_markup_as_text_and_drops_control_characters() -> None:
    text = text_table(("name", "value"), [("[red]x[/red]", "a\x1b[31mb\nc")])
    assert "[red]x[/red]" in text
    assert "a [31mb c" in text


def test_table_wraps_its_last_column_at_80() -> None:
    text = text_table(("name", "value"), [("x", "word " * 40)])
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.count("word") == 40


def test_the_report_says_with_what_chance_memory_falls_short(answer: Answer) -> None:
    def shown(limit_bytes):
        estimate = replace(answer.best.estimate, segment_sources=("measured",), memory_limit_bytes=limit_bytes)
        return replace(answer, result=replace(answer.result, best=replace(answer.best, estimate=estimate)))

    most = max(answer.best.estimate.needed_bytes)
    full = shown(most)
    assert chance_short(full.best.estimate) == pytest.approx(0.5)
    assert rivals_text(full)[-1] == "memory falls short with a chance of 50%: measured peaks are off by 1.7%"
    assert json.loads(answer_to_json(full))["chance_short_of_memory"] == pytest.approx(0.5)
    assert 0.0 < chance_short(shown(round(1.01 * most)).best.estimate) < 0.5
    assert not any(line.startswith("memory") for line in rivals_text(shown(2 * most)))


def test_a_step_that_hardly_computes_is_said_to_wait_for_python(answer):
    busy = answer.best.estimate
    parts = replace(busy.breakdown, compute_s=0.1 * busy.step_s, recompute_s=0.0, optimizer_s=0.0)

    def shown(**changes: object) -> list[str]:
        waiting = replace(busy, breakdown=replace(parts, **changes))
        return host_risk(replace(answer.best, estimate=waiting))

    assert host_risk(answer.best) == []
    assert shown(launch_s=0.9 * busy.step_s) == [
        "computes in 10% of the step, and waits for Python: estimates are then off by 17%"
    ]
    assert shown(launch_s=0.2 * busy.step_s, bubble_s=0.7 * busy.step_s) == []  # it waits for other stages


def test_a_cuda_graph_is_said_to_wait_for_python_outside_of_its_passes(answer: Answer) -> None:
    graph = replace(answer.best.plan, mesh=replace(answer.best.plan.mesh, cuda_graph=True))
    busy = answer.best.estimate

    def in_graph(waits: float):
        parts = replace(busy.breakdown, launch_s=waits * busy.step_s)
        return replace(answer.best, plan=graph, estimate=replace(busy, breakdown=parts))

    assert host_risk(in_graph(0.4)) == []
    assert host_risk(in_graph(0.72)) == [
        "waits for Python in 72% of the step (in the optimizer and between steps), as long as its host takes"
    ]
    shown = replace(answer, result=replace(answer.result, best=in_graph(0.72)))
    assert "  launch: the device waits for Python, in the optimizer and between steps\n" in explain_report(shown)


def test_program_header_opens_with_the_launch_line(answer: Answer) -> None:
    header = program_header(answer, launch_line="torchrun --standalone --nproc-per-node 4 train.py")
    assert header.index("torchrun --standalone --nproc-per-node 4 train.py") < header.index("pipeline parallel")
    assert "1.6 s a step" in header


def test_a_pipeline_says_which_segments_each_stage_has_and_on_which_rank(answer: Answer) -> None:
    names = ("embed", "block.0", "block.1", "head")
    named = replace(answer, workload=replace(answer.workload, segment_names=names))
    text = " ".join(plan_report(named).split())
    assert "stage rank segments from and to" in text
    assert "0 0 2 embed to block.0 1 1 2 block.1 to head" in text
    between = replace(answer, workload=replace(answer.workload, segment_modules=("tok, pos", "", "", "norm, head")))
    text = " ".join(plan_report(between).split())
    assert "0 0 2 outer.0 (tok, pos) to blocks.0 1 1 2 blocks.1 to outer.1 (norm, head)" in text
    mesh = replace(answer.best.plan.mesh, schedule="zero_bubble_v", n_chunks=2)
    stages = tuple(StagePlan(index, index + 1) for index in range(4))
    best = replace(named.best, plan=replace(named.best.plan, mesh=mesh, stages=stages))
    v_shaped = stages_text(replace(named, result=replace(named.result, best=best)))
    assert " ".join(v_shaped.split()).endswith("0 0 1 embed 1 1 1 block.0 2 1 1 block.1 3 0 1 head")


def test_what_is_fixed_to_one_mesh_is_given_and_nothing_is_said_to_be_optimal(answer: Answer) -> None:
    options = Options(fix=(("dp", "2"), ("tp", "1")))
    request = Request("toy.py", (), "toy_x4", 1, options)
    one, several = (replace(answer, request=request, result=replace(answer.result, n_meshes=n)) for n in (1, 5))
    assert status_text(one) == "given: there is one combination with dp=2, tp=1, and this is its fastest plan"
    assert status_text(several).startswith("optimal: no other plan with dp=2, tp=1 is faster")


def test_a_plan_beyond_the_space_is_said_to_be(answer: Answer) -> None:
    mesh = replace(answer.best.plan.mesh, pp=2, n_chunks=8, schedule="interleaved")
    best = replace(answer.best, plan=replace(answer.best.plan, mesh=mesh))
    text = status_text(replace(answer, result=replace(answer.result, best=best)))
    assert "its 8 stages per rank are more than the space has" in text
    assert "than the space has" not in status_text(answer)


def test_a_long_word_in_the_last_column_stays_whole_on_a_line_below():
    table = text_table(("name", "note"), [("a" * 60, "<- channels_last, generated")], width=80)
    assert table.splitlines()[2:] == ["a" * 60 + "  <- channels_last,", " " * 62 + "generated"]
    table = text_table(("name", "note"), [("a" * 70, "channels_last"), ("b", "")], width=80)
    assert table.splitlines()[2:] == ["a" * 70, " " * 67 + "channels_last", "b"]


@pytest.mark.parametrize(
    ("model", "overrides", "is_said"),
    [("hf:config.json", (), True), ("hf:config.json", ("context=100",), False), ("gpt.py", (), False)],
)
def test_the_length_of_samples_is_said_where_nobody_chose_it(answer, model, overrides, is_said):
    asked = replace(answer, request=Request(model, overrides, "toy_x4", 1, Options(global_batch=8)))
    line = f"{answer.workload.tokens_per_sample} tokens a sample, the default; see --set context=N"
    assert (line in plan_report(asked)) == is_said


def test_the_mark_of_the_chosen_row_stays_whole_on_its_line(answer: Answer) -> None:
    # 3 + 2 + 2 + 4 + 7 + 11 + 10 + 7 + 4 + 5 columns of text and 10 gaps of 2 leave 5 of 80, gaps of 1 leave 15
    mesh = Mesh(dp=128, pp=2, micro_batch_size=16, n_micro_batches=2048, schedule="interleaved", n_chunks=3)
    mesh = replace(mesh, keeps_attention=True, zero_stage=1, zero_shard_degree=16)
    plan = replace(answer.best.plan, mesh=mesh, recompute="selective", loss="chunked")
    estimate = replace(answer.best.estimate, step_s=0.0325, needed_bytes=(100 * GiB, 100 * GiB))
    best = replace(answer.best, plan=plan, estimate=replace(estimate, memory_limit_bytes=128 * GiB))
    table = plan_table(replace(answer, result=replace(answer.result, best=best))).splitlines()
    assert table[2].startswith("128  1") and table[2].endswith("<- chosen,")
    assert table[3].strip() == "chunked" and max(map(len, table)) <= 80


def test_phrases_of_a_last_column_stay_whole_where_they_fit() -> None:
    row = ("a" * 60, "eager, 1 stage a rank, short")
    lines = text_table(("name", "note"), [row], phrases_of=10).splitlines()
    assert [line[60:].strip() for line in lines[2:]] == ["eager,", "1 stage a rank,", "short"]
    lines = text_table(("name", "note"), [row]).splitlines()
    assert [line[60:].strip() for line in lines[2:]] == ["eager, 1 stage a", "rank, short"]


def test_marks_of_the_table_are_explained_below_it(answer: Answer) -> None:
    # of the recipes DDP has ZeRO 0 and FSDP 3
    def rows_of(*fix: tuple[str, str]) -> str:
        request = Request("toy.py", (), "toy_x4", 1, Options(fix=fix))
        return plan_table(replace(answer, request=request, result=replace(answer.result, best=kept)))

    mesh = replace(answer.best.plan.mesh, keeps_attention=True)
    kept = replace(answer.best, plan=replace(answer.best.plan, mesh=mesh, recompute="selective"))
    assert "selective*" in rows_of() and "\n* attention kept: recomputed except" in rows_of()
    assert "attention" not in plan_table(answer) and "for comparison" not in rows_of()
    assert rows_of(("zero", "3"), ("compile", "off")).endswith("\nfor comparison, without zero=3, compile=off: DDP")
