"""Recurrent networks: one op for all layers and steps, or for one step of a cell. Nothing is split: every step needs
the whole state.

per layer, direction and step:  2 * (elements of the weight matrices) FLOPs per sample
kept for backward:              the gates of every layer and step, and one state (a quarter of an LSTM's gates)
"""

from autoplan.equations import all_whole
from autoplan.graph import COMPUTE_DTYPES, DTYPE_BYTES, Op, TensorSpec, extent_at
from autoplan.rules import LocalCall, OpRule, Specs


def _n_rows(op: Op, operands: Specs, batch_size: int) -> int:
    """Samples times steps."""
    count = 1
    for extent in operands[0].shape[:-1]:
        count *= extent_at(extent, batch_size)
    return count


def _matrices(op: Op, operands: Specs) -> tuple[TensorSpec, ...]:
    """The weight matrices: the first operands are the sequence and the initial states."""
    n_states = len(op.args[1]) if isinstance(op.args[1], tuple) else 1
    return tuple(spec for spec in operands[1 + n_states :] if len(spec.shape) == 2)


def _flops(op: Op, operands: Specs, batch_size: int) -> int:
    return sum(2 * spec.n_elements(1) for spec in _matrices(op, operands)) * _n_rows(op, operands, batch_size)


def _gates(call: LocalCall) -> int:
    """Each layer and direction has two matrices of [gates * hidden, ...], which give the same gates."""
    n_gates = sum(int(extent_at(spec.shape[0], 1)) for spec in _matrices(call.op, call.operands)) // 2
    n_bytes = DTYPE_BYTES[COMPUTE_DTYPES[call.precision]]
    return 5 * n_gates * _n_rows(call.op, call.operands, call.batch_size) * n_bytes // 4


_RECURRENT = OpRule(
    all_whole,
    flops=_flops,
    backward_flops_ratio=2.0,
    backward_bytes_ratio=2.0,
    n_backward_kernels=2,
    saves=(0, -1),
    extra_saved_bytes=_gates,
    efficiency="matmul",
)

RULES = {
    **{f"aten.{name}.input": _RECURRENT for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{f"aten.{name}_cell.default": _RECURRENT for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}
