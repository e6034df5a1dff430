"""Reductions over dims. Splitting a summed dim leaves partial sums; other reductions keep their dims whole.

A mean's divisor is the global extent, so that it may not be split, but a partial value may pass through.
"""

from autoplan.equations import Equation, argument, dim_names, marked, normal_dims, write_equation
from autoplan.graph import Op
from autoplan.rules import OpRule, Specs


def _reduce(mark: str, *, dim_at: int = 1, keepdim_at: int = 2) -> Equation:
    """The equation of a reduction whose dims (None: all) and `keepdim` are the arguments at these positions.

    Every operand has the same dims, or is broadcast to them.
    """

    def equation(op: Op, operands: Specs) -> str:
        rank = max(len(spec.shape) for spec in operands)
        dims = normal_dims(argument(op, dim_at, "dim"), rank)
        keeps = bool(argument(op, keepdim_at, "keepdim", False))
        names = marked(dim_names(rank), dims, mark)
        kept = [f"d{i}" if i not in dims else f"one{i}" for i in range(rank) if i not in dims or keeps]
        return write_equation([names] * len(operands), kept)

    return equation


def _similarity(op: Op, operands: Specs) -> str:
    """cosine_similarity(x1, x2, dim=1) of equal shapes; broadcast ones stay whole."""
    rank, dim = len(operands[0].shape), argument(op, 2, "dim", 1)
    is_equal = operands[0].shape == operands[1].shape
    whole = {dim % rank} if is_equal else set(range(rank))
    names = marked(dim_names(rank), whole, "^")
    other = names if is_equal else marked(dim_names(len(operands[1].shape), "x"), range(len(operands[1].shape)), "^")
    result = [name for i, name in enumerate(names) if i != dim % rank]
    return write_equation([names, other], result if is_equal else ["y^"] * len(op.outputs[0].shape))


_SUM = OpRule(_reduce("+"), backward_bytes_ratio=1.0, linear_in=(0,))
_MEAN = OpRule(_reduce("^"), backward_bytes_ratio=1.0, linear_in=(0,))
_VARIANCE = {"flops_per_point": 4.0, "saves": (0,), "backward_bytes_ratio": 1.5}
_EXTREME = {"saves": (0, -1), "backward_bytes_ratio": 1.0}
_NO_GRADIENT = {"n_backward_kernels": 0}

RULES = {
    "aten.sum.default": _SUM,
    "aten.sum.dim_IntList": _SUM,
    "aten.mean.default": _MEAN,
    "aten.mean.dim": _MEAN,
    "aten.var.dim": OpRule(_reduce("^", keepdim_at=3), **_VARIANCE),
    "aten.std.dim": OpRule(_reduce("^", keepdim_at=3), **_VARIANCE),
    "aten.var_mean.dim": OpRule(_reduce("^", keepdim_at=3), **_VARIANCE),
    **{
        f"aten.{name}.correction": OpRule(_reduce("^", keepdim_at=9), **_VARIANCE)
        for name in ("var", "std", "var_mean")
    },
    "aten.amax.default": OpRule(_reduce("^"), **_EXTREME),
    "aten.amin.default": OpRule(_reduce("^"), **_EXTREME),
    "aten.max.default": OpRule(_reduce("^"), **_EXTREME),
    "aten.min.default": OpRule(_reduce("^"), **_EXTREME),
    "aten.max.dim": OpRule(_reduce("^"), **_EXTREME),
    "aten.min.dim": OpRule(_reduce("^"), **_EXTREME),
    "aten.median.dim": OpRule(_reduce("^"), **_EXTREME),
    "aten.prod.default": OpRule(_reduce("^", dim_at=9), **_EXTREME),
    "aten.prod.dim_int": OpRule(_reduce("^"), **_EXTREME),
    "aten.logsumexp.default": OpRule(_reduce("^"), flops_per_point=6.0, saves=(0, -1), backward_bytes_ratio=1.0),
    "aten.linalg_vector_norm.default": OpRule(_reduce("^", dim_at=2, keepdim_at=3), **_EXTREME),
    "aten.norm.Scalar": OpRule(_reduce("^", dim_at=9), **_EXTREME),
    "aten.norm.ScalarOpt_dim": OpRule(_reduce("^", dim_at=2, keepdim_at=3), **_EXTREME),
    "aten.cosine_similarity.default": OpRule(_similarity, flops_per_point=6.0, saves=(0, 1), backward_bytes_ratio=2.0),
    "aten.argmax.default": OpRule(_reduce("^"), **_NO_GRADIENT),
    "aten.argmin.default": OpRule(_reduce("^"), **_NO_GRADIENT),
    "aten.any.default": OpRule(_reduce("^"), **_NO_GRADIENT),
    "aten.any.dim": OpRule(_reduce("^"), **_NO_GRADIENT),
    "aten.any.dims": OpRule(_reduce("^"), **_NO_GRADIENT),
    "aten.all.default": OpRule(_reduce("^"), **_NO_GRADIENT),
    "aten.all.dim": OpRule(_reduce("^"), **_NO_GRADIENT),
    "aten.all.dims": OpRule(_reduce("^"), **_NO_GRADIENT),
}
