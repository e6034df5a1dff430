"""Measurements of generated code count while that code is generated, and those that do not say which it was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autoplan import api
from autoplan.codegen import forward
from autoplan.errors import InputError
from autoplan.measured_profile.segment_key import WHOLE, code_key
from autoplan.measured_profile.segment_times import MeasuredProfile, SegmentTime
from autoplan.measuring_program.results import key_of
from autoplan.options import Options
from autoplan.rules import load_rules
from autoplan.space.current_code import WHOLE_MODEL, with_current_code
from autoplan.space.layouts import shardings_by_size

CHECKOUT = Path(__file__).parent.parent
GPT = CHECKOUT / "examples" / "gpt.py"
OLD_FILE = CHECKOUT / "benchmarks" / "results" / "profile_h200_2026-11-22.jsonl"
SIZES = {"n_layers": 2, "n_heads": 4, "width": 32, "context": 16}
FORWARD = """
class Block(nn.Module):
    def __init__(self, tp):
        self.up = Weights(weight=(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.up.weight)
        return F.gelu(y)
"""


def regions(**overrides):
    files = api.measurement_folder(GPT, hw="h200_x4", overrides=SIZES | overrides, degrees=(1, 2))
    return json.loads(files["measurement.json"])["regions"]


def codes():
    return {(region["content"], region["assignment"], region["tp"]): region["code"] for region in regions()}


def lines(**fields):
    """A line for each region at degree 1, with other fields."""
    times = dict.fromkeys(("forward_s", "backward_s", "host_forward_s", "host_backward_s"), 1e-3)
    named = {"schema_version": 1, "model": "gpt.py", "precision": "bf16", "what": "segment", "status": "measured"}
    named |= {"device": "NVIDIA H200", "torch": "2", "driver": "1", "micro_batch_size": 1}
    names = ("segment", "content", "assignment", "tp", "boundary", "code")
    found = [region for region in regions() if region["tp"] == 1]
    rows = [{name: region[name] for name in names} | named | times for region in found]
    return [row | {"saved_bytes": 1, "working_bytes": 1} | fields for row in rows]


def problem_with(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return api.make_problem(GPT, hw="h200_x4", overrides=SIZES, options=Options(global_batch=4, profile=str(path)))


# ---------------------------------------------------------------- the key


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("y", "hidden", True),
        ("        return", "        # why\n        return", True),
        ("class Block(nn.Module):", 'class Other(nn.Module):\n    """Of `layers.0` to `layers.7`."""\n', True),
        ("F.gelu(y)", "(\n            F.gelu(y)\n        )", True),
        ("F.gelu(y)", "F.relu(y)", False),
        ("F.gelu(y)", "F.gelu(x)", False),
        ("F.gelu(y)", "F.gelu(y.contiguous())", False),
    ],
)
def test_the_key_of_code_changes_with_what_it_runs(old: str, new: str, is_same: bool) -> None:
    assert (code_key(FORWARD.replace(old, new)) == code_key(FORWARD)) is is_same


def test_blocks_of_a_deeper_model_have_the_same_key() -> None:
    assert [region["code"] for region in regions(n_layers=5)] == [region["code"] for region in regions()]


def test_a_generator_that_writes_other_code_is_measured_again(monkeypatch) -> None:
    before = codes()
    written = forward.expression
    monkeypatch.setattr(forward, "expression", lambda call: written(call).replace("F.gelu(", "F.relu("))
    after = codes()
    blocks = {(r["content"], r["assignment"], r["tp"]) for r in regions() if r["segment"] == "blocks.0"}
    assert {key for key in before if after[key] != before[key]} == blocks and len(blocks) == 2
    rows = [{"content": key[0], "code": found[key]} for found in (before, after) for key in blocks]
    assert len({key_of(row) for row in rows}) == len(rows)


# ---------------------------------------------------------------- lines that count


def test_lines_of_other_code_are_left_out_and_the_source_says_so(tmp_path) -> None:
    rows = lines()
    assert len(problem_with(tmp_path / "now.json", rows).measured.segments) == len(rows) == 3
    other = [row | {"code": "other"} if row["segment"] == "blocks.0" else row for row in rows]
    found = problem_with(tmp_path / "other.json", other).measured
    assert len(found.segments) == 2 and "1 measurements of code that is not generated any more" in found.source
    own = [{key: value for key, value in row.items() if key != "code"} | {"module": "own"} for row in rows]
    assert len(problem_with(tmp_path / "own.json", own).measured.segments) == 3


def test_a_failure_of_other_code_forbids_nothing(tmp_path) -> None:
    rows, failed = lines(), [row | {"status": "not compiled", "compiled": True} for row in lines()]
    assert len(problem_with(tmp_path / "now.json", [*rows, *failed]).measured.failed) == 3
    old = [row | {"code": "other"} for row in failed]
    assert problem_with(tmp_path / "old.json", [*rows, *old]).measured.failed == ()


def test_a_line_that_does_not_say_counts_until_one_that_does_is_there(tmp_path) -> None:
    rows = lines()
    silent = [{key: value for key, value in row.items() if key != "code"} | {"forward_s": 1.0} for row in rows]
    found = problem_with(tmp_path / "silent.json", silent).measured
    assert [row.forward_s for row in found.segments] == [1.0, 1.0, 1.0] and "left out" not in found.source
    both = problem_with(tmp_path / "both.json", [*rows[:1], *silent]).measured
    assert sorted(row.forward_s for row in both.segments) == [1e-3, 1.0, 1.0]


def test_a_file_of_nothing_but_other_code_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match=r"(?s)m.json: code: found .*fix: profile again"):
        problem_with(tmp_path / "m.json", [row | {"code": "other"} for row in lines()])


def test_layouts_of_a_search_leave_old_lines_out_too() -> None:
    graph = api.trace_model(GPT, overrides=SIZES)
    (content, assignment, tp), code = next((key, code) for key, code in codes().items() if key[2] == 2)
    row = SegmentTime(content, assignment, tp, "", 1, 1.0, 1.0, 1.0, 1.0, 1, 1, code=code)
    unknown = replace(row, assignment="of another search", code="other")
    measured = MeasuredProfile((row, replace(row, code="other"), unknown, replace(unknown, assignment=WHOLE)), None, "")
    problem = api.make_problem(GPT, hw="h200_x4", overrides=SIZES, options=Options(global_batch=4))
    rules = load_rules()
    splits = shardings_by_size(graph, problem.hardware, problem.options, rules).values()
    found = with_current_code(measured, graph, [WHOLE_MODEL, *splits], precision="bf16", rules=rules)
    assert found.segments == (row, unknown, replace(unknown, assignment=WHOLE))


def test_the_profile_of_before_there_were_keys_still_counts() -> None:
    options = Options(global_batch=8, profile=str(OLD_FILE))
    problem = api.make_problem(
        CHECKOUT / "examples" / "llama.py", hw="h200_x4", overrides={"size": "1b"}, options=options
    )
    # its llama-1b rows hold the whole model, several micro-batches, eager and compiled, own and generated
    ways = {(row.tp, row.is_own, row.execution.compile) for row in problem.measured.segments}
    assert {(1, False, False), (1, True, False), (1, False, True), (2, False, False)} <= ways
    assert all(row.code is None for row in problem.measured.segments) and "left out" not in problem.measured.source
