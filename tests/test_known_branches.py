"""Branches of forward on constants, such as those of torch's own encoders on the values of their masks.

`tests/test_families.py` runs torch's own encoder and decoder.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoplan.errors import TraceError
from autoplan.tracing.model_source import ModelSource, module_source
from autoplan.tracing.trace import trace_model

ATTENTION = "aten.scaled_dot_product_attention.default"


class Encoder(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.register_buffer("mask", mask)

    def forward(self, x):
        return self.encoder(x, mask=self.mask)


def causal_mask():
    return nn.Transformer.generate_square_subsequent_mask(4)


def make_batch(batch_size):
    return torch.randn(batch_size, 4, 8), torch.randn(batch_size, 4, 8)


def trace(build_model):
    return trace_model(ModelSource("toy", "toy.py", build_model, make_batch, F.mse_loss))


def attentions(graph):
    return [op.args[3:] for op in graph.ops if op.target == ATTENTION]


def test_an_encoder_whose_mask_is_causal_reads_no_mask():
    assert attentions(trace(lambda: Encoder(causal_mask()))) == [(None, 0.1, True)] * 2


def test_an_encoder_whose_mask_is_another_reads_it():
    assert all(
        mask is not None for mask, *_ in attentions(trace(lambda: Encoder(torch.zeros(4, 4).fill_diagonal_(-9))))
    )


def test_buffers_of_a_live_module_have_the_values_that_they_have():
    x = torch.zeros(2, 4, 8)
    graph = trace_model(module_source(Encoder(causal_mask()), (x, x), F.mse_loss))
    assert attentions(graph) == [(None, 0.1, True)] * 2


def test_where_the_device_is_waited_for_is_noted_though_the_trace_knows_the_answer():
    assert "test_known_branches.py" in trace(lambda: Encoder(causal_mask())).waits_at


class Masked(Encoder):
    def forward(self, x):
        return self.encoder(x, mask=self.mask * x.sum())


def test_a_mask_that_is_made_of_the_batch_says_how_to_tell_torch_what_it_is():
    with pytest.raises(TraceError, match=r"(?s)test_known_branches\.py:\d+: return self\.encoder.*pass is_causal=True"):
        trace(lambda: Masked(causal_mask()))


class Warming(nn.Module):
    """Looks at a count of its steps, which it adds to if it is told so."""

    def __init__(self, *, counts):
        super().__init__()
        self.linear, self.counts = nn.Linear(8, 8), counts
        self.register_buffer("n_steps", torch.tensor(0))

    def forward(self, x):
        if self.counts:
            self.n_steps += 1
        return self.linear(x) if self.n_steps < 10 else x.mean() + self.linear(x)


def test_a_branch_on_a_buffer_is_known_only_where_forward_does_not_write_it():
    targets = [op.target for op in trace(lambda: Warming(counts=False)).ops if op.target == "aten.mean.default"]
    assert targets == []
    with pytest.raises(TraceError, match=r"torch\.cond"):
        trace(lambda: Warming(counts=True))


class Weighing(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.scale if (self.scale == 1).all() else x


def test_a_branch_on_a_weight_is_not_known_though_it_begins_as_a_constant():
    with pytest.raises(TraceError, match=r"torch\.cond"):
        trace(Weighing)
