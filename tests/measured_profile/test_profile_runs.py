"""Measured profiles: what is measured, and what the command line does with it."""

from __future__ import annotations

import json
import os
import sys
from unittest.mock import patch

import pytest
import torch
from profile_rows import (
    BATCHES,
    DEGREES,
    GPT,
    MLP,
    SIZES,
    quick,
    segment_rows,
)
from torch import nn

from autoplan import api, cli
from autoplan.errors import MeasureError
from autoplan.files import write_folder
from autoplan.graph import GraphFacts
from autoplan.measure_model.measurement_folder import value_ranges
from autoplan.measure_model.run import run_measurements
from autoplan.measured_profile.segment_key import content_key
from autoplan.measured_profile.segment_times import parse_measured_profile
from autoplan.measuring_program import program
from autoplan.measuring_program.timing import Call, Clock
from autoplan.report.measured_profile import results_table
from autoplan.runtime import process_group

pytest_plugins = ["profile_fixtures"]

# ---------------------------------------------------------------- measuring


def test_every_kind_is_measured_at_every_degree_and_micro_batch(measured, problem) -> None:
    names = {segment.name for segment in problem.graph.first_of_kind().values()}
    assert names == {"outer.0", "blocks.0", "outer.1"}
    for degree in DEGREES:
        for size in BATCHES:
            rows = segment_rows(measured.rows, tp=degree, micro_batch_size=size)
            assert {row["segment"] for row in rows} == names, (degree, size)
    assert all(row["forward_s"] > 0 and row["backward_s"] > 0 for row in segment_rows(measured.rows))
    assert [row["what"] for row in measured.rows].count("optimizer") == 1


def test_the_ops_of_every_kind_are_measured_once_at_the_largest_micro_batch(measured, problem) -> None:
    lines = [row for row in measured.rows if row["what"] == "ops"]
    segments = {(row["content"], row["assignment"], row["tp"]) for row in segment_rows(measured.rows)}
    assert {(row["content"], row["assignment"], row["tp"]) for row in lines} == segments and len(lines) == len(segments)
    assert all(row["status"] == "measured" and row["micro_batch_size"] == max(BATCHES) for row in lines)
    (block,) = (row for row in lines if row["segment"] == "blocks.0" and row["tp"] == 1)
    # 2 samples x 16 tokens of width 32: query, key and value in one product, and back; four times as wide, and back
    products = {tuple(map(tuple, op["shapes"]))[1]: op for op in block["ops"] if op["op"] == "aten::linear"}
    assert set(products) == {(96, 32), (32, 32), (128, 32), (32, 128)}
    assert all(op["n_calls"] == 1 and op["forward_s"] > 0 and op["backward_s"] > 0 for op in products.values())
    # with tensor parallelism the collectives of the block are not among its ops
    assert not any(op["op"].startswith("_") for row in lines for op in row["ops"])
    assert len(problem.measured.ops) == len(lines)


def test_a_plan_sets_the_measured_ops_beside_the_computed_ones(problem) -> None:
    blocks = next(found for found in api.solve(problem).ops if found.segment == "blocks.0")
    assert (blocks.n_segments, blocks.micro_batch_size) == (2, 2)
    products = [row for row in blocks.ops if row.op == "aten::linear"]
    assert len(products) == 4 and all(row.shapes for row in products)
    assert all(row.measured.total_s > 0 and row.computed.total_s > 0 for row in products)


def test_each_line_says_what_it_depends_on(measured) -> None:
    for row in measured.rows:
        assert row["device"] == "CPU" and row["torch"] and row["precision"] == "fp32" and row["model"] == "gpt.py"


def test_saved_bytes_are_those_of_the_tensors_autograd_keeps(hw, tmp_path) -> None:
    # one block of the MLP, width 8, expansion 4, one sample, float32: the norm keeps its input (8) and mean and
    # rstd (1 each), `up` its input (8), gelu its input (32), `down` its input (32): 82 floats
    overrides = {"width": 8, "depth": 1}
    files = api.measurement_folder(
        MLP, hw=hw, overrides=overrides, degrees=(1,), micro_batch_sizes=(1, 3), precision="fp32"
    )
    rows = run_measurements(files, out=tmp_path / "m.json", device="cpu", start=quick)
    assert [row["saved_bytes"] for row in segment_rows(rows, segment="blocks.0")] == [4 * 82, 3 * 4 * 82]


