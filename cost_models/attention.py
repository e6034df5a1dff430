"""Fused attention. Flash attention: no score matrix in memory, backward recomputes it (5 products instead of 2).

What may be split, beside the batch:

    heads     of query, key, value alike; of the query alone, where there are few key heads (`_few_key_heads`)
    rows      of the query, which is context parallelism: key and value whole on every rank, their gradients partial
              sums. Where the sequence is split, that is an all-gather of key and value, and a reduce-scatter back.

Heads between two all-to-alls of a split sequence are the other known form of context parallelism (Ulysses), and take
no rule of their own. Keys are never split: there is no ring, on which they travel while ranks compute. Under a causal
mask the last rows have most to do; there ranks exchange rows first, so that each has early and late ones, and exchange
the results back. Where there is no flash attention (32-bit numbers, GPUs before A100) they read a mask, and skip
nothing of it; that is not priced.

What the kernel that torch takes (`analysis.attention_kernel`) achieves:

    cudnn        F n / (n + half) d / (d + width) of a large product; n keys that a row reads on average, of d numbers;
                 beside a mask a part of that
    flash, cpu   a part of a large product
    efficient    32 bits: a part of the peak of float32, whether products are rounded to tf32 or not; 16 bits: as flash,
                 but on Hopper as cudnn, by other figures
    math         products as they stand, of float32 in place of 16 bits, each of which writes or reads a matrix of
                 scores; passes over the scores beside them, of which one is kept for backward, and three with
                 dropout; 16 bits are copied to float32, and kept so
"""

from collections.abc import Iterator
from dataclasses import replace

from autoplan.analysis.attention_kernel import (
    ATTENTION,
    IN_16_BITS,
    N_UNMASKED,
    Kernel,
    dropout_of,
    has_few_key_heads,
    has_split_rows,
    is_causal,
    kernel_of,
    log_sum_exp_bytes,
)
from autoplan.equations import Marks, broadcast_marks, dim_names, write_equation
from autoplan.graph import Extent, Op, TensorSpec, extent_at
from autoplan.layout import V, sharded
from autoplan.rules import Arithmetic, LocalCall, OpRule, Specs, Strategy

# Achieved / rate of a large matrix product, forward and backward. Flash attention itself was not measured: these are of
# cuDNN's on an H200 (torch 2.11, bf16, causal, 4096 tokens, head dims 64 and 128: 369 and 440 TFLOP/s forward, 315 and
# 365 backward, 736 for products; benchmarks/results/kernels_h200_2026-11-20.jsonl), with which published runs of MPT on
# A100 are met. The efficient kernel in 16 bits was not measured but on Hopper (V100, T4; a mask on A100).
_FLASH_FRACTIONS = (0.55, 0.46)
# (F, half, width) of forward and backward: 60 shapes of 197 to 65,536 tokens on an H200
# (`benchmarks/attention_rates.py fit benchmarks/results/attention_rates_h200_2026-11-25.jsonl`).
_CUDNN_fit = ((1.30, 240, 56), (1.09, 450, 40))
# Beside masks, of 128, 512 and 2048 tokens on an H100 (benchmarks/results/attention_masks_h100_2026-11-26.jsonl, which
# `attention_rates.py masks` writes): the part of cuDNN's rate that is left, and, beside a mask that has a gradient, the
# efficient kernel's. Mean |log| of 18 rows 0.09, and of 6 rows 0.04.
_MASKED_fit = (0.53, 0.66)
_EFFICIENT_fit = ((0.34, 20, 110), (0.20, 20, 42))
# Of the peak of float32: 32.8 of 67 TFLOP/s forward and 32.9 backward, H200, 4096 tokens, head dim 64, with products in
# float32 and in tf32 (benchmarks/results/in_32_bits_h200_2026-11-25.jsonl).
_EFFICIENT_FRACTION = 0.49
# Passes of the math kernel over scores, forward and backward, beside its products, and in 16 bits over queries, of
# which it makes copies, as of keys and values. In the six rows of that file beside a mask of which the numbers of a row
# lie apart it goes over scores 17.3 and 9.1 times, over queries 22 and 19 times (least squares, mean |log| 0.07 and
# 0.01). A number of such a mask is read with the 32 bytes around it, which are 8 numbers of float32; the others are
# taken for passes that it has beside any mask. Compiled it goes over scores about 6.8 and 7 times, and over queries 8
# and 19 times (the user's own blocks of T5-large beside generated ones, by hand,
# benchmarks/results/profile_h200_x2_2026-11-25_compiled.jsonl). Causal, without another mask: kernels of Llama-1B in
# tf32, eager and compiled (benchmarks/results/step_kernels_llama_1b_tf32_h200_2026-11-29.txt); without any mask, its
# softmax.
_MASKED_PASSES_fit = {"eager": (9.3, 9.1), "compiled": (6.8, 7.0)}
_SCATTERED_PASSES = 8
_CAUSAL_PASSES_fit = {"eager": (12.5, 5.9), "compiled": (3.6, 2.9)}
_SOFTMAX_PASSES_fit = {"eager": (3.9, 3.0), "compiled": (3.6, 2.9)}
_COPIES_fit = {"eager": (22, 19), "compiled": (8, 19)}
# What it keeps of their size: the softmax; with dropout what was drawn too, and the product of both (torch 2.13 on a
# CPU; a GPU keeps a byte for each number that was drawn, which is less).
_N_KEPT, _N_KEPT_WITH_DROPOUT = 1, 3


