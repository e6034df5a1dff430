"""The second batch size by a recorded run: the graph that two exports give, or no answer."""

from pathlib import Path

import pytest
import torch
from torch import nn

from autoplan.errors import TraceError
from autoplan.tracing import trace
from autoplan.tracing.batches import BATCH_A, BATCH_B
from autoplan.tracing.model_source import model_source, module_source
from autoplan.tracing.overlaid_graph import overlay
from autoplan.tracing.trace import trace_model

FAMILIES = Path(__file__).parent / "families"
BY_RECORD = ("unet", "decoder_hf")  # the second drops gradients
OTHERS = (
    "t5_hf",  # adds in place
    "bert_hf",
    "capacity_mixture",
    "custom_op",
    "diffusion_transformer",
    "gpt2_hf",
    "lstm",
    "mixture",
    "shared_layers",
    "state_space",
)
OTHERS += ("two_tower", "vit_hf", "../../examples/gpt", "../../examples/llama", "../../examples/mlp")


@pytest.mark.parametrize("name", [*BY_RECORD, *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)])
def test_the_recorded_run_gives_the_graph_of_two_exports(name):
    source = model_source(FAMILIES / f"{name}.py", {})
    first = trace._trace(source, BATCH_A)
    recorded = trace._second_run(source, first)
    assert recorded is not None
    assert overlay(source, first, recorded) == overlay(source, first, trace._trace(source, BATCH_B).run)


class Linear(nn.Module):
    """A matrix product, and what a function of (model, x) makes of it."""

    def __init__(self, then):
        super().__init__()
        self.then = then
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.then(self, self.linear(x))


def source_of(then):
    return module_source(Linear(then), (torch.zeros(2, 4), torch.zeros(2, 4)), nn.functional.mse_loss)


def recorded(then):
    source = source_of(then)
    return trace._second_run(source, trace._trace(source, BATCH_A))


def write_into_a_view(x):
    x = x.clone()
    x[:, 0].add_(1)
    return x


def test_what_no_record_follows_is_exported_twice():
    assert recorded(lambda model, y: y + 1) is not None
    assert recorded(lambda model, y: write_into_a_view(y)) is None
    targets = [op.target for op in trace_model(source_of(lambda model, y: write_into_a_view(y))).ops]
    assert "aten.select_scatter.default" in targets


def dropped_after_a_write(model, y):
    return nn.functional.dropout(y.relu_(), 0.5)


def test_dropout_stays_one_operator_where_the_graph_is_taken_apart_for_a_write_in_place():
    assert recorded(dropped_after_a_write) is not None
    targets = [op.target for op in trace_model(source_of(dropped_after_a_write)).ops]
    assert "aten.dropout.default" in targets and "aten.native_dropout.default" not in targets


@pytest.mark.parametrize(
    "then",
    [
        pytest.param(lambda model, y: y.relu() if y.shape[0] == BATCH_B else y, id="another operator"),
        pytest.param(lambda model, y: y - y.abs() if y.shape[0] == BATCH_B else y.abs() - y, id="other operands"),
        pytest.param(lambda model, y: y.sum(y.shape[0] - BATCH_B, keepdim=True).expand_as(y), id="a dim"),
        pytest.param(lambda model, y: y * (1.0 / y.shape[0]), id="a number"),
        pytest.param(lambda model, y: y.double() if y.shape[0] == BATCH_B else y.float(), id="a dtype"),
        pytest.param(lambda model, y: y + torch.ones(4) if y.shape[0] == BATCH_B else y + y[0], id="a constant"),
        pytest.param(lambda model, y: 1 / (BATCH_B - y.shape[0]) + y, id="an error"),
    ],
)
def test_a_branch_on_the_batch_size_is_refused_as_ever(then):
    with pytest.raises(TraceError):
        trace_model(source_of(then))


def test_the_users_module_is_run_as_if_it_were_exported():
    asked = []
    graph = recorded(lambda model, y: (asked.append(torch.compiler.is_exporting()), y)[1])
    assert graph is not None
    assert asked == [True, True]
    assert not torch.compiler.is_exporting()
