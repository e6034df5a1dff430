"""A step as a CUDA graph, on a CPU: when it is captured and replayed, what ends it, what is looked for and when."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed.launch import run_ranks
from torch import nn

from autoplan.runtime.seeds import host_state
from autoplan.runtime.stages import cuda_graph, recompute
from autoplan.runtime.stages.cuda_graph import StepGraph, _described, _is_like
from autoplan.runtime.stages.held_values import Watched, changed_between, held_by
from autoplan.runtime.stages.recompute import apply_recompute, recomputed_and_drawing


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


def imitate_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `StepGraph` asks of a GPU, on a CPU, where passes that are captured are computed too."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(StepGraph, "_on_own_stream", lambda self: nullcontext())


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """That for one process."""
    imitate_a_gpu(monkeypatch)
    monkeypatch.setattr(cuda_graph.dist, "get_rank", lambda: 0)


def step_graph(model: nn.Module, group: dist.ProcessGroup | None = None) -> tuple[StepGraph, list[int]]:
    """It, and how often its passes were computed."""
    n_passes: list[int] = []

    def passes(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        n_passes.append(1)
        loss = model(batch["x"]).sum()
        loss.backward()
        return loss.detach()

    return StepGraph(
        model, passes, parameters=list(model.named_parameters()), device=torch.device("cpu"), group=group
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


def replays_of_a_rank() -> list[int]:
    """How often it has replayed after each step in which ranks differ, and after those between."""
    imitate_a_gpu(pytest.MonkeyPatch())
    model, is_second = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), dist.get_rank() == 1
    graph, _ = step_graph(model, dist.new_group(backend="gloo"))
    for n in (2, 3 if is_second else 2, 2, 2):  # the second step puts the capture off on both
        graph.run(batch_of(n))
    recorded, found = graph._graph, []
    for n in (2, 3 if is_second else 2, 2):
        graph.run(batch_of(n))
        found.append(recorded.n_replays)
    model[1].p = 0.5 if is_second else 0.0
    graph.run(batch_of(2))
    return [*found, recorded.n_replays, graph._graph is None]


def test_no_rank_replays_where_another_has_other_shapes_or_a_changed_module() -> None:
    assert run_ranks(replays_of_a_rank, 2) == [[2, 2, 3, 3, True]] * 2
