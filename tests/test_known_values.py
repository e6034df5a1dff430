"""What `build_model` may read of the tensors that it makes: at planning the same numbers as with memory."""

from __future__ import annotations

import textwrap

import pytest
import torch
from distributed.launch import run_program
from torch import nn

from autoplan import api
from autoplan.errors import InputError
from autoplan.options import Options
from autoplan.runtime.building.known_values import KnownValues, NumbersOnHost, build_on_meta
from autoplan.tracing.model_source import load_model_file, model_source
from autoplan.tracing.trace import trace_model

MODEL = """
import copy, math
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
{body}
        self.rates = [float(rate) for rate in rates]
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))

    def forward(self, x):
        for block, rate in zip(self.blocks, self.rates):
            x = x + block(x) * (1 - rate)
        return x

def build_model():
    return Model()

def make_batch(batch_size):
    x = torch.arange(8.0 * batch_size).reshape(batch_size, 8) / 64
    return x, torch.zeros(batch_size, 8)

def loss_fn(outputs, targets):
    return F.mse_loss(outputs, targets)
"""

READ = [
    "rates = [x.item() for x in torch.linspace(0, 0.1, depth)]",
    "rates = [float(torch.tensor([0.1])[0])] * depth",
    "rates = [torch.tensor([0.1, 0.2]).sum().item()] * depth",
    "rates = torch.as_tensor(np.linspace(0, 0.1, depth)).tolist()",
    "rates = nn.LayerNorm(4).weight.new_tensor([0.1] * depth).tolist()",
    "x = torch.linspace(0, 0.1, depth)\nrates = torch.tensor([x[0], x[1], x[2], x[3]]).tolist()",
    "rates = torch.linspace(0, 0.1, depth).numpy().tolist()",
    "rates = np.asarray(torch.linspace(0, 0.1, depth))",
    "rates = [float(f'{torch.tensor(0.125):.2f}')] * depth",
    "t = torch.arange(8) / 80\nrates = t[t > 0.04]\nrates = rates.tolist() + [0.0]",
    "rates = torch.linspace(0, 0.1, 9)[[0, 3, 5, 7]].tolist()",
    "rates = [len(torch.unique(torch.tensor([1, 2, 2]))) / 8] * depth",
    "assert torch.equal(torch.arange(3), torch.tensor([0, 1, 2]))\nrates = [0.1] * depth",
    "assert torch.allclose(torch.ones(3).sum(), torch.tensor(3.0))\nrates = [0.1] * depth",
    "self.scale = nn.Parameter(torch.tensor([0.5]))\nrates = [self.scale.item()] * depth",
    "part = nn.LayerNorm(4)\npart.t = torch.tensor([0.25])\nrates = [copy.deepcopy(part).t.item()] * depth",
    "layer = nn.Linear(4, 4)\nnn.init.constant_(layer.bias, 0.25)\nrates = layer.bias.tolist()",
    "layer = nn.Linear(2, 2)\nlayer.weight.data[...] = torch.tensor([[0.1, 0.2], [0.3, 0.4]])\n"
    "rates = [layer.weight.sum().item()] * depth",
    "layer = nn.Linear(2, 2)\nlayer.weight.data = torch.full((2, 2), 0.1)\nrates = layer.weight[0].tolist() * 2",
    "norm = nn.BatchNorm1d(depth)\nassert norm.num_batches_tracked.item() == 0\nrates = norm.running_var.tolist()",
]
TABLES = """
grid = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
steps = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0).contiguous()
steps[:, :, 0] += 1
steps[:, :, 1] += 1
steps[:, :, 0] *= 3
self.register_buffer("index", steps.sum(-1))
assert self.index.max() < 9
betas = torch.linspace(1e-4, 0.02, 10).numpy()
self.register_buffer("alphas", torch.tensor(np.cumprod(1 - betas), dtype=torch.float32))
layer = nn.Linear(2, 2)
layer.weight.data.copy_(torch.from_numpy(np.eye(2)))
rates = [float(self.alphas[-1]), float(layer.weight.data.sum()) / 10, float(self.index[0, 3]) / 10, 0.0]
"""


def written(tmp_path, body):
    path = tmp_path / "a_model.py"
    path.write_text(MODEL.format(body=textwrap.indent(body.strip(), " " * 8)))
    return path


@pytest.mark.parametrize("body", [*READ, TABLES])
def test_numbers_read_without_memory_are_those_read_with_it(tmp_path, body):
    path = written(tmp_path, body)
    torch.manual_seed(0)
    rates = load_model_file(path).build_model().rates
    with torch.device("meta"):
        assert model_source(path, {}).build_model().rates == rates
    built = build_on_meta(load_model_file(path).build_model)
    assert built.rates == rates and built.blocks[0].weight.is_meta


def test_numbers_read_at_planning_are_in_the_graph(tmp_path):
    graph = trace_model(model_source(written(tmp_path, READ[1]), {}))
    assert [op.args[1] for op in graph.ops if op.target == "aten.mul.Tensor"] == pytest.approx([0.9] * 4)


@pytest.mark.parametrize(
    ("body", "fix"),
    [
        ("rates = torch.randperm(depth).tolist()", r"random ones also with generator=torch.Generator\(\)"),
        ("layer = nn.Linear(4, 4)\nif layer.weight.abs().sum() > 0:\n    rates = [0.1] * depth", "values of weights"),
        ("layer = nn.Linear(2, 2)\nlayer.weight.data = torch.from_numpy(np.eye(2))", r"weight.data.copy_\(x\)"),
        ("rates = torch.linspace(0, 0.1, depth).numpy()\nrates[0] = 1", r"a copy, as x.numpy\(\).copy\(\)"),
    ],
)
def test_what_cannot_be_known_is_refused_with_its_line_and_what_to_do(tmp_path, body, fix):
    line = 11 + min(body.count("\n"), 1)
    told = rf"a_model.py: (.|\n)*\(line {line}\)\n  expected: (.|\n)*fix: (.|\n)*{fix}"
    with torch.device("meta"), pytest.raises(InputError, match=told):
        model_source(written(tmp_path, body), {}).build_model()


def test_a_weight_is_known_after_a_write_to_all_of_it_and_unknown_after_random_numbers():
    with torch.device("meta"), KnownValues() as known:
        layer = nn.Linear(4, 4)
        nn.init.zeros_(layer.bias)
        nn.init.ones_(layer.weight[:2])
        assert layer.bias.tolist() == [0.0] * 4 and not known.knows(layer.weight)
        nn.init.constant_(layer.weight, 0.25)
        assert layer.weight.sum().item() == 4.0
        layer.weight.data[0].normal_()
        assert not known.knows(layer.weight)


def test_a_model_that_fails_for_another_reason_raises_its_own_error():
    def build_model():
        raise TypeError("no")

    with pytest.raises(TypeError, match="^no$"):
        build_on_meta(build_model)


def test_arrays_of_tensors_on_other_devices_are_read_only_copies():
    with torch.device("meta"), KnownValues(), NumbersOnHost():
        array = torch.arange(3.0).numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1.0


@pytest.mark.nightly
@pytest.mark.parametrize("fix", [(("tp", "2"),), (("pp", "2"),)])
def test_a_program_of_a_model_that_reads_its_tables_trains_like_one_process(tmp_path, fix):
    problem = api.make_problem(
        str(written(tmp_path, TABLES)), hw="dgx_a100_x8/2", options=Options(global_batch=4, fix=fix)
    )
    api.emit(problem, api.solve(problem), tmp_path / "out")
    run_program(tmp_path / "out", 2, "--steps", "2", "--device", "cpu", "--dtype", "float64", "--check")
