"""Calls of every operator that has a rule: name -> (function of x: [batch, 8, 12] and the parameters, their shapes).

A shape that starts with 0 is that of a buffer. A function may return several tensors; all of them are checked.
"""

import torch
from torch.nn import functional as F

ATEN = torch.ops.aten


def operator(name):
    """An operator from its name in the graph, `erf` or `clamp_min.Tensor`."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(ATEN, packet), overload or "default")


def each(names, *, arguments=None, shift=0.0):
    """A call of each named operator on x times a parameter, between 0 and 1."""

    def function(x, w):
        u = 0.4 * x * w + shift
        return [operator(name)(u, *(arguments or {}).get(name, ())) for name in names.split()]

    return function, [(12,)]


def pairs(names):
    """A call of each named operator on two tensors, the second broadcast."""
    return (lambda x, w, v: [operator(name)(x * w, x + v) for name in names.split()], [(12,), (8, 1)])


def with_numbers(names, number):
    return (lambda x, w: [operator(name)(x * w, number) for name in names.split()], [(12,)])


def whole_numbers(names):
    """Operators on integers and booleans: with a tensor, and with a number."""

    def function(x, w):
        a, b = (x * 5).to(torch.int64), (w * 3).to(torch.int64) + 1
        return [operator(name)(a, 2 if name.endswith(".Scalar") else b) for name in names.split()]

    return function, [(12,)]


def scaled(function):
    """The function of x times a parameter."""
    return lambda x, w: function(x * w)


def image(function):
    """The function of an image [batch, 8, 3, 4], and further parameters."""
    return lambda x, w, *parameters: function((x * w).reshape(-1, 8, 3, 4), *parameters)


def ids(x, n):
    """Whole numbers below n: [batch, 8]."""
    return (x[:, :, 0] * n / 1.2).to(torch.int64).clamp(0, n - 1)


def losses(reduction):
    """Losses of numbers, whose weights are parameters or not there."""

    def function(x, w):
        a, b = torch.sigmoid(x * w), torch.sigmoid(x + w)
        return [
            F.mse_loss(a, b, reduction=reduction),
            F.l1_loss(a, b, reduction=reduction),
            F.smooth_l1_loss(a, b, reduction=reduction, beta=0.1),
            F.huber_loss(a, b, reduction=reduction, delta=0.1),
            F.kl_div(a.log(), b, reduction=reduction),
            F.soft_margin_loss(a, b.detach(), reduction=reduction),
            F.binary_cross_entropy(a, b.detach(), reduction=reduction),
            F.binary_cross_entropy_with_logits(a, b, pos_weight=w.detach(), reduction=reduction),
        ]

    return function, [(12,)]


NUMBERS = {"none": 0, "mean": 1, "sum": 2}


def classes(reduction):
    """Losses over 12 classes: [batch, 12 classes, 8 places], some rows ignored, more of them on some shards."""

    def function(x, w):
        scores, targets = (x * w).transpose(1, 2), ids(x, 12)
        rows = torch.arange(8, device=x.device)
        ignored = torch.where(rows < 3, -100, targets)
        return [
            F.cross_entropy(scores, ignored, reduction=reduction),
            F.cross_entropy(scores, ignored, weight=w.detach(), reduction=reduction, label_smoothing=0.1),
            F.cross_entropy(scores, torch.softmax(scores, dim=1).detach(), reduction=reduction),
            F.nll_loss(scores, torch.where(rows > 5, 11, targets), ignore_index=11, reduction=reduction),
            ATEN.nll_loss((x * w)[:, 1], ignored[:, 3], None, NUMBERS[reduction]),
            F.cross_entropy((x * w)[:, 0], ignored[:, 4], reduction=reduction),
        ]

    return function, [(12,)]


def pieces(function):
    """A call with several results, of which each counts."""
    return lambda x, w: list(function(x * w))


def vocabulary(n_rows):
    """A tied table with this many rows: looked up, and scored with a cross-entropy that ignores some rows."""

    def function(x, w):
        tokens = ids(x, n_rows)
        scores = (F.embedding(tokens, w) @ w.t()).flatten(0, 1)
        targets = torch.where(torch.arange(8, device=x.device) < 3, -100, tokens).flatten()
        return [
            F.cross_entropy(scores, targets),
            F.cross_entropy(scores, targets, reduction="sum", label_smoothing=0.1),
            F.embedding(tokens, w, padding_idx=1),
        ]

    return function, [(n_rows, 24)]


def heads(x, n):
    """[batch, n heads, 8, 12 / n]."""
    return x.reshape(-1, 8, n, 12 // n).transpose(1, 2)


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
    return [F.grouped_mm(hidden * 2.0, experts.mT, offs=ends), torch.empty_like(ids(x, 8))]


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
        y.to(torch.float64), y.type_as(x), ATEN._to_copy(y, dtype=torch.float64),
        ATEN.to.device(y, y.device, torch.float64),
        ATEN.to.dtype_layout(y, dtype=torch.float64, device=y.device), y.flip(1), y.roll(1, 1), y.roll((1, 2), (1, 2)),
        y.flip(2), y.roll(3),
    ]  # fmt: skip


def cuts(x, w):
    y = x * w
    return [
        y[:, 2:6], y[:, :, 3:], y[:, ::2], y[:, 0:8], y.narrow(1, 2, 3), y.narrow(2, 0, 12), F.pad(y, (1, 1)),
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


def reductions(x, w):
    y = x * w
    return [
        y.sum(), y.sum(dim=1), y.sum(dim=2, keepdim=True), y.sum(dim=(1, 2)), y.mean(), y.mean(dim=1),
        y.var(1), ATEN.var.correction(y, [1], correction=0, keepdim=True), y.std(2),
        ATEN.std.correction(y, [1], correction=1), *torch.var_mean(y, 1),
        *ATEN.var_mean.correction(y, [2], correction=0, keepdim=True), y.amax(1), y.amin((1, 2)), y.amin(2),
        y.max(), y.min(),
        *y.max(1), *y.min(2, keepdim=True), *y.median(1), y.prod(), y.prod(1), y.logsumexp(1),
        torch.linalg.vector_norm(y, 2.0, 1, True), torch.linalg.vector_norm(y), ATEN.norm.Scalar(y, 2),
        ATEN.norm.ScalarOpt_dim(y, 2, [1]), F.cosine_similarity(y, x, dim=2), y.argmax(1), y.argmin(2, True),
        (y > 0.5).any(), (y > 0.5).any(1), ATEN.any.dims(y > 0.5, [1]), (y > 0.5).all(), (y > 0.5).all(2, True),
        ATEN.all.dims(y > 0.5, [1]), y.argmax(),
    ]  # fmt: skip


def along(x, w):
    y = x * w
    return [
        y.cumsum(1), y.cumsum(2), y.cumprod(1), *y.cummax(1), *y.cummin(2), y.logcumsumexp(1), y.diff(dim=1),
        *y.sort(1), *torch.sort(y, stable=True, dim=2), y.argsort(1), ATEN.argsort.stable(y, stable=True, dim=2),
        *y.topk(3, 1),
    ]  # fmt: skip


def products(x, w, m):
    y = x * w
    return [
        x @ (m * 1.0), torch.bmm(y, y.transpose(1, 2)), y @ w, x[0] @ y.transpose(1, 2), torch.mm(y[0], m),
        torch.addmm(w, y[0], m[:, :12]), torch.addmm(x[0] * w, y[0], m[:, :12], beta=0.5, alpha=2.0),
        torch.baddbmm(w, y, m[:, :12].expand(4, 12, 12) if y.shape[0] == 4 else m[:, :12].expand(y.shape[0], 12, 12)),
        torch.mv(y[0], w), torch.dot(w, y[0, 0]), torch.addmv(w[:8], y[0], w), torch.tensordot(y, m, dims=([2], [0])),
        y.unsqueeze(1) @ y.unsqueeze(2).transpose(-1, -2),
    ]  # fmt: skip


def norms(x, w, b, image_w, image_b):
    y = x * w
    return [
        F.layer_norm(y, (12,), w, b), F.layer_norm(y, (8, 12)), F.rms_norm(y, (12,), w),
        F.group_norm(y, 4, image_w, image_b), F.group_norm(y, 8), F.instance_norm(y, weight=image_w, bias=image_b),
        torch.softmax(y, dim=-1), torch.softmax(y, dim=1), torch.log_softmax(y, dim=-1), ATEN._softmax(y, 1, False),
        ATEN._log_softmax(y, 1, False), ATEN._safe_softmax(y, 1), torch._weight_norm(y[0], image_w[:, None], 0),
        F.glu(y, 1), F.glu(y, 2),
    ]  # fmt: skip


def pools(x, w):
    y = (x * w).reshape(-1, 8, 3, 4)
    z, cube = x * w, (x * w).reshape(-1, 8, 3, 2, 2)
    return [
        F.max_pool2d(y, 2, padding=1), F.avg_pool2d(y, 2), F.adaptive_avg_pool2d(y, 2), F.adaptive_avg_pool2d(y, 1),
        ATEN._adaptive_avg_pool2d(y, [2, 2]), ATEN._adaptive_avg_pool3d(cube, [1, 2, 1]),
        *F.adaptive_max_pool2d(y, 2, return_indices=True), *ATEN.max_pool2d_with_indices(y, [2, 2]),
        F.max_pool1d(z, 2), F.avg_pool1d(z, 3, stride=1), F.adaptive_avg_pool1d(z, 3),
        *F.adaptive_max_pool1d(z, 3, return_indices=True), F.max_pool3d(cube, 2), F.avg_pool3d(cube, 2),
        F.adaptive_avg_pool3d(cube, 1), *F.adaptive_max_pool3d(cube, 1, return_indices=True),
        *ATEN.max_pool3d_with_indices(cube, [1, 2, 2]),
        F.interpolate(z, scale_factor=2.0), F.interpolate(y, scale_factor=2.0), F.interpolate(cube, size=(6, 2, 2)),
        F.interpolate(z, size=5, mode="linear"), F.interpolate(y, size=(5, 6), mode="bilinear"),
        F.interpolate(y, size=(2, 2), mode="bilinear", antialias=True), F.interpolate(y, size=(6, 6), mode="bicubic"),
        F.interpolate(y, size=(2, 2), mode="bicubic", antialias=True),
        F.interpolate(cube, size=(4, 3, 3), mode="trilinear"),
        F.unfold(y, 2), F.fold(F.unfold(y, 2), (3, 4), 2), F.pixel_shuffle(y, 2), F.pixel_unshuffle(y[:, :, :2], 2),
    ]  # fmt: skip


def chosen(x, w, slopes):
    y = x * w
    return [
        torch.where(x > 0.5, y, x), torch.where(x > 0.5, y, 0.0), torch.where(x > 0.5, 0.0, y),
        torch.where(x > 0.5, 1.0, 0.0), y.masked_fill(x > 0.5, 1.0), y.masked_fill(x > 0.5, w.sum()),
        F.prelu(y, slopes), F.prelu(y, slopes[:1]), torch.lerp(x, y, 0.3), torch.lerp(x, y, w), torch.addcmul(x, y, w),
        torch.addcdiv(x, y, w, value=2.0), torch.clamp(y, w - 0.3, w + 0.1), F.dropout(y, 0.0),
    ]  # fmt: skip


CALLS = {
    "unary": each(
        "abs acos asin asinh atan atanh celu cos cosh digamma elu erf erfc erfinv exp2 expm1 frac hardshrink"
        " hardsigmoid hardswish hardtanh leaky_relu lgamma log log10 log1p log2 log_sigmoid logit mish relu6 selu silu"
        " sin sinc sinh softplus softshrink square tan threshold clamp clamp_min clamp_max nan_to_num exp reciprocal"
        " rsqrt sqrt ceil floor round trunc sign sgn logical_not isnan isinf isfinite neg positive gelu relu sigmoid"
        " tanh",
        arguments={"clamp": (0.2, 0.3), "clamp_min": (0.2,), "clamp_max": (0.3,), "threshold": (0.2, 0.1)},
    ),
    "unary above one": each("acosh", shift=1.5),
    "with numbers": with_numbers(
        "pow.Tensor_Scalar add.Scalar sub.Scalar rsub.Scalar mul.Scalar div.Scalar eq.Scalar ne.Scalar lt.Scalar"
        " le.Scalar gt.Scalar ge.Scalar remainder.Scalar fmod.Scalar",
        0.7,
    ),
    "powers and rounded quotients": (
        lambda x, w: [
            torch.pow(2.0, x * w),
            torch.div(x * w, 0.3, rounding_mode="floor"),
            ATEN.div.Scalar_mode(x * w, 0.3, rounding_mode="trunc"),
            ATEN.div.Tensor_mode(x * w, x, rounding_mode=None),
            2.0 * w - x,
            torch.add(x, x * w, alpha=2.0),
        ],
        [(12,)],
    ),
    "pairs": pairs(
        "maximum minimum max.other min.other atan2 pow.Tensor_Tensor xlogy.Tensor hypot logaddexp logaddexp2"
        " remainder.Tensor fmod.Tensor copysign.Tensor clamp_min.Tensor clamp_max.Tensor add.Tensor sub.Tensor"
        " mul.Tensor div.Tensor eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor"
    ),
    "whole numbers": whole_numbers(
        " ".join(f"bitwise_{n}.{k} __{n}__.{k}" for n in ("and", "or", "xor") for k in ("Scalar", "Tensor"))
        + " logical_and logical_or logical_xor floor_divide floor_divide.Scalar"
    ),
    "not": (lambda x, w: [~(x * w > 0.5)], [(12,)]),
    "chosen": (chosen, [(12,), (8,)]),
    "add broadcast rows": (lambda x, w: x + w, [(8, 1)]),
    "linear": (lambda x, w, b: F.linear(x, w, b), [(24, 12), (24,)]),
    "linear without bias": (lambda x, w: F.linear(x, w), [(24, 12)]),
    "products": (products, [(12,), (12, 24)]),
    "bilinear": (lambda x, w, b: F.bilinear(x, x, w, b), [(6, 12, 12), (6,)]),
    "einsum": (einsums, [(12,), (12, 24)]),
    **{f"convolutions {n}d": convolutions(n) for n in (1, 2, 3)},
    **{f"transposed convolutions {n}d": transposed_convolutions(n) for n in (1, 2, 3)},
    "raw convolution": (raw_convolution, [(12,), (8, 8, 3, 3), (8, 2, 3, 3)]),
    "pools": (pools, [(12,)]),
    "norms": (norms, [(12,), (12,), (8,), (8,)]),
    "batch norm": (
        lambda x, w, scale, shift, mean, variance: [
            F.batch_norm(x * w, mean, variance, scale, shift, training=True),
            F.batch_norm(x * w, None, None, scale, shift, training=True),
        ],
        [(12,), (8,), (8,), (0, 8), (0, 8)],
    ),
    "counter": (lambda x, w, count: x * w + count.add_(1.0), [(12,), (0, 12)]),
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
    "reductions": (reductions, [(12,)]),
    "along a dim": (along, [(12,)]),
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
    "vocabulary": vocabulary(12),
    "odd vocabulary": vocabulary(13),
    **{f"losses, {r}": losses(r) for r in ("none", "mean", "sum")},
    **{f"classes, {r}": classes(r) for r in ("none", "mean", "sum")},
    "joint losses": (
        lambda x, w: [
            ATEN.cosine_embedding_loss(x[:, 0] * w, x[:, 1], torch.ones_like(x[:, 0, 0])),
            ATEN.triplet_margin_loss(x * w, x, x * 2),
            ATEN.margin_ranking_loss(x * w, x, torch.ones_like(x)),
        ],
        [(12,)],
    ),
}
