"""Writes in place that autograd refuses are refused when a model is planned."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoplan.errors import TraceError
from autoplan.tracing.model_source import ModelSource
from autoplan.tracing.trace import trace_model


def trace(forward):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            return forward(self, x)

    def make_batch(batch_size):
        return torch.randn(batch_size, 4), torch.randn(batch_size, 4)

    return trace_model(ModelSource("toy", "toy.py", Model, make_batch, F.mse_loss))


def writes_what_two_need(model, x):
    y = torch.exp(model.a(x))
    z = model.b(y)
    y.add_(1)  # here
    return z + y


def writes_a_part(model, x):
    y = model.a(x)
    z = y * y
    y[:, 0] = 0  # here
    return z


def writes_a_buffer(model, x):
    y = model.a(x) * model.mean
    model.mean += 1  # here
    return y


@pytest.mark.parametrize("forward", [writes_what_two_need, writes_a_part, writes_a_buffer], ids=lambda f: f.__name__)
def test_a_write_into_what_the_backward_pass_needs_is_refused_with_its_line(forward):
    with pytest.raises(TraceError, match=r"test_refused_writes\.py:\d+: .*  # here\n  found: (?s:.*)make a new tensor"):
        trace(forward)


def writes_what_nothing_needs(model, x):
    y = model.a(x)
    y += 1
    y.relu_()
    model.mean += 1
    return model.b(y)


def writes_before_it_is_read(model, x):
    y = torch.empty_like(x)
    y[:, :2] = model.a(x)[:, :2]
    y[:, 2:] = model.b(x)[:, 2:]
    return y * y


@pytest.mark.parametrize("forward", [writes_what_nothing_needs, writes_before_it_is_read])
def test_other_writes_are_planned(forward):
    assert trace(forward).ops
