"""Blocks that torch compiles wrongly are not compiled: those that compute with buffers which they change in place."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoplan import api
from autoplan.analysis.uncompiled import why_uncompiled
from autoplan.checks.fixes import check_fixed
from autoplan.checks.plan import check_plan
from autoplan.errors import InputError, UsageError
from autoplan.hardware import load_hardware_profile
from autoplan.options import Options
from autoplan.parallel_plan import Execution
from autoplan.runtime.stages.compiled import compiled
from autoplan.space.choices import executions
from autoplan.tracing.model_source import ModelSource
from autoplan.tracing.trace import trace_model

WIDTH, CPU = 4, torch.device("cpu")
H200_X4 = load_hardware_profile("h200_x4")


class Block(nn.Module):
    """A linear layer, and what `change` does to its result and a buffer of ones."""

    def __init__(self, change, *shape):
        super().__init__()
        self.change, self.layer = change, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(shape))

    def forward(self, x):
        return x + self.change(F.gelu(self.layer(x)), self.scale)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return x + self.norm(self.layer(x))


def read_after(h, scale):
    scale.mul_(0.9).add_(h.detach().square().mean(0), alpha=0.1)
    return h / scale


def read_before(h, scale):
    y = h * scale.exp()
    scale.add_(1.0)
    return y


def only_written(h, scale):
    scale.mul_(0.9).add_(h.detach().square().mean(), alpha=0.1)
    return h


def replaced(h, scale):
    scale.copy_(h.detach().square().mean(0))
    return h / scale


def only_read(h, scale):
    return h * scale.exp()


class Net(nn.Module):
    """Two blocks, and a head behind them."""

    def __init__(self, block, head):
        super().__init__()
        self.blocks, self.head, self.last = nn.ModuleList((block(), block())), head(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(self.head(x))


def graph_of(block, *, head=nn.Identity):
    def make_batch(batch_size):
        return torch.randn(batch_size, WIDTH), torch.randn(batch_size, 1)

    return trace_model(ModelSource("toy", "toy", lambda: Net(block, head), make_batch, F.mse_loss))


def block_of(change, *shape):
    return lambda: Block(change, *shape)


def ways(graph, **options):
    return executions(graph, Options(**options), None, device=H200_X4.device)


@pytest.mark.parametrize("change", [read_after, read_before])
def test_blocks_that_compute_with_a_buffer_that_they_change_stay_eager(change) -> None:
    graph = graph_of(block_of(change, WIDTH))
    assert "blocks.0.scale, a buffer that forward computes with and changes in place" in why_uncompiled(graph)
    assert ways(graph) == (Execution(),)
    with pytest.raises(UsageError, match=r"--fix compile=on: found .blocks\.0\.scale, (.|\n)*leave compile out"):
        check_fixed(graph, Options(fix=(("compile", "on"),)))


def test_blocks_that_change_a_buffer_of_one_number_stay_eager_whether_or_not_it_is_read() -> None:
    """torch in float64 on a CPU leaves out that it is written."""
    graph = graph_of(block_of(only_written))
    assert "blocks.0.scale, a buffer of one number" in why_uncompiled(graph)


@pytest.mark.parametrize("block", [block_of(only_written, WIDTH), block_of(only_read, WIDTH), Normed])
def test_statistics_that_are_only_kept_and_buffers_that_stay_are_compiled_right(block) -> None:
    assert why_uncompiled(graph_of(block)) == ""
    assert Execution(compile=True) in ways(graph_of(block))
    _check_compiled(block)


def test_a_buffer_that_takes_a_value_not_made_of_it_is_compiled_right() -> None:
    assert why_uncompiled(graph_of(block_of(replaced, WIDTH))) == ""
    _check_compiled(block_of(replaced, WIDTH))


def test_what_stands_outside_of_blocks_is_not_compiled_and_no_reason() -> None:
    graph = graph_of(lambda: nn.Linear(WIDTH, WIDTH), head=block_of(read_after, WIDTH))
    assert why_uncompiled(graph) == ""


def test_the_plan_says_why_nothing_is_compiled(tmp_path) -> None:
    model = tmp_path / "toy.py"
    model.write_text(
        "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n\n\n"
        "class Block(nn.Module):\n"
        "    def __init__(self, width):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(width, width)\n"
        "        self.register_buffer('scale', torch.ones(width))\n\n"
        "    def forward(self, x):\n"
        "        self.scale += 1\n"
        "        return x + self.layer(x) * self.scale\n\n\n"
        "def build_model(width: int = 4096):\n"
        "    return nn.Sequential(*(Block(width) for _ in range(4)))\n\n\n"
        "def make_batch(n):\n"
        "    return torch.randn(n, 4096), torch.randn(n, 4096)\n\n\n"
        "loss_fn = F.mse_loss\n"
    )
    problem = api.make_problem(str(model), hw="h200_x4", options=Options(global_batch=4096))
    answer = api.solve(problem)
    assert not answer.best.plan.mesh.compile
    assert any("Nothing is compiled" in text and "0.scale" in text for text in answer.workload.limits)
    plan = answer.best.plan
    with pytest.raises(InputError, match=r"mesh\.compile(.|\n)*0\.scale"):
        check_plan(replace(plan, mesh=replace(plan.mesh, compile=True)), problem.graph, problem.hardware)


def _check_compiled(build) -> None:
    torch.manual_seed(0)
    module = build()
    x, other = torch.randn(3, WIDTH), copy.deepcopy(module)
    torch.compiler.reset()
    module(x).square().mean().backward()
    compiled(other, CPU)(x).square().mean().backward()
    for one, same in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(same.grad, one.grad)
    for one, same in zip(module.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(same, one)
