"""Calls of products: matrices, convolutions, attention, experts, recurrent layers."""

import torch
from torch.nn import functional as F

from rule_calls.toys import ATEN, heads, ids


def convolutions(n_space):
    """8 channels: one group, four groups, each channel by itself, and by name of the padding."""

    def function(x, w, dense, bias, grouped, depthwise):
        y = (x * w).reshape(-1, 8, *SPACE[n_space])
        convolve = getattr(F, f"conv{n_space}d")
        return [
            convolve(y, dense, bias, stride=2, padding=1),
            convolve(y, dense),
            convolve(y, grouped, bias, padding=1, groups=4),
            convolve(y, depthwise, bias, padding=1, groups=8),
            convolve(y, dense, bias, padding="same"),
        ]

    kernel = (3,) * n_space if n_space < 3 else (1, 3, 1)
    return function, [(12,), (8, 8, *kernel), (8,), (8, 2, *kernel), (8, 1, *kernel)]


def transposed_convolutions(n_space):
    def function(x, w, dense, bias, grouped, depthwise):
        y = (x * w).reshape(-1, 8, *SPACE[n_space])
        convolve = getattr(F, f"conv_transpose{n_space}d")
        return [
            convolve(y, dense, bias, stride=2, output_padding=1),
            convolve(y, grouped, groups=4),
            convolve(y, depthwise, bias[:8], groups=8),
        ]

    kernel = (2,) * n_space
    return function, [(12,), (8, 12, *kernel), (12,), (8, 3, *kernel), (8, 1, *kernel)]


SPACE = {1: (12,), 2: (3, 4), 3: (2, 3, 2)}


def raw_convolution(x, w, dense, grouped):
    y = (x * w).reshape(-1, 8, 3, 4)
    pair = [1, 1]
    return [
        ATEN.convolution(y, dense, None, pair, pair, pair, False, [0, 0], 1),
        ATEN.convolution(y, grouped, None, pair, pair, pair, False, [0, 0], 4),
        ATEN.convolution(y, dense, None, pair, pair, pair, True, [0, 0], 1),
    ]


