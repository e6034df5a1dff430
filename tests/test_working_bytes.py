"""What a segment needs beside what it keeps: gradients of its weights come as what it has kept goes."""

from __future__ import annotations

import pytest

from autoplan.api import trace_model
from autoplan.cost.local_segment import local_segment
from autoplan.cost.segment_work import segment_work
from autoplan.cost.work_context import work_contexts
from autoplan.hardware import load_hardware_profile
from autoplan.rules import load_rules
from autoplan.tensor_parallel.sharding import read_sharding

WIDTH = 64
MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear({width}, {width}, bias=False) for _ in range({n_layers}))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear({width}, {width})
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def build_model():
    return Model()


def make_batch(n):
    x = torch.randn(n, {width})
    return (x,), x


def loss_fn(outputs, targets):
    return (outputs - targets).square().mean()
"""


@pytest.mark.parametrize("n_layers", [2, 6])
@pytest.mark.parametrize("batch_size", [2, 4 * WIDTH])
def test_gradients_of_weights_take_the_place_of_activations(tmp_path, n_layers, batch_size) -> None:
    file = tmp_path / "model.py"
    file.write_text(MODEL.format(width=WIDTH, n_layers=n_layers))
    graph = trace_model(file)
    segment = next(segment for segment in graph.segments if segment.is_block)
    context = work_contexts(graph, load_hardware_profile("h200_x4"), "fp32", load_rules())(1)
    layouts = read_sharding(graph, segment, None, degree=1, rules=context.rules, facts=context.facts)
    work = segment_work(context, local_segment(context, segment, layouts), batch_size)
    activation, weight = 4 * WIDTH * batch_size, 4 * WIDTH * WIDTH
    # around an op its result and the gradient of its input; at the first product the results of all rectifiers are free
    assert work.working_bytes == 2 * activation + max(0, n_layers * (weight - activation))
    assert work.saved_bytes == (n_layers + 1) * activation
