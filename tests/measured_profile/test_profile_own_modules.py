"""Measured profiles: blocks as the user's own modules."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from functools import cache, partial

import pytest
from profile_rows import (
    BATCHES,
    CHECKOUT,
    quick,
    segment_rows,
    whole_plan,
)

from autoplan import api
from autoplan.graph import GraphFacts
from autoplan.measure_model.run import run_measurements
from autoplan.measured_profile.segment_key import WHOLE, content_key
from autoplan.measured_profile.segment_times import SegmentTime, parse_measured_profile
from autoplan.options import Options
from autoplan.parallel_plan import StagePlan
from autoplan.report.measured_profile import results_table
from autoplan.space.priced import price_plan

pytest_plugins = ["profile_fixtures"]

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


@pytest.fixture(scope="module")
def measured_family(hw, tmp_path_factory):
    """The rows and the problem of a family, measured when it is first asked for."""

    @cache
    def measured(family):
        model, out = FAMILIES / f"{family}.py", tmp_path_factory.mktemp(family) / "m.json"
        return measure_at_degree_1(model, hw, out), file_problem(model, hw, out)

    return measured


@pytest.mark.parametrize(
    "family", ["gpt2_hf", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("t5_hf", "resnet", "vit_hf"))]
)
def test_each_kind_of_block_is_also_measured_as_the_users_own_module(family, measured_family) -> None:
    rows, problem = measured_family(family)
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


@pytest.mark.parametrize(
    "family", ["vit_hf", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("resnet", "gpt2_hf", "t5_hf"))]
)
def test_an_own_module_called_alone_gives_what_it_gives_inside_of_the_model(family, tmp_path, monkeypatch) -> None:
    # the results that it makes, not what it hands on, have the shapes of a plain forward pass of the whole model
    torch = pytest.importorskip("torch")
    from autoplan import runtime
    from autoplan.measuring_program.own import OwnModel
    from autoplan.measuring_program.timing import tensors_of
    from autoplan.tracing.trace import call_model

    (tmp_path / "model.py").write_text((FAMILIES / f"{family}.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "runtime", runtime)  # beside it in the folder that measures
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


def test_a_plan_of_two_stages_takes_the_generated_times_and_one_of_one_stage_the_own_ones(measured_family) -> None:
    rows, problem = measured_family("gpt2_hf")
    n_segments = len(problem.graph.segments)
    whole = whole_plan(problem)
    stages = StagePlan(0, n_segments // 2), StagePlan(n_segments // 2, n_segments)
    cut = replace(whole, mesh=replace(whole.mesh, pp=2), stages=stages)
    kind = next(kind for kind, segment in problem.graph.first_of_kind().items() if segment.is_block)
    for plan, module in ((whole, "own"), (cut, "generated")):
        (row,) = segment_rows(rows, segment="transformer.h.0", micro_batch_size=1, module=module)
        cost = price_plan(problem.graph, problem.hardware, plan, measured=problem.measured).costs[kind][0]
        assert (cost.forward_s, cost.backward_s) == (row["forward_s"], row["backward_s"])
    # where the block was measured as the user's own class only, generated code is taken to gain as much; not in bytes
    content = content_key(problem.graph, GraphFacts.of(problem.graph), problem.graph.first_of_kind()[kind])
    segments = [s for s in problem.measured.segments if s.content != content or (s.is_own and s.micro_batch_size == 1)]
    table = price_plan(problem.graph, problem.hardware, cut, measured=replace(problem.measured, segments=segments))
    (row,) = segment_rows(rows, segment="transformer.h.0", micro_batch_size=1, module="own")
    assert table.costs[kind][0].forward_s == pytest.approx(row["forward_s"])
    computed = price_plan(problem.graph, problem.hardware, cut)
    assert table.costs[kind][0].saved_bytes == computed.costs[kind][0].saved_bytes
    assert "calibrated" in table.sources


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
    found = parse_measured_profile(text, where="m", device="CPU", precision="fp32", contents={"c"}, model="m")
    assert found.rows({}) == (row,)
    assert [own.host_forward_s for own in found.rows({}, keeps_modules=True)] == [6.5, 6.5]


@pytest.mark.nightly
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
    assert set(price_plan(problem.graph, problem.hardware, whole_plan(problem), measured=problem.measured).sources) == {
        "measured"
    }