def test_a_second_run_measures_nothing_again(files, measured) -> None:
    run_measurements(files, out=measured.out, device="cpu", start=quick)
    assert measured.out.read_text() == measured.text


@pytest.mark.nightly
def test_a_deeper_model_of_the_same_blocks_measures_only_what_is_new(hw, measured, tmp_path, capfd) -> None:
    files = api.measurement_folder(
        GPT, hw=hw, overrides=SIZES | {"n_layers": 3}, degrees=(1,), micro_batch_sizes=(2, 3), precision="fp32"
    )
    rows = run_measurements(files, out=tmp_path / "deeper.json", device="cpu", cache=measured.cache, start=quick)
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("[")]
    assert len(told) == len(rows) == len({json.dumps(row) for row in rows})
    good = [row for row in measured.rows if row["status"] == "measured"]  # noisy ones are measured again
    taken = [row for row in rows if row in good]
    assert sum(line.endswith(": known from an earlier run") for line in told) == len(taken) > 0
    assert {row.get("micro_batch_size") for row in taken} <= {None, 2}
    assert any(row.get("micro_batch_size") == 3 for row in rows)


def test_a_run_goes_on_where_another_was_cut_off(files, measured, tmp_path) -> None:
    out = tmp_path / "measured.json"
    lines = measured.text.splitlines(keepends=True)
    out.write_text("".join(lines[:-2]) + lines[-2][:40])
    rows = run_measurements(files, out=out, device="cpu", start=quick)
    assert out.read_text().startswith("".join(lines[:-2])) and len(rows) == len(lines)
    assert [row.get("content") for row in rows] == [row.get("content") for row in measured.rows]


CALM, WILD = {"forward_spread": 0.04, "backward_spread": 0.1}, {"forward_spread": 0.02, "backward_spread": 0.3}
WILDER = {"forward_spread": 0.4, "backward_spread": 0.0}


@pytest.mark.parametrize(
    ("rounds", "status", "kept"),
    [
        ([CALM], "measured", CALM),
        ([WILD, CALM], "measured", CALM),  # measured again, once
        ([WILD, WILDER], "noisy", WILD),
        ([WILDER, WILD], "noisy", WILD),
    ],
)
def test_times_that_spread_by_more_than_a_tenth_are_taken_again_and_marked_if_they_still_do(
    monkeypatch: pytest.MonkeyPatch, rounds: list[dict[str, float]], status: str, kept: dict[str, float]
) -> None:
    waiting = list(rounds)
    monkeypatch.setattr(program, "round_times", lambda *_: {"forward_s": 1.0, "backward_s": 2.0, **waiting.pop(0)})
    call = Call(nn.Linear(2, 2), [torch.ones(1, 2)], {})
    row = program._measured_calls(lambda: call, Clock(torch.device("cpu"), 0.0), [])
    assert row["status"] == status and not waiting
    assert {name: row[name] for name in kept} == kept


def test_a_device_without_room_leaves_a_line_that_says_so(measured, problem) -> None:
    row = segment_rows(measured.rows, segment="blocks.0", tp=1, micro_batch_size=2)[0]
    names = ("forward_s", "backward_s", "host_forward_s", "host_backward_s", "saved_bytes", "working_bytes")
    full = {key: value for key, value in row.items() if key not in names} | {"status": "out of memory"}
    others = [other for other in measured.rows if other is not row]
    text = "\n".join(json.dumps(other) for other in [*others, full])
    assert "out of memory" in results_table([full])
    facts = GraphFacts.of(problem.graph)
    contents = {content_key(problem.graph, facts, segment) for segment in problem.graph.segments}
    found = parse_measured_profile(text, where="m", device="CPU", precision="fp32", contents=contents, model="gpt.py")
    assert len(found.segments) == len(problem.measured.segments) - 1


