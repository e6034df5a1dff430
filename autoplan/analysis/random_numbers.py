"""Which ops draw random numbers."""

from __future__ import annotations

from autoplan.analysis.across_samples import operator_name
from autoplan.equations import argument
from autoplan.graph import Op, OpGraph

# Where the probability stands among the arguments of ops that draw random masks, and its keyword.
_DROPOUT = {
    "aten.dropout.default": (1, "p"),
    "aten.native_dropout.default": (1, "p"),
    "aten.feature_dropout.default": (1, "p"),
    "aten.alpha_dropout.default": (1, "p"),
    "aten.feature_alpha_dropout.default": (1, "p"),
    "aten.scaled_dot_product_attention.default": (4, "dropout_p"),
    "aten.lstm.input": (5, "dropout"),
    "aten.gru.input": (5, "dropout"),
    "aten.rnn_tanh.input": (5, "dropout"),
    "aten.rnn_relu.input": (5, "dropout"),
}
# Operators other than dropout that draw random numbers.
_DRAWS = frozenset(
    (
        "rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "randperm", "normal",
        "normal_functional", "uniform", "bernoulli", "multinomial", "exponential", "rrelu_with_noise",
        "rrelu_with_noise_functional", "rrelu", "poisson", "binomial", "random", "geometric", "cauchy", "log_normal",
        "_standard_gamma", "_sample_dirichlet",
    )
)  # fmt: skip


def drop_probability(op: Op) -> float:
    """The probability with which an op drops elements; 0 for an op that drops none."""
    if op.target not in _DROPOUT:
        return 0.0
    position, keyword = _DROPOUT[op.target]
    return float(argument(op, position, keyword) or 0.0)


def is_random(op: Op) -> bool:
    """Whether an op other than dropout draws random numbers."""
    return operator_name(op) in _DRAWS


def draws_numbers(graph: OpGraph) -> bool:
    """Whether any op of a model draws random numbers in training."""
    return any(is_random(op) or drop_probability(op) > 0 for op in graph.ops)