def _attention(op: Op, operands: Specs) -> str:
    """q, k, v [, mask]. With grouped queries k and v have fewer heads; both head counts are then split alike.

    Rows of the query may be split too (the scores of one need no other), with those of a mask. A causal mask counts
    their positions: then that takes a function (`_causal_rows`).
    """
    q, k, v = (spec.shape for spec in operands[:3])
    leading, rows = dim_names(len(q) - 2), "s^" if is_causal(op) else "s"
    full, names = (*q[:-1], k[-2]), (*leading, rows, "t^")
    terms = [
        (*leading, rows, "e^"),
        (*_shared(k, leading, "k"), "t^", "e^"),
        (*_shared(v, leading, "v"), "t^", "f^"),
        *(broadcast_marks(spec.shape, full, names, "one") for spec in operands[3:]),
    ]
    return write_equation(terms, (*leading, rows, "f^"))


def _shared(shape: tuple[Extent, ...], leading: Marks, prefix: str) -> Marks:
    """The letters of the leading dims of k or v; a dim of size 1 is broadcast."""
    offset = len(leading) - len(shape) + 2
    return tuple(leading[offset + i] if extent != 1 else f"{prefix}{i}^" for i, extent in enumerate(shape[:-2]))


def _few_key_heads(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    """Fewer key than query heads, on more ranks than key heads: k and v whole, of which each rank takes what its
    query heads read. These must be whole groups of queries, or share one key head.
    """
    if not has_few_key_heads(op) or len(result.shape) != 4:
        return
    n_heads, n_key_heads = operands[0].shape[1], operands[1].shape[1]
    n_local, n_per_key_head = n_heads // degree, n_heads // n_key_heads
    if n_heads % degree == 0 and (n_local % n_per_key_head == 0 or n_per_key_head % n_local == 0):
        mask = [sharded(1) if _has_heads(spec, n_heads) else V for spec in operands[3:]]
        yield Strategy((sharded(1), V, V, *mask), sharded(1), is_split=True, function="grouped_attention_of_rank")


def _causal_rows(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    """Rows of the query under a causal mask, where each has a key of its own; two runs of them for every rank."""
    q, k, *rest = operands
    n_rows, n_keys = q.shape[-2], k.shape[-2]
    is_square = len(rest) == 1 and n_rows == n_keys and isinstance(n_rows, int)
    if is_causal(op) and is_square and n_rows % (2 * degree) == 0:
        rows = sharded(len(q.shape) - 2)
        yield Strategy((rows, V, V), rows, is_split=True, function="causal_attention_of_rows", exchanged=(0, -1))


def _own(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    yield from _few_key_heads(op, operands, result, degree)
    yield from _causal_rows(op, operands, result, degree)


def _has_heads(mask: TensorSpec, n_heads: int) -> bool:
    return len(mask.shape) == 4 and mask.shape[1] == n_heads


def _flops(op: Op, operands: Specs, batch_size: int) -> int:
    """2 * heads * s * t * (e + v) per sample; half of it under a causal mask."""
    *leading, s, e = (extent_at(x, batch_size) for x in operands[0].shape)
    t, v = extent_at(operands[1].shape[-2], batch_size), extent_at(operands[2].shape[-1], batch_size)
    n_matrices = 1
    for extent in leading:
        n_matrices *= extent
    return 2 * n_matrices * s * t * (e + v) // (2 if is_causal(op) else 1)


def _kernel(call: LocalCall) -> Kernel:
    return kernel_of(
        call.op,
        call.operands,
        precision=call.precision,
        attention=call.attention,
        mask_has_gradient=any(call.gradients[N_UNMASKED:]),
        mask_is_scattered=_has_scattered_mask(call),
    )


def _has_scattered_mask(call: LocalCall) -> bool:
    return any(call.scattered[N_UNMASKED:])


def _arithmetic(call: LocalCall) -> Arithmetic:
    kernel = _kernel(call)
    if kernel == "math":
        skipped = 0.5 if is_causal(call.op) else 1.0  # `_flops` leaves out what a fused kernel skips
        return Arithmetic(call.precision not in IN_16_BITS, skipped, skipped)
    if kernel == "efficient" and call.precision not in IN_16_BITS:
        return Arithmetic(False, _EFFICIENT_FRACTION, _EFFICIENT_FRACTION)
    if kernel != "cudnn" and not (kernel == "efficient" and call.attention == "cudnn"):
        return Arithmetic(True, *_FLASH_FRACTIONS)
    head_dim, n_keys = (extent_at(spec.shape[dim], 1) for spec, dim in ((call.operands[0], -1), (call.operands[1], -2)))
    n_read = n_keys / 2 if is_causal(call.op) else n_keys
    is_slowed = kernel == "cudnn" and len(call.operands) > N_UNMASKED
    figures = zip(_CUDNN_fit if kernel == "cudnn" else _EFFICIENT_fit, _MASKED_fit, strict=True)
    return Arithmetic(
        True,
        *(
            most * n_read / (n_read + half) * head_dim / (head_dim + width) * (masked if is_slowed else 1.0)
            for (most, half, width), masked in figures
        ),
    )


def _math_precision(call: LocalCall) -> str:
    """The math kernel computes 16 bits in float32."""
    return "fp32" if call.precision in IN_16_BITS else call.precision


def _scores_bytes(call: LocalCall) -> int:
    query, key = call.operands[:2]
    scores = TensorSpec((*query.shape[:-1], key.shape[-2]), query.dtype)
    return scores.n_bytes(call.batch_size, _math_precision(call))


def _product_bytes(call: LocalCall) -> int:
    """What the products read and write; of the math kernel each of the two writes or reads scores."""
    scores_bytes = 2 * _scores_bytes(call) if _kernel(call) == "math" else 0
    return scores_bytes + sum(s.n_bytes(call.batch_size, call.precision) for s in (*call.operands, *call.results))


def _math_bytes(call: LocalCall) -> tuple[float, float]:
    """What the math kernel moves beside its products, forward and backward."""
    if _kernel(call) != "math":
        return 0.0, 0.0
    scores_bytes, query_bytes = _scores_bytes(call), call.operands[0].n_bytes(call.batch_size, _math_precision(call))
    of_passes = _CAUSAL_PASSES_fit if is_causal(call.op) else _SOFTMAX_PASSES_fit
    if len(call.operands) > N_UNMASKED:
        of_passes = _MASKED_PASSES_fit
    way = "compiled" if call.is_compiled else "eager"
    forward, backward = (
        passes * scores_bytes + (copies * query_bytes if call.precision in IN_16_BITS else 0)
        for passes, copies in zip(of_passes[way], _COPIES_fit[way], strict=True)
    )
    is_apart = _has_scattered_mask(call) and not call.is_compiled
    return forward + (_SCATTERED_PASSES * scores_bytes if is_apart else 0), backward


def _kept_inside(call: LocalCall) -> int:
    """The log-sum-exp of each row, or scores; and the results of other ranks' rows, before they are exchanged.

    The math kernel keeps queries, keys and values of 16 bits in float32, in their stead. Others keep the mask: that is
    counted where the segment makes it, or where it is a copy, in numbers, of one that says yes or no. Others are taken
    for one that segments share.
    """
    parts, masks = call.operands[:N_UNMASKED], call.operands[N_UNMASKED:]
    if _kernel(call) == "math":
        copied_bytes = sum(
            spec.n_bytes(call.batch_size, _math_precision(call)) - spec.n_bytes(call.batch_size, call.precision)
            for spec in parts
        )
        return (_N_KEPT_WITH_DROPOUT if dropout_of(call.op) else _N_KEPT) * _scores_bytes(call) + copied_bytes
    query, _, value = parts
    results = TensorSpec((*query.shape[:-1], value.shape[-1]), query.dtype)
    exchanged = results.n_bytes(call.batch_size, call.precision) if has_split_rows(call.op, call.operands) else 0
    is_own = any(call.own[N_UNMASKED:])
    kept = (replace(mask, dtype=query.dtype) for mask in masks if is_own or not mask.is_float)
    mask_bytes = sum(mask.n_bytes(call.batch_size, call.precision) for mask in kept)
    return log_sum_exp_bytes(query, call.batch_size) + exchanged + mask_bytes


RULES = {
    ATTENTION: OpRule(
        equation=_attention,
        strategies=_own,
        flops=_flops,
        moved_bytes=_product_bytes,
        backward_flops_ratio=2.5,
        backward_bytes_ratio=2.0,
        n_backward_kernels=3,
        saves=(0, 1, 2, -1),
        extra_saved_bytes=_kept_inside,
        efficiency="matmul",
        arithmetic=_arithmetic,
        further_bytes=_math_bytes,
    ),
}
