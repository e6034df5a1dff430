"""Models that torch.export cannot follow, planned as whole modules: counts, what is offered, and exact programs."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributed.launch import run_program, run_ranks
from distributed.programs import check_programs, graph_of, make_plan, write_programs
from torch import nn

from autoplan import api, cli
from autoplan.analysis.model_flops import flops_per_sample
from autoplan.errors import InputError, TraceError, UsageError
from autoplan.graph import OPTIMIZER_WORDS, graph_from_json, graph_to_json
from autoplan.live import parallelize
from autoplan.options import Options
from autoplan.rules import LocalCall, load_rules
from autoplan.runtime.input_pipeline.batches import batch_slice, global_batch
from autoplan.tracing.model_source import load_model_file, model_source, module_source
from autoplan.tracing.module_level import trace_modules
from autoplan.tracing.trace import trace_model

ROOT = Path(__file__).parent.parent
DATA_DEPENDENT = ROOT / "tests" / "families" / "data_dependent.py"
TOLERANCE, N_STEPS = 1e-9, 2


@pytest.fixture(scope="module")
def graph():
    return graph_of("data_dependent")


def test_equal_blocks_are_one_kind_and_all_parameters_belong_to_what_is_outside(graph):
    assert [s.name for s in graph.segments] == ["outer.0", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "outer.1"]
    assert [s.kind for s in graph.segments] == [0, 1, 1, 1, 1, 2]
    assert graph.is_module_level
    assert set(graph.segments[0].parameters) == {p.name for p in graph.parameters}
    assert graph_from_json(graph_to_json(graph)) == graph


def test_flops_of_a_block_are_those_of_its_matrix_products(graph):
    (products,) = [op for op in graph.ops if op.name == "call_blocks_0_products"]
    # two products of [1, 32] with [32, 64] and back: 2 * 2 * 32 * 64 per sample, none without samples
    assert dict(products.kwargs)["flops"] == (0, 8192)
    assert dict(products.kwargs)["n_products"] == (2, 0)


def test_saved_bytes_of_a_block_are_its_activations(graph):
    (op,) = [op for op in graph.ops if op.name == "call_blocks_0"]
    # input 32, mean and 1 / deviation 1 + 1, norm's result 32, up's result 64, gelu's result 64
    assert dict(op.kwargs)["saved_elements"] == (0, 194)
    rule = load_rules()[op.target]
    for precision, item_bytes in (("bf16", 2), ("fp64", 8)):
        assert rule.extra_saved_bytes(LocalCall(op, (), (), (), 5, precision)) == 5 * 194 * item_bytes


def test_flops_and_parameters_agree_with_the_trace_where_both_are_possible():
    source = model_source(ROOT / "examples" / "gpt.py", {"n_layers": 2, "n_heads": 4, "width": 32, "context": 16})
    run, traced = trace_modules(source), trace_model(source)
    assert run.n_parameters() == traced.n_parameters()
    assert {p.aliases for p in run.parameters} == {p.aliases for p in traced.parameters}
    # causal attention is counted whole by the run and half by the trace: 2 products of 2 * heads * t * t * d FLOPs,
    # forward and twice that backward
    halved = 2 * 3 * (2 * 2 * 16 * 16 * 32) // 2
    assert flops_per_sample(run) == flops_per_sample(traced) + halved


def test_a_run_leaves_the_random_state_and_the_model_alone():
    torch.manual_seed(7)
    state = torch.get_rng_state()
    trace_modules(model_source(DATA_DEPENDENT, {}))
    assert torch.equal(torch.get_rng_state(), state)


def test_sizes_that_depend_on_data_are_taken_at_their_largest():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x):
            kept = x.flatten(0, 1)
            return self.blocks[0](kept[: 1 + 3 * (len(x) - 2)]).sum().expand(len(x))

    source = module_source(Masked(), (torch.ones(2, 8, 4), torch.ones(2)), nn.functional.mse_loss)
    source_on_cpu = type(source)(source.name, source.where, Masked, source.make_batch, source.loss_fn)
    (op,) = [op for op in trace_modules(source_on_cpu).ops if op.name == "call_blocks_0"]
    # 1 row of 2 samples and 4 rows of 3: at most 2 rows per sample
    assert op.outputs[0].at(3) == (6, 4)


def test_a_model_that_fails_names_the_line(tmp_path):
    text = DATA_DEPENDENT.read_text().replace("return self.head(x)", "return self.head(x[:, :3])")
    broken = tmp_path / "broken.py"
    broken.write_text(text)
    line = next(n for n, row in enumerate(text.splitlines(), 1) if "x[:, :3]" in row)
    with pytest.raises(TraceError, match=rf"broken\.py:{line}: return self\.head"):
        trace_modules(model_source(broken, {}))


def test_without_the_option_the_error_names_the_line_and_the_ways_out(capsys):
    assert cli.run(["plan", str(DATA_DEPENDENT), "--hw", "dgx_a100_x8"]) == 4
    error = capsys.readouterr().err
    line = next(n for n, row in enumerate(DATA_DEPENDENT.read_text().splitlines(), 1) if "x.mean() > " in row)
    assert f"data_dependent.py:{line}:" in error
    assert "def forward(self, arg" not in error  # torch's dump of its own graph
    assert all(way in error for way in ("torch.where", "torch.cond", "--module-level"))


def test_with_the_option_the_report_says_what_is_not_offered(capsys):
    arguments = ["plan", str(DATA_DEPENDENT), "--hw", "dgx_a100_x8", "--module-level", "--global-batch", "64"]
    assert cli.run(arguments) == 0
    report = " ".join(capsys.readouterr().out.split())
    assert "planned at module level" in report
    assert "no tensor or pipeline parallelism" in report


def test_only_data_parallelism_zero_and_recomputation_are_offered():
    answer = api.solve(problem(fix=()))
    meshes = [item.mesh for item in answer.result.rejected] + [answer.best.plan.mesh]
    assert {(mesh.tp, mesh.pp, mesh.compile) for mesh in meshes} == {(1, 1, False)}
    assert {0, 1, 2, 3} <= {mesh.zero_stage for mesh in meshes}
    recomputed = api.solve(problem(fix=(("recompute", "full"),)))
    assert recomputed.best.plan.stages[0].recomputed == (1, 2, 3, 4)


def test_recomputation_of_a_model_without_blocks_is_refused(tmp_path, capsys):
    model = tmp_path / "flat.py"
    model.write_text(
        "import torch\nfrom torch import nn\n"
        "def build_model():\n    return nn.Linear(8, 8)\n"
        "def make_batch(n):\n    return torch.randn(n, 8), torch.randn(n, 8)\n"
        "def loss_fn(y, t):\n    return (y - t).square().mean()\n"
    )
    assert cli.run(["plan", str(model), "--hw", "dgx_a100_x8", "--fix", "recompute=full"]) == 2
    assert "--fix recompute=full: found 'no block'" in capsys.readouterr().err


@pytest.mark.parametrize("degree", ["tp", "pp"])
def test_a_degree_that_is_not_offered_is_refused(degree):
    with pytest.raises(UsageError, match=f"{degree}=2 beside --module-level"):
        problem(fix=((degree, "2"),))
    assert problem(fix=((degree, "1"),)).options.fix == ((degree, "1"),)


def test_compiled_modules_are_refused_as_nothing_is_known_of_their_gain():
    with pytest.raises(UsageError, match=r"compile=on beside --module-level(.|\n)*fix: leave compile out"):
        problem(fix=(("compile", "on"),))
    assert problem(fix=(("compile", "off"),)).options.fix == (("compile", "off"),)
    asked = problem(fix=())
    plan = api.solve(asked).best.plan
    with pytest.raises(InputError, match=r"mesh\.compile"):
        api.score(asked, replace(plan, mesh=replace(plan.mesh, compile=True)))


def test_words_of_the_optimizer_are_no_reason_against_recomputation():
    asked = problem(fix=(("recompute", "full"),))
    words = (*asked.graph.dissolved, *OPTIMIZER_WORDS)
    assert api.solve(replace(asked, graph=replace(asked.graph, dissolved=words))).best.plan.recompute == "full"


def problem(*, fix):
    options = Options(module_level=True, global_batch=64, fix=fix)
    return api.make_problem(DATA_DEPENDENT, hw="dgx_a100_x8", options=options)


def cases(n_ranks):
    shard = {"zero_shard_degree": n_ranks}
    meshes = {
        "ddp": {"dp": n_ranks, "micro_batch_size": 2, "n_micro_batches": 2},
        "zero1": {"dp": n_ranks, "zero_stage": 1, "n_micro_batches": 2, **shard},
        "zero2": {"dp": n_ranks, "zero_stage": 2, "n_micro_batches": 2, **shard},
        "zero3": {"dp": n_ranks, "zero_stage": 3, "n_micro_batches": 2, **shard},
        "zero3_recompute": {"dp": n_ranks, "zero_stage": 3, "recompute": "full", **shard},
    }
    if n_ranks == 4:
        meshes["hsdp"] = {"dp": 4, "zero_stage": 3, "zero_shard_degree": 2, "n_micro_batches": 2}
    return {name: ("data_dependent", make_plan("data_dependent", **mesh)) for name, mesh in meshes.items()}


@pytest.mark.parametrize("n_ranks", [2, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 4))])
def test_programs_equal_one_process(tmp_path, n_ranks):
    chosen = (
        cases(n_ranks) if n_ranks > 1 else {"one": ("data_dependent", make_plan("data_dependent", recompute="half"))}
    )
    rows = write_programs(tmp_path, chosen)
    for differences in run_ranks(check_programs, n_ranks, str(tmp_path), rows, N_STEPS, timeout_s=300.0):
        for name, steps in differences.items():
            assert len(steps) == N_STEPS, name
            assert max(max(step) for step in steps) <= TOLERANCE, (name, steps)


def test_the_samples_of_these_programs_take_different_ways():
    model_file = load_model_file(DATA_DEPENDENT)
    torch.manual_seed(0)
    model = model_file.build_model().double()
    ways = set()
    for step in range(N_STEPS):
        batch = global_batch(model_file.make_batch, batch_size=4, seed=0, step=step)
        for i in range(4):
            inputs, targets = batch_slice(batch, i, i + 1)
            model.zero_grad()
            model_file.loss_fn(model(inputs.double()), targets).backward()
            ways.add(tuple(name for name, p in model.named_parameters() if p.grad is not None))
    assert len(ways) >= 3
    assert not any(name.startswith("never") for way in ways for name in way)


def test_an_emitted_folder_trains_like_one_process(tmp_path):
    asked = problem(fix=(("dp", "2"), ("zero", "3")))
    api.emit(asked, api.solve(asked), tmp_path / "out")
    run_program(tmp_path / "out", 2, "--steps", "2", "--device", "cpu", "--dtype", "float64", "--check")
    assert "is_module_level=True" in (tmp_path / "out" / "train.py").read_text()


def train_live():
    model_file = load_model_file(DATA_DEPENDENT)
    torch.manual_seed(0)
    module, batch = model_file.build_model(), model_file.make_batch(4)
    program = parallelize(
        module, batch, hw="dgx_a100_x8", loss_fn=model_file.loss_fn, device_type="cpu", **LIVE_OPTIONS
    )
    rank = program.mesh.dp_rank
    losses = [program.step(batch_slice(batch, 2 * rank, 2 * rank + 2)).item() for _ in range(3)]
    return program.config.is_module_level, losses


LIVE_OPTIONS = {"module_level": True, "precision": "fp32", "global_batch": 4, "fix": (("dp", "2"), ("zero", "2"))}


def test_a_live_module_is_planned_at_module_level_too():
    first, second = run_ranks(train_live, 2)
    assert first == second
    is_module_level, losses = first
    assert is_module_level
    # the weights move, and where they take the samples is up to the data
    assert all(math.isfinite(loss) for loss in losses) and len(set(losses)) == 3


def test_a_plan_that_was_edited_to_split_modules_is_refused():
    asked = problem(fix=(("dp", "2"),))
    plan = api.solve(asked).best.plan
    with pytest.raises(InputError, match="mesh.tp: found 2"):
        api.score(asked, replace(plan, mesh=replace(plan.mesh, tp=2)))
