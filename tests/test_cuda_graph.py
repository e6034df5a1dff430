"""CUDA graphs of a step's passes: where there may be one, what it gains, what the program and the report say of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from distributed.launch import run_program
from distributed.programs import MODELS, graph_of, shardings_of

from autoplan import api
from autoplan.checks.plan import check_plan
from autoplan.cost.price import GRAPH_RESERVED_RATIO, RESERVED_RATIO, make_pricer
from autoplan.cost.waits import start_s
from autoplan.errors import InputError, UsageError
from autoplan.hardware import HardwareProfile, load_hardware_profile
from autoplan.hardware.cluster import load_cluster
from autoplan.options import Options
from autoplan.parallel_plan import Mesh, StagePlan
from autoplan.planning.problem import trace_model
from autoplan.report.plan import plan_table
from autoplan.rules import load_rules
from autoplan.runtime import Config
from autoplan.search import search
from autoplan.search.result import Candidate
from autoplan.simulator.simulate import simulate
from autoplan.space.choices import capture_choices
from autoplan.space.mixed_space import check_mixed_options
from autoplan.space.priced import priced_space

EXAMPLES = Path(__file__).parent.parent / "examples"
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
PROFILE = load_hardware_profile("dgx_h100_x8")
RULES = load_rules()
ALWAYS, EITHER, NEVER = (True,), (True, False), (False,)
DROPPING = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop = nn.Linear(32, 32), nn.Dropout(0.1)
    def forward(self, x):
        rows = self.drop(F.relu(self.up(x))).unflatten(-1, (1, 4, 8))
        return x + F.scaled_dot_product_attention(rows, rows, rows).flatten(-3)

def build_model():
    return nn.Sequential(*(Block() for _ in range(4)))

def make_batch(batch_size):
    return torch.randn(batch_size, 32), torch.randn(batch_size, 32)

loss_fn = F.mse_loss
"""


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that drops elements at random."""
    path = tmp_path_factory.mktemp("dropping") / "model.py"
    path.write_text(DROPPING)
    return path


def _solved(model: Path, *fix: tuple[str, str], global_batch: int = 64, **overrides):
    options = Options(global_batch=global_batch, fix=fix)
    return api.solve(api.make_problem(model, hw="dgx_h100_x8", overrides=overrides, options=options))


def test_a_small_model_waits_for_the_host_and_its_plan_has_a_graph() -> None:
    found, without = _solved(EXAMPLES / "gpt.py"), _solved(EXAMPLES / "gpt.py", ("cuda_graph", "off"))
    assert found.best.plan.mesh.cuda_graph
    begins_s = start_s(PROFILE.device, n_devices=8)
    assert begins_s < found.best.estimate.breakdown.launch_s < 1.5 * begins_s  # some of it for the optimizer
    assert not without.best.plan.mesh.cuda_graph
    assert without.best.estimate.step_s > 1.5 * found.best.estimate.step_s
    assert "all of them with their passes as a CUDA graph" in plan_table(found)
    assert "graph" not in plan_table(without)


@pytest.mark.nightly
def test_a_plan_whose_host_is_ahead_goes_without_unless_one_is_asked_for() -> None:
    model, large = EXAMPLES / "llama.py", {"global_batch": 128, "size": "8b"}
    free, fixed = _solved(model, **large), _solved(model, ("cuda_graph", "on"), **large)
    assert not free.best.plan.mesh.cuda_graph
    # DDP has room for micro-batches of one sample only, and for no graph; FSDP and the hand rule have more
    sizes = [(item.plan.mesh.micro_batch_size, item.plan.mesh.cuda_graph) for item in free.result.baselines]
    assert sizes == [(1, False), (2, False), (8, False)]
    assert fixed.best.plan.mesh.cuda_graph
    assert free.best.estimate.step_s <= fixed.best.estimate.step_s * (1.0 + 1e-3)


def test_a_plan_whose_graph_may_not_fit_goes_without_or_is_another() -> None:
    graph = trace_model(EXAMPLES / "gpt.py")
    pinned = (("dp", "8"), ("tp", "1"), ("pp", "1"), ("zero", "0"), ("recompute", "none"), ("compile", "off"))

    def best(hardware: HardwareProfile, *fix: tuple[str, str]) -> Candidate | None:
        options = Options(fix=(*pinned, *fix))
        space = priced_space(graph, hardware, options, global_batch=64)
        return search(space.space, price=space.price, options=options, make_plan=space.make_plan).best

    roomy = best(PROFILE, ("micro_batch", "8"))
    assert roomy.plan.mesh.cuda_graph
    needed_bytes, allocated_bytes = max(roomy.estimate.needed_bytes), max(roomy.estimate.allocated_bytes)
    needed_bytes += round((GRAPH_RESERVED_RATIO - RESERVED_RATIO) * allocated_bytes)
    fitting, tight = (
        replace(PROFILE, device=replace(PROFILE.device, memory_bytes=needed_bytes + spare_bytes))
        for spare_bytes in (2, -(allocated_bytes // 100))
    )
    assert best(fitting, ("micro_batch", "8")).plan == roomy.plan
    without = best(tight, ("micro_batch", "8"))
    assert without.plan == replace(roomy.plan, mesh=replace(roomy.plan.mesh, cuda_graph=False))
    assert without.estimate.step_s > roomy.estimate.step_s
    assert best(tight, ("micro_batch", "8"), ("cuda_graph", "on")) is None
    other = best(tight)  # the graph of smaller micro-batches fits
    assert other.plan.mesh.cuda_graph
    assert other.estimate.step_s < without.estimate.step_s


def test_no_plan_is_slower_with_a_graph_which_needs_memory_for_a_batch_of_its_own() -> None:
    graph = graph_of("llama")
    shardings = {(2, key): found for key, found in shardings_of("llama", 2).items()}
    price = make_pricer(graph, hardware=PROFILE, precision="bf16", shardings=shardings, rules=RULES)
    context, stages = MODELS["llama"][1]["context"], (StagePlan(0, len(graph.segments)),)
    split = len(graph.segments) // 2
    halves = (StagePlan(0, split), StagePlan(split, len(graph.segments)))
    for mesh in (
        Mesh(dp=8, micro_batch_size=2),
        Mesh(dp=8, zero_stage=3, zero_shard_degree=8, n_micro_batches=4),
        Mesh(dp=4, tp=2, sharding="S(1)", zero_stage=1, zero_shard_degree=4),
        Mesh(dp=4, pp=2, n_micro_batches=8),
    ):
        plain, captured = (
            simulate(price(replace(mesh, cuda_graph=on)), stages if mesh.pp == 1 else halves) for on in (False, True)
        )
        assert captured.step_s < plain.step_s
        # ids and targets of 8 bytes, of all samples of a data-parallel rank
        batch_bytes = 2 * 8 * context * mesh.micro_batch_size * mesh.n_micro_batches
        for with_graph, without in zip(captured.needed_bytes, plain.needed_bytes, strict=True):
            assert with_graph - without == pytest.approx(RESERVED_RATIO * batch_bytes, abs=2)


@pytest.mark.parametrize(
    ("model", "options", "choices"),
    [
        ("gpt", Options(), (EITHER, EITHER, EITHER)),
        ("gpt", Options(fix=(("cuda_graph", "off"),)), (NEVER, NEVER, NEVER)),
        ("gpt", Options(precision="fp16"), (NEVER, NEVER, NEVER)),
        ("gpt", Options(fix=(("grad_compression", "bf16"),)), (NEVER, NEVER, NEVER)),
        pytest.param("mixture", Options(), (EITHER, EITHER, NEVER), marks=pytest.mark.nightly),
        ("mixture", Options(fix=(("cuda_graph", "on"),)), (ALWAYS, ALWAYS, ())),
    ],
    ids=lambda value: str(getattr(value, "fix", value) or getattr(value, "precision", value)),
)
def test_where_there_may_be_a_graph(model: str, options: Options, choices: tuple) -> None:
    file = EXAMPLES / "gpt.py" if model == "gpt" else BENCHMARKS / "models" / "mixture.py"
    assert capture_choices(trace_model(file), options, device=PROFILE.device) == choices


def test_recomputed_blocks_do_not_drop_elements_inside_a_graph(dropping: Path) -> None:
    graph = trace_model(dropping)
    assert capture_choices(graph, Options(), device=PROFILE.device) == (EITHER, EITHER, NEVER)
    assert capture_choices(graph, Options(fix=(("recompute", "full"),)), device=PROFILE.device) == (NEVER,) * 3
    space = priced_space(graph, PROFILE, Options(), global_batch=8)
    block = next(segment.kind for segment in graph.segments if segment.is_block)
    choices = {on: space.price(Mesh(dp=8, cuda_graph=on)).has_choice(block) for on in (False, True)}
    assert choices == {False: True, True: False}
    result = search(space.space, price=space.price, options=Options(top=8), make_plan=space.make_plan)
    assert result.best.plan.mesh.cuda_graph
    plans = [candidate.plan for candidate in (result.best, *result.alternatives)]
    assert not any(plan in plans[:number] for number, plan in enumerate(plans))  # also of those without their graphs


@pytest.mark.parametrize(
    ("fix", "found"),
    [
        ((("recompute", "full"),), "draw random numbers"),
        ((("grad_compression", "powersgd"),), "compressed by powersgd"),
        ((("tp", "2"),), "random numbers of their own"),
        ((("pp", "2"), ("schedule", "zero_bubble_v")), "split backward pass"),
    ],
)
def test_a_graph_that_cannot_be_is_refused(dropping: Path, fix: tuple, found: str) -> None:
    options = Options(fix=(("cuda_graph", "on"), *fix))
    with pytest.raises(UsageError, match=f"cuda_graph=on(.|\n)*{found}"):
        priced_space(trace_model(dropping), PROFILE, options, global_batch=8)


def test_a_plan_with_a_graph_that_cannot_be_is_refused(dropping: Path) -> None:
    graph = trace_model(dropping)
    space = priced_space(graph, PROFILE, Options(), global_batch=8)
    whole = StagePlan(0, len(graph.segments))
    plan = space.make_plan(Mesh(dp=8, cuda_graph=True), (whole,))
    check_plan(plan, graph, PROFILE)
    block = next(index for index, segment in enumerate(graph.segments) if segment.is_block)
    for wrong in (
        replace(plan, precision="fp16"),
        replace(plan, stages=(replace(whole, recomputed=(block,)),), recompute="selective"),
    ):
        with pytest.raises(InputError, match="cuda_graph"):
            check_plan(wrong, graph, PROFILE)
    for fields in (
        {"is_module_level": True},
        {"grad_compression": "bf16"},
        {"dp": 2, "shares": ((1, 1, 1), (1, 1, 2))},
    ):
        with pytest.raises(ValueError, match="cuda_graph"):
            Config(cuda_graph=True, **fields)


def test_no_plan_over_several_groups_has_a_graph() -> None:
    cluster = load_cluster(EXAMPLES / "a100_v100.toml")
    with pytest.raises(UsageError, match="cuda_graph(.|\n)*several groups"):
        check_mixed_options(Options(fix=(("cuda_graph", "on"),)), cluster)


def test_a_plan_that_went_without_its_graph_is_a_warm_start() -> None:
    graph = trace_model(EXAMPLES / "gpt.py")
    space = priced_space(graph, PROFILE, Options(), global_batch=8)
    split = len(graph.segments) // 2
    mesh = Mesh(dp=4, pp=2, n_micro_batches=2)
    known = space.make_plan(mesh, (StagePlan(0, split), StagePlan(split, len(graph.segments))))
    for warm_start in (None, known):
        judged = []
        search(
            space.space,
            price=lambda mesh, judged=judged: judged.append(mesh) or space.price(mesh),
            options=Options(time_limit_s=0.0),
            make_plan=space.make_plan,
            warm_start=warm_start,
        )
        assert (replace(mesh, cuda_graph=True) in judged) == (warm_start is known)


def test_a_warm_start_that_keeps_attention_needs_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoplan.search.spares_cheaply", lambda *_: True)
    graph, options = trace_model(EXAMPLES / "gpt.py"), Options(time_limit_s=0.0, fix=(("cuda_graph", "off"),))
    space = priced_space(graph, PROFILE, options, global_batch=8)
    split = len(graph.segments) // 2
    mesh = Mesh(dp=4, pp=2, n_micro_batches=2, keeps_attention=True)
    block = next(index for index, segment in enumerate(graph.segments) if segment.is_block)
    stages = StagePlan(0, split, recomputed=(block,)), StagePlan(split, len(graph.segments))
    known = space.make_plan(mesh, stages)
    judged: list[Mesh] = []
    search(
        space.space,
        price=lambda mesh: judged.append(mesh) or space.price(mesh),
        options=options,
        make_plan=space.make_plan,
        warm_start=known,
    )
    assert mesh in judged


def test_a_program_with_a_graph_runs_without_one_if_told_to_and_on_a_cpu(tmp_path: Path) -> None:
    options = Options(global_batch=4, fix=(("cuda_graph", "on"), ("compile", "off")))
    small = {"width": 32, "depth": 2}
    asked = api.make_problem(EXAMPLES / "mlp.py", hw="dgx_h100_x8/1", overrides=small, options=options)
    api.emit(asked, api.solve(asked), tmp_path / "program")
    for further in ([], ["--no-cuda-graph"]):
        run_program(
            tmp_path / "program", 1, "--device", "cpu", "--steps", "3", "--dtype", "float64", "--check", *further
        )


@pytest.mark.slow
def test_a_program_looks_for_changes_while_the_device_is_busy(tmp_path: Path) -> None:
    fixed = {"cuda_graph": "on", "compile": "off", "generated": "off", "micro_batch": "4", "recompute": "none"}
    options = Options(global_batch=4, fix=tuple(fixed.items()))
    small = {"n_layers": 1, "width": 16, "n_heads": 2, "text": str(EXAMPLES / "data" / "stories.txt")}
    asked = api.make_problem(EXAMPLES / "text_gpt.py", hw="dgx_h100_x8/1", overrides=small, options=options)
    api.emit(asked, api.solve(asked), tmp_path / "program")
    runner = tmp_path / "program" / "graph_on_a_cpu.py"
    runner.write_text((Path(__file__).parent / "distributed" / runner.name).read_text())
    command = [
        sys.executable,
        str(runner),
        "--device",
        "cpu",
        "--steps",
        "6",
        "--eval-every",
        "5",
        "--eval-batches",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = done.stdout.split("told: ")[1].split()
    # as it comes twice, nothing to look at yet; a capture; replays with no look in front; an evaluation, after which
    # there is one again
    step = ["replay", "ahead", "look"]
    assert told == ["ahead", "ahead", *step, *step, *step, "forget", "look", *step]
