"""The page of a plan: what it says, the rows beside it, and how large it may be."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import make_candidate, make_estimate
from page_toys import MEMORY, SENSITIVITY, Page
from whatif_toys import PARTS

from autoplan.answers.answer import Answer
from autoplan.cli import run
from autoplan.files import write_folder
from autoplan.html_report import chart_files, plan_page
from autoplan.html_report.plan_charts import plan_charts
from autoplan.html_report.timeline import MemoryCurve
from autoplan.output.folder import report_files
from autoplan.parallel_plan import GroupRanks, Mesh, StagePlan, TimelineEvent
from autoplan.search.result import Rejection
from autoplan.units import GiB

# -------------------------------------------------------------------------------------------------------- what it says


def test_page_shows_the_figures_of_the_plan(answer: Answer) -> None:
    text = Page(plan_page(answer)).text
    # 1.6 s; 8 samples x 100 tokens / 1.6 s = 500 tokens/s; MFU 12.5 %; 8 of 10 GiB on pipeline rank 1
    for figure in ("1.6 s", "500 tokens/s", "12%", "8.0 GiB", "pipeline rank 1; 2.0 GiB left of 10.0"):
        assert figure in text
    # a billion tokens: 1e9 / 500 = 2e6 s = 555.6 h on 4 devices at 2 USD
    assert "4,444 USD" in text


def test_every_headline_and_every_chart_says_what_its_numbers_rest_on(answer: Answer) -> None:
    page = plan_page(answer, memory=MEMORY, sensitivity=SENSITIVITY)
    cards = re.findall(r'<div class="card">.*?</div>', page, re.DOTALL)
    assert len(cards) == 6
    assert all('class="kind ' in card for card in cards)
    for name in ("step", "time", "memory", "candidates", "sensitivity"):
        heading = re.search(rf'<h2 id="{name}">.*?</h2>', page)
        assert heading is not None and 'class="kind computed"' in heading[0]
    measured = make_estimate()
    measured = replace(measured, segment_sources=("measured",) * 4)
    page = plan_page(replace(answer, result=replace(answer.result, best=make_candidate(estimate=measured))))
    assert '<h2 id="time">Where the step goes <span class="kind measured"' in page


def test_page_says_of_which_rank_its_times_are(answer: Answer) -> None:
    assert "The chosen plan; pipeline rank 1, the slowest." in plan_page(answer)


def test_page_without_a_plan_gives_the_shortage_and_the_remedies(infeasible: Answer) -> None:
    text = Page(plan_page(infeasible)).text
    assert "86.20 GiB short" in text
    assert text.index("zero=3 instead of zero=1") < text.index("2 hosts instead of 1")
    assert plan_charts(infeasible) == () and chart_files(infeasible) == {}


def test_page_has_charts_for_what_it_was_given(answer: Answer) -> None:
    bare = replace(answer.best, estimate=replace(answer.best.estimate, timeline=()))
    without = replace(answer, result=replace(answer.result, best=bare))
    names = ["mesh", "breakdown", "memory_parts", "candidates"]
    assert [chart.name for chart in plan_charts(without)] == names
    every = [chart.name for chart in plan_charts(answer, memory=MEMORY, sensitivity=SENSITIVITY)]
    assert every == ["mesh", "timeline", "memory", *names[1:], "sensitivity"]
    assert Page(plan_page(without)).tags.count("svg") == 4
    assert "no time left to search" in Page(plan_page(answer, sensitivity=SENSITIVITY)).text


def test_mesh_names_the_hosts_of_one_kind(answer: Answer) -> None:
    # 4 devices on 2 hosts: ranks 2 and 3 are on the second
    two = replace(answer, workload=replace(answer.workload, n_hosts=2))
    assert "rank 1: pipeline rank 0, data 1, tensor 0, host 0" in plan_charts(two)[0].body
    assert "rank 2: pipeline rank 1, data 0, tensor 0, host 1" in plan_charts(two)[0].body
    mixed = replace(two.best, plan=replace(two.best.plan, groups=(GroupRanks(0, 2, "toy_x4"),)))
    assert "host" not in plan_charts(replace(two, result=replace(two.result, best=mixed)))[0].body


def test_rows_beside_the_page_are_the_figures_of_the_answer(answer: Answer) -> None:
    files = chart_files(answer, memory=MEMORY)
    content = json.loads(files["rows.json"])
    for name in ("candidates", "memory"):
        rows = list(csv.DictReader(io.StringIO(files[f"{name}.csv"])))
        assert [set(row) for row in rows] == [set(record) for record in content[name]]
    chosen = content["candidates"][0]
    assert (chosen["name"], chosen["pp"], chosen["step_s"], chosen["fits"]) == ("chosen", 2, 1.6, True)
    assert sum(chosen[f"{part}_s"] for part in PARTS) == pytest.approx(chosen["step_s"])
    assert [row["needed_bytes"] for row in content["memory"]] == [5 * GiB, 8 * GiB]
    moments = list(csv.DictReader(io.StringIO(files["memory_over_time.csv"])))
    assert [int(row["allocated_bytes"]) for row in moments] == [GiB, 4 * GiB, 7 * GiB, 2 * GiB]


def test_explain_writes_the_page_and_replaces_none_unless_forced(tmp_path: Path, answer: Answer, capsys) -> None:
    write_folder(tmp_path / "out", report_files(answer))
    page = tmp_path / "page.html"
    asked = ["explain", str(tmp_path / "out"), "--html", str(page)]
    assert run(asked) == 0
    assert "Why this plan" in capsys.readouterr().out
    assert "1.6 s" in Page(page.read_text()).text
    page.write_text("mine")
    assert run(asked) == 9
    assert "--force" in capsys.readouterr().err and page.read_text() == "mine"
    assert run([*asked, "--force"]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "page.html"]


@pytest.mark.parametrize("target", ["missing/page.html", "."])
def test_page_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path: Path, target: str, capsys) -> None:
    assert run(["explain", str(tmp_path / "no.json"), "--force", "--html", str(tmp_path / target)]) == 9
    assert "no.json" not in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------- size


def _large(answer: Answer, *, n_ranks: int, n_micro_batches: int, n_spans: int) -> tuple[Answer, list[MemoryCurve]]:
    """A pipeline whose ranks each do a forward and a backward per micro-batch, with `n_spans` gathers in each."""
    slot_s = 1.0 / (2 * n_micro_batches + n_ranks)
    events: list[TimelineEvent] = []
    curves = []
    for rank in range(n_ranks):
        curve = []
        for place in range(2 * n_micro_batches):
            kind = "F" if place % 2 == 0 else "B"
            start_s = (place + rank) * slot_s
            name = f"{rank}{kind}{place // 2}"
            events.append(TimelineEvent(rank, rank, "compute", name, start_s, start_s + 0.9 * slot_s))
            for span in range(n_spans):
                at_s = start_s + span * slot_s / n_spans
                events.append(TimelineEvent(rank, rank, "communication", "gather", at_s, at_s + 0.2 * slot_s / n_spans))
            curve += [(start_s, (place % 7 + 1) * GiB), (start_s + 0.9 * slot_s, (place % 5 + 1) * GiB)]
        curves.append(tuple(curve))
    small = make_estimate()
    estimate = replace(
        small,
        step_s=1.0,
        allocated_bytes=(7 * GiB,) * n_ranks,
        needed_bytes=(8 * GiB,) * n_ranks,
        memory_parts_bytes=(small.memory_parts_bytes[1],) * n_ranks,
        timeline=tuple(events),
    )
    stages = tuple(StagePlan(index, index + 1) for index in range(n_ranks))
    best = make_candidate(estimate=estimate, mesh=Mesh(pp=n_ranks, n_micro_batches=n_micro_batches))
    best = replace(best, plan=replace(best.plan, stages=stages))
    rejected = tuple(Rejection(Mesh(dp=index), "bound", "cannot beat the best plan " * 4) for index in range(1, 2000))
    return replace(answer, result=replace(answer.result, best=best, rejected=rejected)), curves


@pytest.mark.parametrize(
    ("n_ranks", "n_micro_batches", "n_spans"),
    [
        pytest.param(64, 32, 4, marks=pytest.mark.nightly),
        pytest.param(64, 128, 3, marks=pytest.mark.nightly),
        (8, 1024, 2),
    ],
)
def test_page_stays_below_a_megabyte(answer: Answer, n_ranks: int, n_micro_batches: int, n_spans: int) -> None:
    # 64 x 2 x 32 = 4,096 actions with 16,384 gathers; then four times as many actions; then 8 long rows
    large, curves = _large(answer, n_ranks=n_ranks, n_micro_batches=n_micro_batches, n_spans=n_spans)
    text = plan_page(large, memory=curves)
    assert len(text.encode()) < 1_000_000
    assert "1799 more in rejected.csv" in Page(text).text


def test_a_cost_says_that_whole_hosts_are_paid_for_where_a_plan_leaves_devices_idle(answer: Answer) -> None:
    # 2 USD x 4 devices, of which the plan uses 2
    mesh = Mesh(pp=2, micro_batch_size=2, n_micro_batches=4)
    idle = replace(answer, result=replace(answer.result, best=make_candidate(mesh=mesh)))
    said = "per device-hour; whole hosts are paid for, 2 devices of them idle"
    assert said in plan_page(idle) and "whole hosts are paid for" not in plan_page(answer)
    assert "cost of a billion tokens, whole hosts" in plan_page(answer)
    assert "whole hosts are paid for, 2 devices of them idle" in chart_files(idle)["candidates.svg"]
