"""Fused attention. Flash attention: no score matrix in memory, backward recomputes it (5 products instead of 2)."""

from autoplan.graph import Op, extent_at
from autoplan.rules import OpRule, Specs

_STATISTICS_BYTES = 4
# Achieved / rate of a large matrix product. H200, torch 2.11, bf16, causal, 4096 tokens, head dims 64 and 128: 369
# and 440 TFLOP/s forward, 315 and 365 backward, 736 for products (benchmarks/results/kernels_h200_2026-11-20.jsonl).
_FORWARD_FRACTION = 0.55
_BACKWARD_FRACTION = 0.46


def _attention(op: Op, operands: Specs) -> str:
    """q, k, v [, mask]. With grouped queries k and v have fewer heads; both head counts are then split alike."""
    if any(len(spec.shape) != 4 for spec in operands[:3]):
        return ", ".join(" ".join(f"x{i}{j}^" for j in range(len(s.shape))) for i, s in enumerate(operands)) + " -> "
    terms = ["b h s^ e^", "b h t^ e^", "b h t^ v^"]
    if len(operands) == 4:
        shape, mask = (*operands[0].shape[:3], operands[1].shape[2]), operands[3].shape
        names = ("b", "h", "s^", "t^")[4 - len(mask) :]
        full = shape[4 - len(mask) :]
        terms.append(
            " ".join(n if a == b else f"one{i}^" for i, (n, a, b) in enumerate(zip(names, mask, full, strict=True)))
        )
    return ", ".join(terms) + " -> b h s^ v^"


def _is_causal(op: Op) -> bool:
    return bool(dict(op.kwargs).get("is_causal", op.args[5] if len(op.args) > 5 else False))


def _flops(op: Op, operands: Specs, batch_size: int) -> int:
    """2 * heads * s * t * (e + v) per sample; half of it under a causal mask."""
    *leading, s, e = (extent_at(x, batch_size) for x in operands[0].shape)
    t, v = extent_at(operands[1].shape[-2], batch_size), extent_at(operands[2].shape[-1], batch_size)
    n_matrices = 1
    for extent in leading:
        n_matrices *= extent
    return 2 * n_matrices * s * t * (e + v) // (2 if _is_causal(op) else 1)


def _statistics(op: Op, operands: Specs, batch_size: int, precision: str) -> int:
    """One float32 log-sum-exp per query row."""
    return operands[0].n_elements(batch_size) // int(extent_at(operands[0].shape[-1], 1)) * _STATISTICS_BYTES


RULES = {
    "aten.scaled_dot_product_attention.default": OpRule(
        equation=_attention,
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
