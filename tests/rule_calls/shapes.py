"""Calls of what moves values: views, cuts, reads and writes by index, factories."""

import torch
from torch.nn import functional as F

from rule_calls.toys import ATEN, heads, ids


def scaled(function):
    """The function of x times a parameter."""
    return lambda x, w: function(x * w)


def pieces(function):
    """A call with several results, of which each counts."""
    return lambda x, w: list(function(x * w))


def reads(x, w, table):
    y, i = x * w, ids(x, 8)
    places = i.unsqueeze(-1)
    return [
        y.gather(1, places.expand(-1, -1, 12)),
        y.gather(2, places),
        y.take_along_dim(places, 1),
        y.index_select(1, torch.arange(4, device=x.device)),
        table[i],
        y[:, torch.arange(4, device=x.device)],
        y[:, torch.arange(4, device=x.device), torch.arange(4, device=x.device)],
        y[torch.arange(2, device=x.device), :, torch.arange(2, device=x.device)],
        y[:, torch.arange(4, device=x.device)[:, None], torch.arange(3, device=x.device)],
        F.one_hot(i, 12),
        torch.bucketize(y.detach(), torch.arange(5, dtype=y.dtype, device=x.device)),
    ]


def writes(x, w, source):
    y, i = x * w, ids(x, 8)
    places = i.unsqueeze(-1).expand(-1, -1, 12)
    four, updates = torch.arange(4, device=x.device), x[:, :4] * source
    return [
        y.scatter(1, places, 2.0),
        y.scatter(1, (places * 0 + torch.arange(8, device=x.device)[:, None]), x),
        y.scatter_add(1, places, x * source),
        y.scatter_add(1, places[:, :4], x),
        y.scatter_reduce(1, places, x * source, "amax"),
        y.index_add(1, four, updates),
        y.index_copy(1, four, updates),
        ATEN.index_put(y, [None, four], updates),
        ATEN.index_put(y, [None, i[0]], x, True),
        ATEN.index_put(y, [None, four], w, True),
        ATEN.slice_scatter(y, updates, 1, 2, 6),
        ATEN.select_scatter(y, source * x[:, 0], 1, 3),
    ]


def triangles(x, w):
    return [
        torch.tril(heads(x * w, 4)),
        torch.triu(heads(x * w, 4), 1),
        torch.outer(w, w),
        torch.eye(8, 12, dtype=x.dtype, device=x.device) + x * w,
    ]


def factories(x, w):
    options = {"dtype": x.dtype, "device": x.device}
    return [
        w + torch.arange(12, **options),
        w + torch.arange(2, 14, **options),
        w + torch.arange(0, 24, 2, **options),
        w + torch.linspace(0, 1, 12, **options),
        w + torch.eye(12, **options),
        x * w + torch.zeros(x.shape[0], 8, 12, **options),
        w + torch.ones(12, **options),
        w + torch.full((12,), 3.0, **options),
        w + torch.scalar_tensor(2.0, **options),
        x * w + x.new_zeros(8, 12),
        x * w + x.new_ones(8, 12),
        x * w + x.new_full((8, 12), 3.0),
        w + torch.zeros_like(w),
        w + torch.ones_like(w),
        w + torch.full_like(w, 2.0),
    ]


def moves(x, w):
    y = x * w
    return [
        y.transpose(1, 2), y.swapaxes(1, 2), y.swapdims(0, 2), y.permute(2, 0, 1), y.movedim(1, 2),
        y.movedim((0, 1), (1, 2)), y.moveaxis(0, -1), y[0].t(), y[0].T, y.mT, y.unsqueeze(1), y[:, 3],
        y.mT.contiguous(), y.clone(), ATEN.alias(y), ATEN.detach(y), y.diagonal(0, 1, 2),
        heads(y, 4).diagonal(0, 2, 3), y.unfold(1, 4, 2),
        y.to(torch.float64), y.type_as(x), y.sum(1).type_as(x),
        y.sum().type_as(x), ATEN._to_copy(y, dtype=torch.float64),
        ATEN.to.device(y, y.device, torch.float64),
        ATEN.to.dtype_layout(y, dtype=torch.float64, device=y.device), y.flip(1), y.roll(1, 1), y.roll((1, 2), (1, 2)),
        y.flip(2), y.roll(3),
    ]  # fmt: skip


def cuts(x, w):
    y = x * w
    return [
        y[:, 2:6], y[:, :, 3:], y[:, ::2], y[:, 0:8], y.narrow(1, 2, 3), y.narrow(2, 0, 12), F.pad(y, (1, 1)),
        y.narrow(1, -3, 3), y.narrow(2, -4, 2),
        F.pad(y, (0, 0, 1, -1)), F.pad(y, (1, 1), mode="reflect"), F.pad(y, (2, 0), value=1.5),
        ATEN.constant_pad_nd(y, [0, 0, 1, 0], 2.0), y.repeat(1, 2, 1), y.repeat(2, 1, 1, 1), y.tile(2, 1),
        y.repeat_interleave(2, dim=1), y.repeat_interleave(3), torch.stack([y, x], 1), torch.stack([y, x], -1),
        torch.cat([y, x], 1), torch.cat([y, x[:, :4]], 1),
    ]  # fmt: skip


def views(x, w):
    y = x * w
    return [
        y.reshape(-1, 8, 4, 3), y.reshape(-1, 96), y.view(-1, 2, 4, 12), ATEN._unsafe_view(y, [-1, 4, 2, 12]),
        y.flatten(1, 2), y.unflatten(2, (3, 4)), y[0].ravel(), y[:, :1].squeeze(1), y.squeeze(1), y.squeeze(),
        y[:, :1].unsqueeze(1).squeeze((1, 2)), y.sum(1, keepdim=True).expand(-1, 5, -1),
        y[:, :1].broadcast_to(-1, 5, 12), y[:, :1].expand_as(x), *torch.broadcast_tensors(y, w),
    ]  # fmt: skip


def complex_numbers(x, w):
    """Pairs of the last dim as numbers, and lengths and angles; not in bfloat16, in which models are traced."""
    y = (x * w).to(torch.float64)
    pairs = torch.view_as_complex(y.unflatten(-1, (6, 2)))
    turned = torch.polar(y, y * 3.0)
    return [torch.view_as_real(pairs), pairs.imag, turned.real, torch.view_as_real(turned)]


CALLS = {
    "complex numbers": (complex_numbers, [(12,)]),
    "reads": (reads, [(12,), (8, 24)]),
    "writes": (writes, [(12,), (12,)]),
    "moves": (moves, [(12,)]),
    "cuts": (cuts, [(12,)]),
    "views": (views, [(12,)]),
    "reshape to fewer": (scaled(lambda y: y.reshape(-1, 96)), [(12,)]),
    "factories": (factories, [(12,)]),
    "triangles": (triangles, [(12,)]),
    "split": (pieces(lambda y: y.split(6, dim=2)), [(12,)]),
    "split unevenly": (pieces(lambda y: y.split([3, 9], dim=2)), [(12,)]),
    "chunk": (pieces(lambda y: y.chunk(2, dim=1)), [(12,)]),
    "tensor split": (pieces(lambda y: y.tensor_split(2, dim=1)), [(12,)]),
    "unbind": (pieces(lambda y: y.unbind(1)), [(12,)]),
    "fused projection": (
        lambda x, w, b: sum(torch.addmm(b, x.reshape(-1, 12), w).reshape(-1, 8, 36).split(12, dim=2)),
        [(12, 36), (36,)],
    ),
}
