"""Values of a graph are called as the user's source calls them."""

import pytest

from autoplan.tracing.model_source import model_source
from autoplan.tracing.trace import trace_model

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, hidden):
        q, k, _ = self.qkv(hidden).split(4, dim=1)
        score = (
            q * k
        )
        hidden = helper(score, hidden)
        return hidden.tanh()


def helper(a, b):
    inner = a + 1
    return inner * b


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def build_model():
    return Model()


def make_batch(n):
    return torch.randn(n, 4), torch.randn(n, 4)


def loss_fn(outputs, targets):
    return (outputs - targets).square().mean()
"""


@pytest.fixture(scope="module")
def labels(tmp_path_factory):
    path = tmp_path_factory.mktemp("labels") / "model.py"
    path.write_text(MODEL)
    graph = trace_model(model_source(path, {}))
    return [
        [(op.target.split(".")[-2], op.label) for op in graph.ops_of(s) if "." in op.target] for s in graph.segments
    ]


def pieces(graph_path):
    graph = trace_model(model_source(graph_path, {}))
    return [op.label for op in graph.ops if op.target == "getitem"]


def test_a_statement_names_what_is_read_outside_of_it_and_no_step_inside(labels):
    assert ("linear", "") in labels[0]  # a step of the statement that makes q and k
    assert ("mul", "score") in labels[0]  # a statement of three lines
    assert ("add", "") in labels[0]  # a helper function is part of the statement that calls it
    assert ("mul", "hidden") in labels[0]


def test_pieces_are_named_by_position_and_underscore_is_no_name(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    assert pieces(path)[:2] == ["q", "k"]


def test_what_a_block_returns_is_named_by_the_statement_that_calls_it_in_each_turn_of_a_loop(labels):
    assert [rows[-1] for rows in labels[:2]] == [("tanh", "x"), ("tanh", "x")]


def test_names_do_not_keep_equal_blocks_from_folding(tmp_path):
    path = tmp_path / "model.py"
    loop = "for layer in self.layers:\n            x = layer(x)"
    calls = "x = self.layers[0](x)\n        y = self.layers[1](x)\n        x = self.layers[2](y)"
    assert loop in MODEL
    path.write_text(MODEL.replace(loop, calls).replace("range(2)", "range(3)"))
    graph = trace_model(model_source(path, {}))
    assert [graph.ops_of(s)[-1].label for s in graph.segments[:3]] == ["x", "y", "x"]
    assert graph.segments[1].kind == graph.segments[2].kind