def grouped_products(x, w, experts):
    """Rows of 12 experts, of which some have none."""
    rows = (x @ w).reshape(-1, 24)
    counts = torch.histc(ids(x, 12).to(x.dtype), 12, 0, 11)
    ends = counts.cumsum(0).to(torch.int32)
    hidden = F.silu(F.grouped_mm(rows, experts, offs=ends))
    order = (x @ w).sum(-1).flatten().argsort()
    rows = F.grouped_mm(hidden * 2.0, experts.mT, offs=ends)
    summed = rows[order].reshape(-1, 2, 24).sum(1)
    return [summed, torch.zeros_like(summed).index_add(0, order // 2, rows), torch.empty_like(ids(x, 8))]


def einsums(x, w, m):
    y = x * w
    return [
        torch.einsum("bld,de->ble", y, m),
        torch.einsum("bld,bmd->blm", y, y),
        torch.einsum("bld,bld,d->bl", y, y, w),
        torch.einsum("...d,de->...e", y, m),
        torch.einsum("bld->dl", y),
        torch.einsum("ld,ld", y[0], y[1]),
        torch.einsum("bd,ble->bld", y[:, 0], y[:, :, :1]),
        torch.einsum("bii->bi", y[:, :, :8]),
    ]


def products(x, w, m):
    y = x * w
    return [
        x @ (m * 1.0), torch.bmm(y, y.transpose(1, 2)), y @ w, x[0] @ y.transpose(1, 2), torch.mm(y[0], m),
        torch.addmm(w, y[0], m[:, :12]), torch.addmm(x[0] * w, y[0], m[:, :12], beta=0.5, alpha=2.0),
        torch.baddbmm(w, y, m[:, :12].expand(4, 12, 12) if y.shape[0] == 4 else m[:, :12].expand(y.shape[0], 12, 12)),
        torch.mv(y[0], w), torch.dot(w, y[0, 0]), torch.addmv(w[:8], y[0], w), torch.tensordot(y, m, dims=([2], [0])),
        y.unsqueeze(1) @ y.unsqueeze(2).transpose(-1, -2),
    ]  # fmt: skip


def grouped(n_heads, n_key_heads, **options):
    """Attention with fewer key heads than query heads."""

    def function(x, wq, wk):
        q = F.linear(x, wq).reshape(-1, 8, n_heads, 3).transpose(1, 2)
        k, v = (y.reshape(-1, 8, n_key_heads, 3).transpose(1, 2) for y in F.linear(x, wk).chunk(2, dim=2))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)

    return function, [(3 * n_heads, 12), (6 * n_key_heads, 12)]


def masked_attention(x, w, bias):
    q = heads(x * w, 4)
    return [
        F.scaled_dot_product_attention(q, q, q, attn_mask=bias),
        F.scaled_dot_product_attention(q, q, q, attn_mask=bias[:, :1], scale=0.3),
        F.scaled_dot_product_attention(q[:, 0], q[:, 1], q[:, 2], attn_mask=bias[0, 0]),
    ]


def recurrent(name, n_gates, n_states):
    def function(x, *weights):
        state = torch.zeros(1, x.shape[0], 6, dtype=x.dtype, device=x.device)
        states = [state] * 2 if n_states == 2 else state
        return list(getattr(torch, name)(x, states, list(weights), True, 1, 0.0, True, False, True))

    size = n_gates * 6
    return function, [(size, 12), (size, 6), (size,), (size,)]


def cell(name, n_gates, n_states):
    def function(x, *weights):
        state = x[:, 1, :6]
        found = getattr(torch, f"{name}_cell")(x[:, 0], [state] * 2 if n_states == 2 else state, *weights)
        return list(found) if n_states == 2 else found

    size = n_gates * 6
    return function, [(size, 12), (size, 6), (size,), (size,)]


CALLS = {
    "linear": (lambda x, w, b: F.linear(x, w, b), [(24, 12), (24,)]),
    "linear without bias": (lambda x, w: F.linear(x, w), [(24, 12)]),
    "products": (products, [(12,), (12, 24)]),
    "bilinear": (lambda x, w, b: F.bilinear(x, x, w, b), [(6, 12, 12), (6,)]),
    "einsum": (einsums, [(12,), (12, 24)]),
    **{f"convolutions {n}d": convolutions(n) for n in (1, 2, 3)},
    **{f"transposed convolutions {n}d": transposed_convolutions(n) for n in (1, 2, 3)},
    "raw convolution": (raw_convolution, [(12,), (8, 8, 3, 3), (8, 2, 3, 3)]),
    "experts": (grouped_products, [(12, 24), (12, 24, 16)]),
    "attention": (
        lambda x, w: F.scaled_dot_product_attention(*[heads(x * w, 4)] * 3, is_causal=True),
        [(12,)],
    ),
    "attention of 12 rows": (  # which make two runs on each of 3 ranks
        lambda x, w: F.scaled_dot_product_attention(*[(x * w).transpose(1, 2)] * 3, is_causal=True, scale=0.5),
        [(12,)],
    ),
    "attention to all": (lambda x, w: F.scaled_dot_product_attention(*[heads(x * w, 4)] * 3), [(12,)]),
    "attention with masks": (masked_attention, [(12,), (1, 4, 8, 8)]),
    "attention of 4 heads, 2 key heads": grouped(4, 2, is_causal=True),
    "attention of 12 heads, 1 key head": grouped(12, 1),
    "attention of 12 heads, 6 key heads": grouped(12, 6, scale=0.5),
    "attention of 12 heads, 3 key heads": grouped(12, 3, is_causal=True),
    "lstm": recurrent("lstm", 4, 2),
    "gru": recurrent("gru", 3, 1),
    "rnn tanh": recurrent("rnn_tanh", 1, 1),
    "rnn relu": recurrent("rnn_relu", 1, 1),
    "lstm cell": cell("lstm", 4, 2),
    "gru cell": cell("gru", 3, 1),
    "rnn tanh cell": cell("rnn_tanh", 1, 1),
    "rnn relu cell": cell("rnn_relu", 1, 1),
}
