"""Measured profiles: what is measured, that plans use exactly that, and what is refused."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest

from autoplan import api, cli
from autoplan.answers.answer import answer_from_json, answer_to_json, step_interval_s
from autoplan.errors import InputError, MeasureError, UsageError
from autoplan.files import write_folder
from autoplan.graph import GraphFacts
from autoplan.measurements.segment_key import WHOLE, assignment_key, content_key
from autoplan.measurements.segment_times import MeasuredProfile, SegmentTime, parse_profile
from autoplan.options import Options
from autoplan.parallel_plan import Execution, Mesh, Plan, StagePlan
from autoplan.processes import start_process
from autoplan.profile.measurement_folder import value_ranges
from autoplan.profile.run import run_measurements
from autoplan.report.measurements import results_table
from autoplan.report.plan import plan_report
from autoplan.space.priced import price_plan, priced_space

CHECKOUT = Path(__file__).parent.parent
GPT, MLP = CHECKOUT / "examples" / "gpt.py", CHECKOUT / "examples" / "mlp.py"
SIZES = {"n_layers": 2, "n_heads": 4, "width": 32, "context": 16}
DEGREES, BATCHES = (1, 2), (1, 2)


def quick(command):
    return start_process([*command, "--seconds", "0.005", "--backend", "aot_eager"])


@pytest.fixture(scope="module")
def hw(tmp_path_factory) -> str:
    """Four devices that are CPUs."""
    text = (CHECKOUT / "hardware_profiles" / "h200_x4.toml").read_text()
    path = tmp_path_factory.mktemp("hw") / "cpu_x4.toml"
    path.write_text(text.replace('name = "NVIDIA H200"', 'name = "CPU"'))
    return str(path)


@pytest.fixture(scope="module")
def files(hw):
    return api.measurement_folder(
        GPT, hw=hw, overrides=SIZES, degrees=DEGREES, micro_batch_sizes=BATCHES, precision="fp32", compile="both"
    )


@pytest.fixture(scope="module")
def measured(files, tmp_path_factory) -> SimpleNamespace:
    out = tmp_path_factory.mktemp("measured") / "measured.json"
    cache = out.with_name("measurements.sqlite")
    rows = run_measurements(files, out=out, device="cpu", cache=cache, start=quick)
    return SimpleNamespace(out=out, rows=rows, text=out.read_text(), cache=cache)


@pytest.fixture
def problem(hw, measured):
    options = Options(precision="fp32", global_batch=8, profile=str(measured.out), fix=(("pp", "1"),))
    return api.make_problem(GPT, hw=hw, overrides=SIZES, options=options)


def segment_rows(rows, **wanted):
    """Those with these values; eager ones and generated code, unless `compiled` and `module` are among them."""
    wanted = {"compiled": False, "module": "generated"} | wanted
    return [r for r in rows if r["what"] == "segment" and all(r[key] == value for key, value in wanted.items())]


def rows_of_one_stage(rows, segment, **wanted):
    """Those that plans without tensor and pipeline parallelism take."""
    return segment_rows(rows, segment=segment.name, tp=1, module="own" if segment.is_block else "generated", **wanted)


def whole_plan(problem, size=1, **mesh):
    return Plan(Mesh(micro_batch_size=size, **mesh), (StagePlan(0, len(problem.graph.segments)),), precision="fp32")


def tables(problem, size=1):
    """(priced as measured, priced by the hardware profile) on one device."""
    plan = whole_plan(problem, size)
    both = (problem.measured, None)
    return tuple(price_plan(problem.graph, problem.profile, plan, measured=measured) for measured in both)


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


def test_a_device_without_room_leaves_a_line_that_says_so(measured, problem) -> None:
    row = segment_rows(measured.rows, segment="blocks.0", tp=1, micro_batch_size=2)[0]
    names = ("forward_s", "backward_s", "host_forward_s", "host_backward_s", "saved_bytes", "working_bytes")
    full = {key: value for key, value in row.items() if key not in names} | {"status": "out of memory"}
    others = [other for other in measured.rows if other is not row]
    text = "\n".join(json.dumps(other) for other in [*others, full])
    assert "out of memory" in results_table([full])
    facts = GraphFacts.of(problem.graph)
    contents = {content_key(problem.graph, facts, segment) for segment in problem.graph.segments}
    found = parse_profile(text, where="m", device="CPU", precision="fp32", contents=contents, model="gpt.py")
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


# ---------------------------------------------------------------- prices


@pytest.mark.parametrize("size", BATCHES)
def test_a_plan_takes_exactly_the_measured_seconds(problem, measured, size) -> None:
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
            assert table.costs[kind][1].recompute_s == row["forward_s"]
    assert set(table.sources) == {"measured"}


def test_the_optimizer_takes_the_measured_time_per_element(problem) -> None:
    # one device, float32: nothing is packed or reduced, so the step is elements x time per element
    per_element_s = next(row["per_element_s"] for row in problem_rows(problem) if row["what"] == "optimizer")
    table, _ = tables(problem)
    total_s = sum(table.costs[kind][0].optimizer_s for kind in table.kinds)
    assert total_s == pytest.approx(per_element_s * problem.graph.n_parameters())


def problem_rows(problem):
    return [json.loads(line) for line in Path(problem.options.profile).read_text().splitlines()]


def test_a_tensor_parallel_plan_uses_what_was_measured_for_its_assignment(problem, measured) -> None:
    offered = priced_space(problem.graph, problem.profile, problem.options, global_batch=8, measured=problem.measured)
    sharding = dict(offered.space.shardings)[2][0]
    mesh = Mesh(tp=2, sharding=sharding, micro_batch_size=2)
    plan = offered.make_plan(mesh, (StagePlan(0, len(problem.graph.segments)),))
    assignments = {assignment.kind: assignment for assignment in plan.shardings}
    table = offered.price(mesh)
    for kind, segment in problem.graph.first_of_kind().items():
        key = assignment_key(problem.graph, segment, assignments[kind])
        rows = segment_rows(measured.rows, segment=segment.name, assignment=key, micro_batch_size=2)
        assert [row["forward_s"] for row in rows] == [table.costs[kind][0].forward_s]
    again = price_plan(problem.graph, problem.profile, plan, measured=problem.measured)
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


def test_what_was_not_measured_takes_the_median_correction(problem) -> None:
    # only the block is measured: its ratio corrects the other segments
    facts, first = GraphFacts.of(problem.graph), problem.graph.first_of_kind()
    block = next(kind for kind, segment in first.items() if segment.is_block)
    content = content_key(problem.graph, facts, first[block])
    eager = [row for row in problem.measured.segments if not row.execution.compile]
    only = [row for row in eager if row.content == content and row.assignment == WHOLE and row.is_own]
    problem = replace(problem, measured=replace(problem.measured, segments=tuple(only)))
    table, computed = tables(problem)
    computed_by_size = {size: tables(problem, size)[1] for size in BATCHES}
    ratio = median(row.forward_s / computed_by_size[row.micro_batch_size].costs[block][0].forward_s for row in only)
    for kind in first:
        if kind != block:
            assert table.costs[kind][0].forward_s == pytest.approx(computed.costs[kind][0].forward_s * ratio)
            assert table.costs[kind][0].saved_bytes == computed.costs[kind][0].saved_bytes
    assert sorted(table.sources) == ["calibrated", "calibrated", "measured"]


def test_an_assignment_that_was_not_measured_takes_the_correction_of_its_degree(problem, measured) -> None:
    rows = tuple(replace(row, assignment="another") if row.tp == 2 else row for row in problem.measured.rows({}))
    changed = replace(problem.measured, segments=rows)
    mesh = Mesh(tp=2, sharding=segment_rows(measured.rows, tp=2)[0]["boundary"], micro_batch_size=2)
    prices = [
        priced_space(problem.graph, problem.profile, problem.options, global_batch=8, measured=profile).price(mesh)
        for profile in (problem.measured, changed)
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


# ---------------------------------------------------------------- compiled


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
    table = price_plan(problem.graph, problem.profile, whole_plan(problem, 2, compile=True), measured=problem.measured)
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
    table = price_plan(problem.graph, problem.profile, whole_plan(problem, compile=True), measured=known)
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


@pytest.mark.parametrize("has_profile", [True, False])
def test_compiling_has_no_price_unless_it_was_measured(problem, has_profile) -> None:
    known = replace(problem.measured, segments=problem.measured.rows({})) if has_profile else None
    asked = replace(problem, measured=known)
    with pytest.raises(UsageError, match="fix compile=on: found .*measured compiled"):
        best_plan(asked, ("compile", "on"))
    plan = replace(whole_plan(problem, compile=True), graph_hash=problem.graph.content_hash())
    with pytest.raises(UsageError, match="mesh.compile: found"):
        api.score(asked, plan)


def test_a_segment_that_does_not_compile_leaves_a_line_and_only_eager_plans(problem, measured) -> None:
    row = segment_rows(measured.rows, segment="blocks.0", tp=2, micro_batch_size=2, compiled=True)[0]
    failed = {key: row[key] for key in row if key not in ("forward_s", "backward_s", "saved_bytes")}
    failed |= {"status": "not compiled", "why": "no"}
    assert "not compiled" in results_table([failed])
    facts = GraphFacts.of(problem.graph)
    contents = {content_key(problem.graph, facts, segment) for segment in problem.graph.segments}
    text = "\n".join(json.dumps(failed if other is row else other) for other in measured.rows)
    known = parse_profile(text, where="m", device="CPU", precision="fp32", contents=contents, model="gpt.py")
    assert [(row.segment, row.tp, row.execution.compile) for row in known.failed] == [("blocks.0", 2, True)]
    asked = compiled_at_no_time(replace(problem, measured=known))
    assert not best_plan(asked).mesh.compile
    assert best_plan(asked, ("compile", "on"), ("tp", "1")).mesh.compile
    with pytest.raises(UsageError, match=r"failed on blocks.0 \(tp 2\)"):
        best_plan(asked, ("compile", "on"))


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
    found = parse_profile(text, where="m", device="CPU", precision="fp32", contents=contents, model="gpt.py")
    assert len(found.segments) == len(rows) and found.executions == {Execution()}
    assert not any(row.is_own for row in found.segments) and found.rows({}, own=True) == found.segments


# ---------------------------------------------------------------- the user's own modules

FAMILIES = CHECKOUT / "tests" / "families"
PARTS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.inner(x)


class Noted(Block):
    def forward(self, x, note):
        return x * self.inner(x)


class Note:
    pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.parts, self.noted = (nn.ModuleList([cls()]) for cls in (Block, Block, Noted))

    def forward(self, x):
        x = self.blocks[0](x.relu())
        x = x + self.parts[0].inner(x.tanh()).relu()
        return self.noted[0](x.sin(), note=Note())


def build_model():
    return Model()


def make_batch(batch_size):
    return torch.ones(batch_size, 4), torch.ones(batch_size, 4)


def loss_fn(outputs, targets):
    return (outputs - targets).square().mean()
"""