def test_a_failed_measurement_is_an_error_and_exit_code_7(files, tmp_path) -> None:
    with pytest.raises(MeasureError) as caught:
        run_measurements(files, out=tmp_path / "m.json", device="cpu", start=lambda command: 1)
    assert caught.value.exit_code == 7


def test_another_device_than_that_of_the_profile_is_refused(tmp_path, capfd) -> None:
    files = api.measurement_folder(
        MLP, hw="h200_x4", overrides={"width": 8, "depth": 1}, degrees=(1,), micro_batch_sizes=(1,)
    )
    with pytest.raises(MeasureError):
        run_measurements(files, out=tmp_path / "m.json", device="cpu", start=quick)
    assert "found device 'CPU'" in capfd.readouterr().err


def test_the_folder_runs_by_itself(files, tmp_path) -> None:
    write_folder(tmp_path / "measure", files)
    sources = [path.read_text() for path in (tmp_path / "measure").rglob("*.py")]
    assert sources and not any("import autoplan" in text or "from autoplan" in text for text in sources)


def test_value_ranges_follow_the_paths_of_the_graph() -> None:
    torch = pytest.importorskip("torch")
    batch = ({"ids": torch.tensor([[3, 7]]), "x": torch.ones(1, 2)}, torch.tensor([5, -100]))
    assert value_ranges(batch) == {("inputs", "ids"): (3, 7), ("targets",): (5, 5)}


# ---------------------------------------------------------------- the command line


def test_profile_needs_one_of_out_and_emit(hw, capsys) -> None:
    assert cli.run(["profile", str(MLP), "--hw", hw]) == 2
    assert cli.run(["profile", str(MLP), "--hw", hw, "--out", "m.json", "--emit", "folder"]) == 2
    assert "--emit DIR" in capsys.readouterr().err


def test_emit_writes_a_folder_and_says_how_to_run_it(hw, tmp_path, capsys) -> None:
    folder = tmp_path / "folder"
    arguments = ["profile", str(MLP), "--set", "width=8", "--hw", hw, "--tp", "1", "--micro-batch", "1,2"]
    assert cli.run([*arguments, "--emit", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == f"python {folder}/measure.py --out measured.json"
    regions = json.loads((folder / "measurement.json").read_text())["regions"]
    assert [region["micro_batch_sizes"] for region in regions] == [[1, 2]] * len(regions)


@pytest.mark.parametrize(("fresh", "name"), [([], "measurements.sqlite"), (["--fresh"], None)])
def test_results_of_earlier_runs_are_taken_unless_fresh_ones_are_asked_for(hw, tmp_path, monkeypatch, fresh, name):
    asked = []
    monkeypatch.setattr("autoplan.measure_model.run.run_measurements", lambda files, **given: asked.append(given) or [])
    arguments = ["profile", str(MLP), "--set", "width=8", "--hw", hw, "--tp", "1", "--out", str(tmp_path / "m.json")]
    assert cli.run([*arguments, *fresh]) == 0
    assert [given["cache"] and given["cache"].name for given in asked] == [name]


def test_a_wrong_profile_on_the_command_line_exits_3(hw, measured, capsys) -> None:
    arguments = ["plan", str(MLP), "--hw", hw, "--precision", "fp32", "--profile", str(measured.out)]
    assert cli.run(arguments) == 3
    assert "measured.json: model: found 'gpt.py'" in capsys.readouterr().err


def test_a_gpu_measures_with_the_allocator_of_programs(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "runtime.process_group", process_group)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    found, names = [], ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    monkeypatch.setattr(program, "measure", lambda *_, **__: found.append(os.environ.get(names[0])))
    with patch.dict(os.environ):
        for name in names:
            os.environ.pop(name, None)
        program.main(tmp_path, [])
        os.environ[names[0]] = "backend:cudaMallocAsync"
        program.main(tmp_path, [])
        os.environ[names[1]] = os.environ.pop(names[0])
        program.main(tmp_path, [])
    assert found == ["expandable_segments:True", "backend:cudaMallocAsync", None]
