"""Buffers under 16-bit precision: running statistics and widened frequencies stay in float32, tables do not."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path

import pytest
import torch
from distributed import tiny_norm
from distributed.launch import run_ranks
from distributed.programs import graph_of, make_plan, write_programs
from torch import nn

from autoplan import api
from autoplan.analysis.float32_buffers import float32_buffers, float32_values, patterns
from autoplan.codegen import config_values
from autoplan.cost.rank_segments import rank_segments
from autoplan.cost.work_context import work_contexts
from autoplan.hardware import load_hardware_profile
from autoplan.rules import load_rules
from autoplan.runtime import Config, ParallelModel, build_rank_mesh
from autoplan.runtime.building.buffers import cast_buffers
from autoplan.tracing.model_source import module_source
from autoplan.tracing.trace import trace_model

FAMILIES = Path(__file__).parent / "families"
WIDTH, LENGTH = 4, 6
N_STEPS = 30


class Positions(nn.Module):
    """Adds features of positions, from a buffer."""

    def __init__(self, buffer: torch.Tensor, features) -> None:
        super().__init__()
        self.linear, self.features = nn.Linear(WIDTH, WIDTH), features
        self.register_buffer("held", buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.features(self.held, torch.arange(LENGTH, device=x.device)).to(x.dtype)


def kept_of(buffer, features) -> frozenset[str]:
    x = torch.zeros(2, LENGTH, WIDTH)
    graph = trace_model(module_source(Positions(buffer, features), (x, x), nn.functional.mse_loss))
    return float32_buffers(graph)


# ---------------------------------------------------------------- which


FREQUENCIES, TABLE = torch.ones(WIDTH), torch.ones(2 * LENGTH, WIDTH)


@pytest.mark.parametrize(
    ("buffer", "features", "is_kept"),
    [
        (FREQUENCIES, lambda held, at: (at[:, None].float() * held[None].float()).cos(), True),
        (FREQUENCIES, lambda held, at: torch.outer(at.float(), held).cos(), True),  # float32 times 16 bits is float32
        (FREQUENCIES, lambda held, at: held[None].expand(LENGTH, WIDTH).float() + held.float().sum(), True),
        (FREQUENCIES, lambda held, at: held.float() + held.cos(), False),  # once as it is
        (TABLE, lambda held, at: held[at], False),
        (TABLE, lambda held, at: held[at].float().sin(), True),
        (torch.ones(LENGTH, dtype=torch.int64), lambda held, at: held[:, None].float(), False),
    ],
)
def test_what_forward_widens_before_it_computes_stays_in_float32(buffer, features, is_kept) -> None:
    assert kept_of(buffer, features) == ({"held"} if is_kept else set())


@pytest.mark.nightly
def test_rotary_frequencies_of_hugging_face_stay_in_float32() -> None:
    found = float32_buffers(api.trace_model(FAMILIES / "decoder_hf.py"))
    assert found == {"model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"}


def test_running_statistics_stay_in_float32() -> None:
    graph = graph_of("resnet")
    statistics = {p.name for p in graph.parameters if p.name.endswith(("running_mean", "running_var"))}
    assert float32_buffers(graph) == float32_values(graph) == statistics and statistics


def test_names_are_one_pattern_unless_that_fits_another_buffer() -> None:
    names = {"a.0.norm.mean", "a.1.norm.mean", "b1.mean"}
    assert patterns(names) == ("a.*.norm.mean", "b1.mean")
    assert patterns(names, others=["a.2.norm.mean"]) == ("a.0.norm.mean", "a.1.norm.mean", "b1.mean")
    module = nn.Module()
    module.a = nn.ModuleList(nn.Module() for _ in range(3))
    for child in module.a:
        child.register_buffer("mean", torch.ones(2))
    cast_buffers(module, torch.bfloat16, kept=["a.0.mean", "a.1.mean"])
    assert [child.mean.dtype for child in module.a] == [torch.float32, torch.float32, torch.bfloat16]


def test_the_runtime_knows_norms_of_the_user_and_is_told_the_rest() -> None:
    def values(model, **mesh):
        plan = dataclasses.replace(make_plan(model, **mesh), precision="bf16")
        return config_values(graph_of(model), plan).get("float32_buffers", ())

    assert values("resnet", dp=2) == ()
    assert set(values("resnet", pp=2, n_micro_batches=2)) >= {"stem.*.running_mean", "groups.*.*.bn1.running_var"}


def test_memory_counts_them_in_float32() -> None:
    # the stem: one BatchNorm of 8 channels, mean and variance of 4 bytes, and a count of 8
    graph, hardware = graph_of("resnet"), load_hardware_profile("h200_x4")
    contexts = {name: work_contexts(graph, hardware, name, load_rules())(1) for name in ("bf16", "fp32")}
    fixed = {name: [s.fixed_bytes for s in rank_segments(c).local(()).values()] for name, c in contexts.items()}
    assert fixed["bf16"] == fixed["fp32"] and fixed["bf16"][1] == 8 * 2 * 4 + 8


# ---------------------------------------------------------------- training


def batches():
    torch.manual_seed(0)
    return [tiny_norm.make_batch(4) for _ in range(N_STEPS)]


def statistics_after_training(precision, *, casts_all=False):
    """Running statistics of one process after some steps; `casts_all` as they were without float32 buffers."""
    zero = importlib.import_module("autoplan.runtime.stages.zero")
    cast = zero.cast_buffers
    config = Config(dp=2, precision=precision, micro_batch_size=4, blocks=("blocks.0",))
    if casts_all:
        stage_order = importlib.import_module("autoplan.runtime.stages.stage_order")
        stage_order.normalize_in_float32 = lambda stage: None
        zero.cast_buffers = lambda root, dtype, **_: [cast(leaf, dtype) for leaf in plain_leaves(root)]
    model = ParallelModel(config, tiny_norm, mesh=build_rank_mesh(config, "cpu"), seed=3, learning_rate=0.0)
    for batch in batches():
        model.step(batch)
    dtypes = {name: str(buffer.dtype) for name, buffer in model.full_buffers()}
    return {name: buffer.double() for name, buffer in model.full_buffers() if "running" in name}, dtypes


def plain_leaves(root):
    """Modules that hold the same buffers and are no norms."""
    for module in root.modules():
        leaf = nn.Module()
        leaf._buffers = module._buffers
        yield leaf


def compare_statistics():
    """Largest relative error of the running statistics against float32: in bf16 as it is, and as it was."""
    expected, _ = statistics_after_training("fp32")
    found, dtypes = statistics_after_training("bf16")
    before, dtypes_before = statistics_after_training("bf16", casts_all=True)

    def error(statistics):
        return max(((statistics[n] - x).abs().max() / x.abs().max()).item() for n, x in expected.items())

    return error(found), error(before), dtypes, dtypes_before


PROGRAMS = {
    "own": ({"dp": 2, "zero_stage": 2, "zero_shard_degree": 2, "n_micro_batches": 1}, "synchronized"),
    "pp2": ({"pp": 2, "n_micro_batches": 2}, "local"),
    "tp2": ({"tp": 2, "sharding": "R", "n_micro_batches": 1}, "local"),
}


def train_and_resume(runtime, root, row):
    """Dtypes of buffers in memory and in a checkpoint, and whether a resumed run is the same."""
    name, overrides, fields, is_rewritten = row
    config, model_file = runtime.Config(**fields), importlib.import_module(f"model_{name}")
    parallel = importlib.import_module(f"parallel_{name}") if is_rewritten else None
    mesh = runtime.build_rank_mesh(config, "cpu")
    drawn = [
        runtime.global_batch(model_file.make_batch, batch_size=config.global_batch_size, seed=0, step=step)
        for step in range(4)
    ]
    own = [runtime.local_batch(batch, config=config, dp_rank=mesh.dp_rank) for batch in drawn]

    def built():
        return runtime.ParallelModel(config, model_file, parallel, mesh=mesh, overrides=overrides, seed=0)

    model = built()
    checkpoints = runtime.Checkpoints(model, Path(root, "checkpoints", name))
    for batch in own[:2]:
        model.step(batch)
    checkpoints.save()
    checkpoints.close()
    first = [model.step(batch).item() for batch in own[2:]]
    again = built()
    checkpoints = runtime.Checkpoints(again, Path(root, "checkpoints", name))
    checkpoints.load(checkpoints.newest())
    second = [again.step(batch).item() for batch in own[2:]]
    same = [torch.equal(a, b) for (_, a), (_, b) in zip(model.full_buffers(), again.full_buffers(), strict=True)]
    shared = config.batch_norm == "synchronized" or config.dp == 1  # else a checkpoint holds those of one rank
    model.evaluate(own[0])
    pieces = importlib.import_module("runtime.checkpoints.state").buffer_pieces(model)
    saved = {str(piece.tensor.dtype) for piece in pieces if "running" in piece.key}
    held = {str(buffer.dtype) for buffer_name, buffer in model.full_buffers() if "running" in buffer_name}
    return held, saved, first == second and (all(same) or not shared)


def train(root, rows):
    """On one rank: all that is tried below."""
    sys.path.insert(0, root)
    runtime = importlib.import_module("runtime")
    programs = {row[0]: train_and_resume(runtime, root, row) for row in rows}
    return programs, compare_statistics()


def written(root, names):
    cases = {
        f"{name}_{way}": (
            "resnet",
            dataclasses.replace(make_plan("resnet", micro_batch_size=2, **mesh), precision="bf16", batch_norm=way),
        )
        for name in names
        for mesh, way in [PROGRAMS[name]]
    }
    return str(root), write_programs(root, cases)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run_ranks(train, 2, *written(tmp_path_factory.mktemp("programs"), ["own", "pp2"]), timeout_s=200.0)


def test_running_statistics_in_bf16_follow_those_of_a_run_in_float32(trained):
    for _, (error, before, dtypes, dtypes_before) in trained:
        assert error < before / 3, (error, before)
        assert {dtypes[name] for name in dtypes if "running" in name} == {"torch.float32"}
        assert {dtypes_before[name] for name in dtypes if "running" in name} == {"torch.bfloat16"}


def test_statistics_are_float32_in_programs_and_checkpoints_and_a_resumed_run_is_the_same(trained):
    for found, _ in trained:
        assert len(found) == 2
        for name, (held, saved, is_same) in found.items():
            assert held == saved == {"torch.float32"} and is_same, name


@pytest.mark.nightly
def test_statistics_of_shards_of_channels_are_float32_too(tmp_path):
    for found, _ in run_ranks(train, 2, *written(tmp_path, ["tp2"]), timeout_s=200.0):
        assert found == {"tp2_local": ({"torch.float32"}, {"torch.float32"}, True)}