def measure_at_degree_1(model, hw, out, **options):
    files = api.measurement_folder(model, hw=hw, degrees=(1,), micro_batch_sizes=BATCHES, precision="fp32", **options)
    return run_measurements(files, out=out, device="cpu", start=quick)


def file_problem(model, hw, out):
    options = Options(precision="fp32", global_batch=8, profile=str(out))
    return api.make_problem(model, hw=hw, overrides={}, options=options)


@pytest.mark.parametrize(
    "family", ["vit_hf", "t5_hf", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("resnet", "gpt2_hf"))]
)
def test_each_kind_of_block_is_also_measured_as_the_users_own_module(family, hw, tmp_path) -> None:
    out = tmp_path / "m.json"
    rows = measure_at_degree_1(FAMILIES / f"{family}.py", hw, out)
    problem = file_problem(FAMILIES / f"{family}.py", hw, out)
    first = problem.graph.first_of_kind().values()
    blocks = [segment for segment in first if segment.is_block]
    assert blocks
    for segment in blocks:
        for size in BATCHES:
            (own,) = segment_rows(rows, segment=segment.name, micro_batch_size=size, module="own")
            (generated,) = segment_rows(rows, segment=segment.name, micro_batch_size=size)
            assert own["status"] in ("measured", "noisy") and own["forward_s"] > 0 and own["backward_s"] > 0
            # The same tensors are kept; a decoder of T5 keeps its bias besides, which the graph makes outside of it.
            assert generated["saved_bytes"] <= own["saved_bytes"] <= 1.1 * generated["saved_bytes"]
    outer = {segment.name for segment in first if not segment.is_block}
    assert outer.isdisjoint(row["segment"] for row in segment_rows(rows, module="own"))


