"""CUDA graphs of a step's passes: where there may be one, what it gains, what the program and the report say of it."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed.programs import MODELS, graph_of, shardings_of
from torch import nn

from autoplan import api
from autoplan.checks.plan import check_plan
from autoplan.cost.price import RESERVED_RATIO, make_pricer
from autoplan.cost.waits import start_s
from autoplan.errors import InputError, UsageError
from autoplan.hardware import load_hardware_profile
from autoplan.hardware.cluster import load_cluster
from autoplan.options import Options
from autoplan.parallel_plan import Mesh, StagePlan
from autoplan.planning.problem import trace_model
from autoplan.report.plan import plan_table
from autoplan.rules import load_rules
from autoplan.runtime import Config, cuda_graph, recompute
from autoplan.runtime.cuda_graph import StepGraph, _described, _is_like
from autoplan.runtime.held_values import Watched, changed_between, held_by
from autoplan.runtime.recompute import apply_recompute, recomputed_and_drawing
from autoplan.runtime.seeds import host_state
from autoplan.search import search
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
    assert found.best.estimate.breakdown.launch_s == pytest.approx(begins_s, rel=0.02)  # and a little for the optimizer
    assert not without.best.plan.mesh.cuda_graph
    assert without.best.estimate.breakdown.launch_s > 0.5 * without.best.estimate.step_s
    assert "all of them with their passes as a CUDA graph" in plan_table(found)
    assert "graph" not in plan_table(without)


def test_a_plan_whose_host_is_ahead_goes_without_unless_one_is_asked_for() -> None:
    model, large = EXAMPLES / "llama.py", {"global_batch": 128, "size": "8b"}
    free, fixed = _solved(model, **large), _solved(model, ("cuda_graph", "on"), **large)
    assert not free.best.plan.mesh.cuda_graph
    assert not any(item.plan.mesh.cuda_graph for item in free.result.baselines)
    assert fixed.best.plan.mesh.cuda_graph
    assert free.best.estimate.step_s <= fixed.best.estimate.step_s * (1.0 + 1e-3)


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
        ("gpt", Options(), (ALWAYS, ALWAYS, ALWAYS)),
        ("gpt", Options(fix=(("cuda_graph", "off"),)), (NEVER, NEVER, NEVER)),
        ("gpt", Options(precision="fp16"), (NEVER, NEVER, NEVER)),
        ("gpt", Options(fix=(("grad_compression", "bf16"),)), (NEVER, NEVER, NEVER)),
        ("mixture", Options(), (ALWAYS, ALWAYS, NEVER)),
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
        command = [sys.executable, "train.py", "--device", "cpu", "--steps", "3", "--dtype", "float64", "--check"]
        command += further
        done = subprocess.run(command, cwd=tmp_path / "program", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


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


def test_a_batch_is_like_another_one_whatever_its_numbers() -> None:
    batch = ({"ids": torch.zeros(4, 8), "n": 3}, torch.zeros(4))
    assert _is_like(({"ids": torch.ones(4, 8), "n": 3}, torch.ones(4)), _described(batch))
    for other in (
        ({"ids": torch.zeros(4, 9), "n": 3}, torch.zeros(4)),
        ({"ids": torch.zeros(4, 8), "n": 4}, torch.zeros(4)),
        ({"ids": torch.zeros(4, 8), "n": 3}, torch.zeros(4, dtype=torch.int64)),
        ({"ids": torch.zeros(4, 8)}, torch.zeros(4)),
        ({"n": 3, "ids": torch.zeros(4, 8), "mask": torch.zeros(4)}, torch.zeros(4)),
        ({"ids": torch.zeros(4, 8), "n": np.arange(3)}, torch.zeros(4)),
    ):
        assert not _is_like(other, _described(batch))


@pytest.mark.parametrize("is_captured", [False, True])
def test_random_state_is_restored_for_recomputation_but_where_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, is_captured: bool
) -> None:
    drawn = iter(range(100))
    monkeypatch.setattr(recompute, "is_captured", lambda: is_captured)
    monkeypatch.setattr(recompute, "_numbers_drawn", lambda: next(drawn))  # every call draws some
    dropout = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    model = nn.Sequential(nn.Linear(64, 64), dropout)
    apply_recompute(model, ["1"])
    x = torch.ones(2, 64)
    result = model(x)
    kept = (result != 0).float()
    result.sum().backward()
    gradient = 2 * kept.sum(0)  # 1 / (1 - p) of each that was kept
    assert torch.equal(dropout[0].bias.grad, gradient) == (not is_captured)
    assert recomputed_and_drawing(model) == ["1"]


class Changing(nn.Module):
    """Counts its calls, also in a dict, replaces a buffer and a tensor, writes into another buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("written", torch.zeros(4))
        self.n_calls, self.scale, self.last = 0, float("nan"), torch.zeros(4)
        self.state = {"calls": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_calls += 1
        self.state["calls"] += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.last = x.detach()
        self.written.copy_(x.detach().mean(0))
        return self.scale * x


@pytest.mark.parametrize("n_calls", [1, 2, 3])
def test_what_a_module_puts_elsewhere_in_forward_is_named_and_what_it_writes_in_place_is_not(n_calls: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Changing(), nn.BatchNorm1d(4), nn.Dropout(0.5))
    held, drawn = held_by(model), host_state()
    model[0](torch.ones(2, 4)).sum().backward()
    assert changed_between(held, held_by(model)) == [] and drawn == host_state()
    for _ in range(n_calls):  # what the first call made may lie where the next one makes its own
        model(torch.ones(2, 4)).sum().backward()
    assert sorted(changed_between(held, held_by(model))) == [
        f"1.{name} changes in forward" for name in ("last", "mean", "n_calls", "state.calls")
    ]
    assert drawn != host_state()  # on a CPU, dropout draws on the host


CHANGES = {
    "0.training": lambda model: model[0].eval(),
    "1.p": lambda model: setattr(model[1], "p", 0.1),
    "2.last": lambda model: setattr(model[2], "last", torch.ones(4)),
    "2.state.calls": lambda model: model[2].state.update(calls=3),
    "2.new": lambda model: setattr(model[2], "new", 1),
    "2.mean": lambda model: setattr(model[2].mean, "data", torch.ones(4)),
    "1": lambda model: model.__setitem__(1, nn.Dropout(0.5)),
    "parameter weight": lambda model: setattr(model[0].weight, "data", torch.ones(4, 4)),
    "parameter bias": lambda model: model[0].bias.requires_grad_(False),
    "parameter 3.bias": lambda model: setattr(model[3].bias, "data", torch.ones(4)),  # frozen before
}


@pytest.mark.parametrize("changed", CHANGES)
def test_what_is_changed_between_steps_is_named(changed: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), Changing(), nn.LayerNorm(4))
    model[3].requires_grad_(False)
    model[3].weight = None
    watched = Watched(model, list(model[0].named_parameters()))
    assert watched.changes() == []
    CHANGES[changed](model)
    assert watched.changes() == watched.changes() == [f"{changed} changes since it was captured"]


