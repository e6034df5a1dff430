"""Models whose own forward waits for the device, where nothing traces it: found in a run, not captured as they are."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autoplan import api
from autoplan.errors import UsageError
from autoplan.graph import graph_from_json, graph_to_json
from autoplan.options import Options
from autoplan.planning.problem import Problem, trace_model
from autoplan.tracing.host_reads import waiting_place

GPT2 = Path(__file__).parent / "families" / "gpt2_hf.py"
LLAMA = Path(__file__).parent.parent / "examples" / "llama.py"
SMALL = {"size": "1b", "n_layers": 2}


@pytest.fixture(scope="module")
def problem() -> Problem:
    """GPT-2 of Hugging Face, which looks whether a batch holds packed sequences."""
    return api.make_problem(GPT2, hw="dgx_h100_x8", options=Options(global_batch=8))


@pytest.mark.parametrize(
    "look",
    [
        lambda x: bool(x.all()),
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: torch.equal(x, x + 1),
        lambda x: x.nonzero(),
    ],
    ids=["bool", "item", "tolist", "cpu", "equal", "nonzero"],
)
def test_what_needs_values_of_the_device_waits(look) -> None:
    assert Path(__file__).name in waiting_place(lambda: look(torch.ones(4, device="meta")))


def test_what_the_users_code_does_about_errors_changes_nothing() -> None:
    def forward() -> None:
        with contextlib.suppress(BaseException):
            torch.ones(4, device="meta").sum().item()

    assert Path(__file__).name in waiting_place(forward)


def test_what_the_host_knows_waits_for_nothing() -> None:
    assert waiting_place(lambda: torch.ones(4).sum().item()) == ""
    assert waiting_place(lambda: torch.ones(4, device="meta").sum() * 2.0) == ""
    assert waiting_place(lambda: torch.ones(4, device="meta") @ torch.ones(3, device="meta")) == ""


def test_the_line_stands_beside_the_graph_and_changes_no_hash(problem: Problem) -> None:
    graph = problem.graph
    assert "masking_utils.py" in graph.waits_at
    assert trace_model(LLAMA, overrides=SMALL).waits_at == ""
    assert graph_from_json(graph_to_json(graph)) == graph
    assert replace(graph, waits_at="").content_hash() == graph.content_hash()
    assert "waits_at" not in graph_to_json(replace(graph, waits_at=""))  # as it was before there was such a field


def test_own_modules_that_wait_are_in_no_graph_and_generated_code_is(problem: Problem) -> None:
    answer = api.solve(problem)
    plans = [answer.best.plan, *(item.plan for item in (*answer.result.alternatives, *answer.result.baselines))]
    own = [plan for plan in plans if not plan.mesh.needs_generated_model]
    assert own and not any(plan.mesh.cuda_graph for plan in own)
    assert answer.best.plan.mesh.needs_generated_model and answer.best.plan.mesh.cuda_graph
    before = replace(own[0], mesh=replace(own[0].mesh, cuda_graph=True))  # as planned before this was known
    assert api.score(problem, before).best == api.score(problem, own[0]).best


def fixed(problem: Problem, **fix: str) -> Problem:
    return replace(problem, options=replace(problem.options, fix=tuple(fix.items())))


def test_a_graph_of_own_modules_that_wait_is_refused_with_the_line(problem: Problem) -> None:
    with pytest.raises(UsageError, match=r"masking_utils\.py(.|\n)*fix: leave generated=off out"):
        api.solve(fixed(problem, cuda_graph="on", generated="off", tp="1", pp="1"))


def test_shards_of_a_model_that_waits_may_be_a_graph_whatever_is_fixed_of_its_own_modules(problem: Problem) -> None:
    mesh = api.solve(fixed(problem, cuda_graph="on", generated="off", tp="2")).best.plan.mesh
    assert mesh.tp == 2 and mesh.cuda_graph


def test_where_no_graph_may_be_none_is_a_reason_to_generate(problem: Problem) -> None:
    space = api.solve(fixed(problem, cuda_graph="off", tp="1", pp="1")).result
    assert not any(item.plan.mesh.generated for item in (space.best, *space.alternatives))
