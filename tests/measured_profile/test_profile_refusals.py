"""Measured profiles: files that are wrong, damaged or of another device are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from profile_rows import (
    GPT,
    SIZES,
    segment_rows,
    whole_plan,
)

from autoplan import api
from autoplan.errors import InputError, UsageError
from autoplan.graph import GraphFacts
from autoplan.measured_profile.segment_key import content_key
from autoplan.measured_profile.segment_times import parse_measured_profile

pytest_plugins = ["profile_fixtures"]


@pytest.mark.parametrize(
    ("change", "field", "found"),
    [
        ({"device": "NVIDIA A100"}, "device", "NVIDIA A100"),
        ({"precision": "bf16"}, "precision", "bf16"),
        ({"content": "other", "model": "other.py"}, "model", "other.py"),
        ({"schema_version": 99}, "schema_version", "99"),
        ({"forward_s": -1.0}, "forward_s", "-1.0"),
        ({"forward_s": None}, "forward_s", "None"),
        ({"graph_forward_s": -1.0}, "graph_forward_s", "-1.0"),
        ({"tp": 0}, "tp", "0"),
        ({"what": "weather"}, "m.json:1", "weather"),
    ],
)
def test_a_wrong_file_is_refused_by_field(problem, measured, change, field, found) -> None:
    facts = GraphFacts.of(problem.graph)
    contents = {content_key(problem.graph, facts, segment) for segment in problem.graph.segments}
    text = "\n".join(json.dumps(row | change) for row in segment_rows(measured.rows))
    with pytest.raises(InputError) as caught:
        parse_measured_profile(text, where="m.json", device="CPU", precision="fp32", contents=contents, model="gpt.py")
    message = str(caught.value)
    assert "m.json" in message and field in message and found in message
    assert "expected:" in message and "fix:" in message


def test_times_in_a_graph_are_read_and_it_is_said_where_they_are_missing(problem, measured) -> None:
    facts = GraphFacts.of(problem.graph)
    contents = {content_key(problem.graph, facts, segment) for segment in problem.graph.segments}
    first, *others = segment_rows(measured.rows)
    replayed = {"graph_forward_s": 1.5, "graph_backward_s": 2.5}
    of = {"where": "m.json", "device": "CPU", "precision": "fp32", "contents": contents, "model": "gpt.py"}
    found = parse_measured_profile("\n".join(map(json.dumps, [first | replayed, *others])), **of)
    (segment,) = (row for row in found.segments if row.graph_forward_s is not None)
    assert (segment.graph_forward_s, segment.graph_backward_s) == (1.5, 2.5)
    assert found.source.endswith(f"; {len(others)} of {len(others) + 1} not measured as CUDA graphs")
    assert "graph" not in parse_measured_profile("\n".join(map(json.dumps, [first, *others])), **of).source.lower()


@pytest.mark.parametrize("text", ["", "no json", "[]", '{"schema_version": NaN}'])
def test_a_damaged_file_is_refused(text) -> None:
    with pytest.raises(InputError):
        parse_measured_profile(text, where="m.json", device="CPU", precision="fp32", contents={"x"}, model="gpt.py")


def test_lines_of_other_devices_are_left_out(problem, measured) -> None:
    facts = GraphFacts.of(problem.graph)
    contents = {content_key(problem.graph, facts, segment) for segment in problem.graph.segments}
    other = json.dumps(measured.rows[-1] | {"device": "NVIDIA H200", "forward_s": 1e9})
    found = parse_measured_profile(
        measured.text + other, where="m", device="CPU", precision="fp32", contents=contents, model="gpt.py"
    )
    assert max(row.forward_s for row in found.segments) < 1e9


def test_a_profile_is_of_one_device_and_does_not_compare_several(hw, measured) -> None:
    with pytest.raises(UsageError):
        api.whatif(GPT, hw=(hw,), overrides=SIZES, n_samples=10, profile=str(measured.out))


def test_a_plan_in_another_precision_is_refused(problem) -> None:
    plan = whole_plan(problem, problem.options.global_batch)
    with pytest.raises(InputError) as caught:
        api.score(problem, replace(plan, precision="bf16", graph_hash=problem.graph.content_hash()))
    assert "precision" in str(caught.value)


def test_the_source_of_the_times_says_how_many_are_noisy(measured) -> None:
    rows = segment_rows(measured.rows)
    contents = {row["content"] for row in rows}
    for n_noisy, told in ((0, ""), (1, f"; 1 of {len(rows)} measurements noisy")):
        lines = [row | {"status": "noisy" if i < n_noisy else "measured"} for i, row in enumerate(rows)]
        text = "\n".join(map(json.dumps, lines))
        found = parse_measured_profile(
            text, where="m", device="CPU", precision="fp32", contents=contents, model="gpt.py"
        )
        assert found.source.endswith(told + ": times spread by more than 10 %" if told else "driver unknown")