def test_equal_values_and_new_contents_are_no_change() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Changing())
    watched = Watched(model, list(model.named_parameters()))
    model[1].state = {"calls": 0}
    model[1].mean.add_(1)
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert watched.changes() == watched.changes() == []
    model[1].state["calls"] = 1
    assert watched.changes() == ["1.state.calls changes since it was captured"]


def test_looking_for_changes_makes_none() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].seen = defaultdict(list, a=[1])
    watched = Watched(model, ())
    del model[0].seen["a"]
    model[0].seen["b"] = [1]
    assert sorted(watched.changes()) == [f"0.seen.{key}.0 changes since it was captured" for key in "ab"]
    assert dict(model[0].seen) == {"b": [1]}


def test_both_copies_of_a_tied_weight_are_watched() -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    for copy in model:
        watched = Watched(model, [("weight", module.weight) for module in model])
        copy.weight.data = torch.ones(4, 4)
        assert watched.changes() == ["parameter weight changes since it was captured"]


class Recorded:
    """In place of a CUDA graph: counts its replays."""

    def __init__(self) -> None:
        self.n_replays = 0

    def replay(self) -> None:
        self.n_replays += 1


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `StepGraph` asks of a GPU, on a CPU, where passes that are captured are computed too."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(StepGraph, "_on_own_stream", lambda self: nullcontext())
    monkeypatch.setattr(cuda_graph.dist, "get_rank", lambda: 0)


