"""Fused attention. Flash attention: no score matrix in memory, backward recomputes it (5 products instead of 2).

What may be split, beside the batch:

    heads     of query, key, value alike; of the query alone, where there are few key heads (`_few_key_heads`)
    rows      of the query, which is context parallelism: key and value whole on every rank, their gradients partial
              sums. Where the sequence is split, that is an all-gather of key and value, and a reduce-scatter back.

Heads between two all-to-alls of a split sequence are the other known form of context parallelism (Ulysses), and take
no rule of their own. Keys are never split: there is no ring, on which they travel while ranks compute. Each rank has
one run of rows, so that under a causal mask the last has (2 n - 1) / n^2 of the work of all n, not 1 / n.
"""

from collections.abc import Iterator

from autoplan.equations import Marks, argument, broadcast_marks, dim_names, write_equation
from autoplan.graph import Extent, Op, TensorSpec, extent_at
from autoplan.layout import V, sharded
from autoplan.rules import OpRule, Specs, Strategy

_STATISTICS_BYTES = 4
# Achieved / rate of a large matrix product. H200, torch 2.11, bf16, causal, 4096 tokens, head dims 64 and 128: 369
# and 440 TFLOP/s forward, 315 and 365 backward, 736 for products (benchmarks/results/kernels_h200_2026-11-20.jsonl).
_FORWARD_FRACTION = 0.55
_BACKWARD_FRACTION = 0.46


def _attention(op: Op, operands: Specs) -> str:
    """q, k, v [, mask]. With grouped queries k and v have fewer heads; both head counts are then split alike.

    Rows of the query may be split too (the scores of one need no other), with those of a mask. A causal mask counts
    their positions: then that takes a function (`_causal_rows`).
    """
    q, k, v = (spec.shape for spec in operands[:3])
    leading, rows = dim_names(len(q) - 2), "s^" if _is_causal(op) else "s"
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
    if not argument(op, 7, "enable_gqa", False) or len(result.shape) != 4:
        return
    n_heads, n_key_heads = operands[0].shape[1], operands[1].shape[1]
    n_local, n_per_key_head = n_heads // degree, n_heads // n_key_heads
    if n_heads % degree == 0 and (n_local % n_per_key_head == 0 or n_per_key_head % n_local == 0):
        mask = [sharded(1) if _has_heads(spec, n_heads) else V for spec in operands[3:]]
        yield Strategy((sharded(1), V, V, *mask), sharded(1), is_split=True, function="grouped_attention_of_rank")


def _causal_rows(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    """Rows of the query under a causal mask, where each has a key of its own."""
    q, k, *rest = operands
    if _is_causal(op) and len(rest) == 1 and q.shape[-2] == k.shape[-2]:
        rows = sharded(len(q.shape) - 2)
        yield Strategy((rows, V, V), rows, is_split=True, function="causal_attention_of_rows")


def _own(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    yield from _few_key_heads(op, operands, result, degree)
    yield from _causal_rows(op, operands, result, degree)


def _has_heads(mask: TensorSpec, n_heads: int) -> bool:
    return len(mask.shape) == 4 and mask.shape[1] == n_heads


def _is_causal(op: Op) -> bool:
    return bool(argument(op, 5, "is_causal", False))


def _flops(op: Op, operands: Specs, batch_size: int) -> int:
    """2 * heads * pairs of a query and a key * (e + v) per sample; under a causal mask, of the rank with most pairs."""
    *leading, s, e = (extent_at(x, batch_size) for x in operands[0].shape)
    t, v = extent_at(operands[1].shape[-2], batch_size), extent_at(operands[2].shape[-1], batch_size)
    n_pairs = s * t
    if _is_causal(op):
        is_split = s < extent_at(op.outputs[0].shape[-2], batch_size)
        n_pairs = s * t - s * s // 2 if is_split else n_pairs // 2
    n_matrices = 1
    for extent in leading:
        n_matrices *= extent
    return 2 * n_matrices * n_pairs * (e + v)


def _statistics(op: Op, operands: Specs, batch_size: int, precision: str) -> int:
    """One float32 log-sum-exp per query row."""
    return operands[0].n_elements(batch_size) // int(extent_at(operands[0].shape[-1], 1)) * _STATISTICS_BYTES


RULES = {
    "aten.scaled_dot_product_attention.default": OpRule(
        equation=_attention,
        strategies=_own,
        flops=_flops,
        backward_flops_ratio=2.5,
        backward_bytes_ratio=2.0,
        n_backward_kernels=3,
        saves=(0, 1, 2, -1),
        extra_saved_bytes=_statistics,
        efficiency="matmul",
        rate_fraction=_FORWARD_FRACTION,
        backward_rate_fraction=_BACKWARD_FRACTION,
    ),
}
