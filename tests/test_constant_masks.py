"""Attention masks in a trace: dropped where they keep all, is_causal where they drop what is to come, else kept."""

import pytest
import torch
from torch import nn

from autoplan.graph import Ref
from autoplan.tracing.model_source import module_source
from autoplan.tracing.trace import trace_model

TOKENS = 300  # more than bfloat16 can count


class Masked(nn.Module):
    """Attention of x: [batch, 1, TOKENS, 4] with the mask that a function of (model, x) makes."""

    def __init__(self, make_mask):
        super().__init__()
        self.make_mask = make_mask
        self.linear = nn.Linear(4, 4)
        self.register_buffer("ones", torch.ones(TOKENS, dtype=torch.bool))

    def forward(self, x):
        mask = self.make_mask(self, x)
        return nn.functional.scaled_dot_product_attention(self.linear(x), x, x, attn_mask=mask, scale=0.5)


def traced_attention(make_mask):
    """The arguments behind q, k and v, and the operators of the graph."""
    x = torch.zeros(2, 1, TOKENS, 4)
    graph = trace_model(module_source(Masked(make_mask), (x, x), nn.functional.mse_loss))
    (attention,) = [op for op in graph.ops if "attention" in op.target]
    assert dict(attention.kwargs) == {"scale": 0.5}
    return attention.args[3:], [op.target for op in graph.ops]


def positions(x):
    return torch.arange(TOKENS, device=x.device)


def distance(x):
    """Query position minus key position: [TOKENS, TOKENS]."""
    return positions(x)[:, None] - positions(x)[None, :]


def additive(keeps, least):
    return torch.where(keeps, 0.0, least)


def of_samples(model, x):
    """Whether a sample is not the third: [batch, 1, 1, TOKENS]."""
    return (torch.arange(x.shape[0], device=x.device) != 2)[:, None, None, None].expand(-1, 1, 1, TOKENS)


@pytest.mark.parametrize(
    "make_mask",
    [
        lambda model, x: (positions(x) >= 0).expand(x.shape[0], 1, TOKENS, TOKENS),
        lambda model, x: torch.ones_like(x[:, :, :, :1], dtype=torch.bool),  # reads nothing of x but its shape
        lambda model, x: torch.zeros(TOKENS, TOKENS, dtype=x.dtype, device=x.device),
    ],
)
def test_a_mask_that_keeps_every_score_is_no_mask_and_nothing_makes_it(make_mask):
    options, targets = traced_attention(make_mask)
    assert options == ()
    assert targets[:2] == ["aten.linear.default", "aten.scaled_dot_product_attention.default"]


@pytest.mark.parametrize(
    "make_mask",
    [
        lambda model, x: distance(x) >= 0,
        lambda model, x: (distance(x) >= 0).expand(x.shape[0], 1, TOKENS, TOKENS),
        lambda model, x: (distance(x) >= 0) & (distance(x) < TOKENS),  # a window as long as the text
        lambda model, x: additive(distance(x) >= 0, float("-inf")).to(x.dtype),
        lambda model, x: additive(distance(x) >= 0, torch.finfo(x.dtype).min).to(x.dtype),
    ],
)
def test_a_mask_that_drops_what_is_to_come_is_is_causal(make_mask):
    options, targets = traced_attention(make_mask)
    assert options == (None, 0.0, True)
    assert targets[:2] == ["aten.linear.default", "aten.scaled_dot_product_attention.default"]


@pytest.mark.parametrize(
    "make_mask",
    [
        pytest.param(lambda model, x: (distance(x) >= 0) & (distance(x) < 8), id="window"),
        pytest.param(lambda model, x: distance(x) <= 0, id="upper triangle"),
        pytest.param(lambda model, x: additive(distance(x) >= 0, -100.0).to(x.dtype), id="drops little"),
        pytest.param(lambda model, x: (distance(x) * 0.1).to(x.dtype), id="bias by distance"),
        # from 256 on bfloat16 has even numbers only
        pytest.param(
            lambda model, x: ((positions(x).to(x.dtype) % 2 == 0) | (positions(x) < 256))[None], id="true by rounding"
        ),
        pytest.param(of_samples, id="differs at batch 3"),
        pytest.param(lambda model, x: x[..., 0].unsqueeze(2) >= 0, id="reads the batch"),
        pytest.param(lambda model, x: model.ones[None], id="reads a buffer"),
        pytest.param(lambda model, x: (model.linear.weight.sum() * 0 == 0).expand(1, TOKENS), id="reads a parameter"),
        pytest.param(lambda model, x: torch.rand(1, TOKENS, device=x.device) >= 0, id="random"),
        pytest.param(
            lambda model, x: torch.empty_strided((1, TOKENS), (TOKENS, 1), device=x.device).long() * 0 == 0,
            id="memory as it lay",
        ),
    ],
)
def test_any_other_mask_stays(make_mask):
    (mask,), _ = traced_attention(make_mask)
    assert isinstance(mask, Ref)