@pytest.mark.parametrize("family", ["vit_hf", "resnet", "gpt2_hf", "t5_hf"])
def test_an_own_module_called_alone_gives_what_it_gives_inside_of_the_model(family, tmp_path, monkeypatch) -> None:
    # the results that it makes, not what it hands on, have the shapes of a plain forward pass of the whole model
    torch = pytest.importorskip("torch")
    from autoplan.measuring.own import OwnModel
    from autoplan.measuring.timing import tensors_of
    from autoplan.tracing.trace import call_model

    (tmp_path / "model.py").write_text((FAMILIES / f"{family}.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "model", raising=False)
    graph = api.trace_model(FAMILIES / f"{family}.py")
    paths = {segment.module_path for segment in graph.first_of_kind().values() if segment.is_block}
    own_model = OwnModel({}, paths, torch.float32)
    model, found = importlib.import_module("model"), {}
    plain = model.build_model()

    def made(path, module, arguments, named, outputs):
        given = {id(tensor) for tensor in (*tensors_of(arguments), *tensors_of(named))}
        found[path] = [t.shape for t in tensors_of(outputs) if t.requires_grad and id(t) not in given]

    for path in paths:
        plain.get_submodule(path).register_forward_hook(partial(made, path), with_kwargs=True)
    call_model(plain, model.make_batch(3)[0])
    for path in sorted(paths):
        call = own_model.builder({"path": path, "n_calls": 1, "instances": [(path, 0)]}, 3, torch.device("cpu"), None)()
        results = call.forward()
        assert results and [result.shape for result in results] == found[path]
        call.backward(results)
        assert all(p.grad is not None for p in call.module.parameters())
    monkeypatch.delitem(sys.modules, "model")


def test_a_plan_of_two_stages_takes_the_generated_times_and_one_of_one_stage_the_own_ones(hw, tmp_path) -> None:
    out = tmp_path / "m.json"
    rows = measure_at_degree_1(FAMILIES / "gpt2_hf.py", hw, out)
    problem = file_problem(FAMILIES / "gpt2_hf.py", hw, out)
    n_segments = len(problem.graph.segments)
    whole = whole_plan(problem)
    stages = StagePlan(0, n_segments // 2), StagePlan(n_segments // 2, n_segments)
    cut = replace(whole, mesh=replace(whole.mesh, pp=2), stages=stages)
    kind = next(kind for kind, segment in problem.graph.first_of_kind().items() if segment.is_block)
    for plan, module in ((whole, "own"), (cut, "generated")):
        (row,) = segment_rows(rows, segment="transformer.h.0", micro_batch_size=1, module=module)
        cost = price_plan(problem.graph, problem.profile, plan, measured=problem.measured).costs[kind][0]
        assert (cost.forward_s, cost.backward_s) == (row["forward_s"], row["backward_s"])


def test_host_time_of_own_modules_is_the_median_of_theirs_only() -> None:
    row = SegmentTime("c", WHOLE, 1, "", 1, 9.0, 9.0, 3.0, 3.0, 0, 0)
    lines = [
        {"host_forward_s": 3.0, "micro_batch_size": 1},
        {"host_forward_s": 7.0, "micro_batch_size": 1, "module": "own"},
        {"host_forward_s": 6.0, "micro_batch_size": 2, "module": "own"},
    ]
    common = {"schema_version": 1, "what": "segment", "model": "m", "precision": "fp32", "device": "CPU", "torch": "2"}
    common |= {"driver": "", "status": "measured", "content": "c", "assignment": WHOLE, "segment": "s", "boundary": ""}
    common |= {"tp": 1, "forward_s": 9.0, "backward_s": 9.0, "host_backward_s": 3.0, "saved_bytes": 0}
    text = "\n".join(json.dumps(common | {"working_bytes": 0} | line) for line in lines)
    found = parse_profile(text, where="m", device="CPU", precision="fp32", contents={"c"}, model="m")
    assert found.rows({}) == (row,)
    assert [own.host_forward_s for own in found.rows({}, own=True)] == [6.5, 6.5]


def test_a_block_that_is_not_called_by_itself_is_reported_and_does_not_stop_the_rest(hw, tmp_path) -> None:
    model, out = tmp_path / "parts.py", tmp_path / "m.json"
    model.write_text(PARTS)
    rows = measure_at_degree_1(model, hw, out)
    own = {row["segment"]: row for row in segment_rows(rows, module="own", micro_batch_size=1)}
    assert own["blocks.0"]["status"] in ("measured", "noisy")
    assert own["parts.0"]["status"] == "not run" and "called 0 times" in own["parts.0"]["why"]
    assert own["noted.0"]["status"] == "not run" and "called with a Note" in own["noted.0"]["why"]
    assert "own module, not run" in results_table(rows)
    assert all(row["status"] in ("measured", "noisy") for row in segment_rows(rows))
    problem = file_problem(model, hw, out)
    assert set(price_plan(problem.graph, problem.profile, whole_plan(problem), measured=problem.measured).sources) == {
        "measured"
    }


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


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "field", "found"),
    [
        ({"device": "NVIDIA A100"}, "device", "NVIDIA A100"),
        ({"precision": "bf16"}, "precision", "bf16"),
        ({"content": "other", "model": "other.py"}, "model", "other.py"),
        ({"schema_version": 99}, "schema_version", "99"),
        ({"forward_s": -1.0}, "forward_s", "-1.0"),
        ({"forward_s": None}, "forward_s", "None"),
        ({"tp": 0}, "tp", "0"),
        ({"what": "weather"}, "m.json:1", "weather"),
    ],
)
def test_a_wrong_file_is_refused_by_field(problem, measured, change, field, found) -> None:
    facts = GraphFacts.of(problem.graph)
    contents = {content_key(problem.graph, facts, segment) for segment in problem.graph.segments}
    text = "\n".join(json.dumps(row | change) for row in segment_rows(measured.rows))
    with pytest.raises(InputError) as caught:
        parse_profile(text, where="m.json", device="CPU", precision="fp32", contents=contents, model="gpt.py")
    message = str(caught.value)
    assert "m.json" in message and field in message and found in message
    assert "expected:" in message and "fix:" in message


@pytest.mark.parametrize("text", ["", "no json", "[]", '{"schema_version": NaN}'])
def test_a_damaged_file_is_refused(text) -> None:
    with pytest.raises(InputError):
        parse_profile(text, where="m.json", device="CPU", precision="fp32", contents={"x"}, model="gpt.py")


def test_lines_of_other_devices_are_left_out(problem, measured) -> None:
    facts = GraphFacts.of(problem.graph)
    contents = {content_key(problem.graph, facts, segment) for segment in problem.graph.segments}
    other = json.dumps(measured.rows[-1] | {"device": "NVIDIA H200", "forward_s": 1e9})
    found = parse_profile(
        measured.text + other, where="m", device="CPU", precision="fp32", contents=contents, model="gpt.py"
    )
    assert max(row.forward_s for row in found.segments) < 1e9


def test_a_profile_is_of_one_device_and_does_not_compare_several(hw, measured) -> None:
    with pytest.raises(UsageError):
        api.whatif(GPT, hw=(hw,), overrides=SIZES, n_samples=10, profile=str(measured.out))


def test_a_plan_in_another_precision_is_refused(problem) -> None:
    plan = replace(whole_plan(problem), precision="bf16", graph_hash=problem.graph.content_hash())
    with pytest.raises(InputError) as caught:
        api.score(problem, plan)
    assert "precision" in str(caught.value)


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
    monkeypatch.setattr("autoplan.profile.run.run_measurements", lambda files, **given: asked.append(given) or [])
    arguments = ["profile", str(MLP), "--set", "width=8", "--hw", hw, "--tp", "1", "--out", str(tmp_path / "m.json")]
    assert cli.run([*arguments, *fresh]) == 0
    assert [given["cache"] and given["cache"].name for given in asked] == [name]


def test_a_wrong_profile_on_the_command_line_exits_3(hw, measured, capsys) -> None:
    arguments = ["plan", str(MLP), "--hw", hw, "--precision", "fp32", "--profile", str(measured.out)]
    assert cli.run(arguments) == 3
    assert "measured.json: model: found 'gpt.py'" in capsys.readouterr().err
