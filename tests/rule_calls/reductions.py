"""Calls of what goes along dims: reductions, norms, pools, losses over a vocabulary."""

import torch
from torch.nn import functional as F

from rule_calls.toys import ATEN, ids

NUMBERS = {"none": 0, "mean": 1, "sum": 2}


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


def ctc(scores):
    """Eight frames of 12 labels, aligned with two labels of each sample, or with one."""
    log_probs = scores.log_softmax(-1).transpose(0, 1)
    labels = ids(scores.sigmoid(), 11)[:, :2] * 0 + torch.arange(3, 7, 2, device=scores.device)
    n_labels = 2 - (torch.arange(scores.shape[0], device=scores.device) > 1).to(torch.int64)
    return F.ctc_loss(log_probs, labels, n_labels * 0 + 8, n_labels)


def vocabulary(n_rows):
    """A tied table with this many rows: looked up, and scored with a cross-entropy that ignores some rows."""

    def function(x, w):
        tokens = ids(x, n_rows)
        scores = (F.embedding(tokens, w) @ w.t()).flatten(0, 1)
        targets = torch.where(torch.arange(8, device=x.device) < 3, -100, tokens).flatten()
        return [
            F.cross_entropy(scores, targets),
            F.cross_entropy(scores, targets, reduction="sum", label_smoothing=0.1),
            F.embedding(tokens, w, padding_idx=0),
            F.embedding(tokens, w, padding_idx=-2, scale_grad_by_freq=True),
        ]

    return function, [(n_rows, 24)]


def bags(x, w):
    tokens = ids(x, 12)
    starts = torch.arange(0, tokens.numel(), 4, device=x.device)
    flat, scales = tokens.flatten(), (x * 0.5).sum(-1).flatten()
    return [
        F.embedding_bag(tokens, w, mode="sum"),
        F.embedding_bag(tokens, w),
        F.embedding_bag(tokens, w, mode="max"),
        F.embedding_bag(flat, w, starts, mode="sum", padding_idx=1),
        F.embedding_bag(tokens, w, mode="sum", per_sample_weights=scales.reshape(tokens.shape)),
        ATEN.embedding_bag.default(w, flat, starts, False, 0)[0],
    ]


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


CALLS = {
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
    "reductions": (reductions, [(12,)]),
    "along a dim": (along, [(12,)]),
    "bags": (bags, [(12, 24)]),
    "vocabulary": vocabulary(12),
    "odd vocabulary": vocabulary(13),
    **{f"losses, {r}": losses(r) for r in ("none", "mean", "sum")},
    **{f"classes, {r}": classes(r) for r in ("none", "mean", "sum")},
    "joint losses": (
        lambda x, w: [
            ATEN.cosine_embedding_loss(x[:, 0] * w, x[:, 1], torch.ones_like(x[:, 0, 0])),
            ATEN.triplet_margin_loss(x * w, x, x * 2),
            ATEN.margin_ranking_loss(x * w, x, torch.ones_like(x)),
            ctc(x * w),
        ],
        [(12,)],
    ),
}