def step_graph(model: nn.Module) -> tuple[StepGraph, list[int]]:
    """It, and how often its passes were computed."""
    n_passes: list[int] = []

    def passes(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        n_passes.append(1)
        loss = model(batch["x"]).sum()
        loss.backward()
        return loss.detach()

    return StepGraph(
        model, passes, parameters=list(model.named_parameters()), device=torch.device("cpu"), group=None
    ), n_passes


def batch_of(n: int, value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"x": torch.full((n, 4), value), "y": torch.zeros(n)}


def test_the_third_step_is_captured_and_later_ones_are_replayed(
    on_a_cpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))
    graph, n_passes = step_graph(model)
    for _ in range(5):
        graph.run(batch_of(2))
    recorded = graph._graph
    assert len(n_passes) == 3 and recorded.n_replays == 3 and model[0].weight.grad is not None
    graph.run(batch_of(2, 7.0))
    assert torch.equal(graph._batch["x"], torch.full((2, 4), 7.0))

    for _ in range(2):  # as they come, and the graph stays
        graph.run(batch_of(3))
    graph.run(dict(reversed(batch_of(2).items())))  # in another order
    assert len(n_passes) == 6 and recorded.n_replays == 4 and capsys.readouterr().err.count("other shapes") == 1
    graph.run(batch_of(2))
    assert recorded.n_replays == 5

    model[1].p = 0.5
    graph.run(batch_of(2))
    graph.run(batch_of(2))
    assert len(n_passes) == 8 and recorded.n_replays == 5
    assert capsys.readouterr().err.count("given up, so steps take longer than planned: 1.p changes") == 1
    assert graph._graph is graph._batch is graph._watched is None and graph._gradients == []


def test_gradients_are_those_of_one_step_however_it_runs(on_a_cpu: None) -> None:
    model = nn.Linear(4, 1)
    graph, _ = step_graph(model)
    found = []
    for n in (2, 2, 2, 2, 3, 2):  # two as they come, the capture, a replay, one of another shape, a replay
        graph.run(batch_of(n))
        found.append(model.bias.grad)
    assert [float(gradient) for gradient in found[:2] + found[4:5]] == [2.0, 2.0, 3.0]
    assert found[2] is found[3] is found[5]  # where the capture put them


def test_changes_that_were_looked_for_ahead_are_not_looked_for_again(
    on_a_cpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))
    graph, _ = step_graph(model)
    graph.look_ahead()  # there is no graph yet
    for _ in range(3):
        graph.run(batch_of(2))
    recorded = graph._graph
    graph.look_ahead()
    model[1].p = 0.5
    graph.run(batch_of(2))
    assert recorded.n_replays == 2 and not capsys.readouterr().err
    graph.look_ahead()
    graph.run(batch_of(2))
    assert recorded.n_replays == 2 and "1.p changes" in capsys.readouterr().err


def test_after_an_evaluation_changes_are_looked_for_again(on_a_cpu: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))
    graph, _ = step_graph(model)
    for _ in range(3):
        graph.run(batch_of(2))
    recorded = graph._graph
    graph.look_ahead()
    model[1].p = 0.5
    graph.forget_seen()
    graph.run(batch_of(2))
    assert recorded.n_replays == 1 and graph._graph is None


def test_a_batch_of_another_shape_puts_the_capture_off(on_a_cpu: None) -> None:
    graph, n_passes = step_graph(nn.Sequential(nn.Linear(4, 4)))
    for n in (2, 2, 3, 2):
        graph.run(batch_of(n))
        assert graph._graph is None
    graph.run(batch_of(2))
    assert len(n_passes) == 5 and graph._graph.n_replays == 1
    graph.run(batch_of(3))
    graph.run(batch_of(2))
    assert len(n_passes) == 6 and graph._graph.n_replays == 2


def test_a_recomputed_block_that_draws_is_noticed_before_the_capture(
    on_a_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = iter(range(100))
    monkeypatch.setattr(recompute, "_numbers_drawn", lambda: next(drawn))  # every call draws some
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))
    apply_recompute(model, ["1"])
    graph, n_passes = step_graph(model)
    for _ in range(4):
        graph.run(batch_of(2))
    assert len(n_passes) == 4 and graph._graph is None
    assert "not captured, so steps take longer than planned: 1, recomputed, draws" in capsys.readouterr().err


def test_nothing_is_captured_where_a_replay_would_miss_something(
    on_a_cpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, n_passes = step_graph(nn.Sequential(nn.Linear(4, 4), Changing()))
    for _ in range(4):
        graph.run(batch_of(2))
    said = capsys.readouterr().err
    assert len(n_passes) == 4 and graph._graph is None
    assert said.count("not captured") == 1 and said.rstrip().endswith("; and 1 more"), said
