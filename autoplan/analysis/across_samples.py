"""What a model or its loss does across the samples of a batch: OpGraph -> the op that does it, or None.

Micro-batches and data-parallel ranks take a share of the samples each, and their losses and gradients are averaged.
That is the step of one process where every sample is worked on by itself and the loss is a mean over them:

    mixing_op    gives a sample something of the others: a product of samples with samples, a mean taken from each
    nonlinear_op makes something else than a sum of sums over samples: a ratio of two, the root of one, a product
    sum_op       adds the losses of the samples up, and nothing divides by how many there are

Left out: a maximum that is subtracted for stability mixes by this, though its result does not change.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.equations import argument
from autoplan.graph import Op, OpGraph, PerSample, Ref, TensorSpec

_SUM = 2  # the number of the reduction "sum" in ATen
# Where the reduction stands among the arguments of losses.
_REDUCTION = {
    "aten.binary_cross_entropy.default": 3,
    "aten.binary_cross_entropy_with_logits.default": 4,
    "aten.cross_entropy_loss.default": 3,
    "aten.ctc_loss.Tensor": 5,
    "aten.huber_loss.default": 2,
    "aten.kl_div.default": 2,
    "aten.l1_loss.default": 2,
    "aten.mse_loss.default": 2,
    "aten.nll_loss.default": 3,
    "aten.nll_loss2d.default": 3,
    "aten.nll_loss_nd.default": 3,
    "aten.smooth_l1_loss.default": 2,
}
_SUMS = frozenset({"aten.sum.default", "aten.sum.dim_IntList"})
_DIVISIONS = frozenset({"aten.div.Tensor", "aten.div.Scalar"})
_SCALINGS = _DIVISIONS | {"aten.mul.Tensor"}  # a product may be with one over a count
# What keeps a sum over samples one, apart from products and divisions.
_LINEAR = frozenset(
    (
        "add", "sub", "neg", "sum", "mean", "mul", "div", "rsub", "view", "reshape", "_unsafe_view", "flatten",
        "squeeze", "unsqueeze", "expand", "transpose", "t", "permute", "select", "slice", "stack", "cat", "unbind",
        "split", "to", "_to_copy", "clone", "contiguous", "alias", "detach", "getitem", "lift_fresh_copy", "where",
        "masked_fill", "index", "zeros_like", "ones_like", "full_like", "mse_loss", "l1_loss", "item",
    )
)  # fmt: skip
_NONLINEAR_REDUCTIONS = frozenset(
    (
        "amax", "amin", "max", "min", "median", "std", "var", "var_mean", "prod", "norm", "linalg_vector_norm",
        "logsumexp",
    )
)  # fmt: skip
_CONSTANTS = frozenset(
    (
        "ones", "zeros", "full", "arange", "scalar_tensor", "eye", "ones_like", "zeros_like", "full_like",
        "new_ones", "new_zeros", "new_full", "lift_fresh_copy",
    )
)  # fmt: skip
# Operators that read nothing of one operand, by its position, but its shape, dtype or device.
_READ_NO_VALUES = {
    **dict.fromkeys(
        (
            "empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "rand_like",
            "randn_like", "zeros_like",
        ),
        0,
    ),
    **dict.fromkeys(("expand_as", "reshape_as", "type_as", "view_as"), 1),
}  # fmt: skip
_BATCH_NORM = "batch_norm"  # has a note of its own


def mixing_op(graph: OpGraph) -> Op | None:
    """The first op by which a sample gets something of others; None where each is worked on by itself."""
    specs, reduced = graph.specs(), _of_all_samples(graph, only_floats=True)
    for op in graph.ops:
        n_before = max((_n_batch_dims(specs[name]) for name in op.input_names()), default=0)
        n_after = _n_batch_dims(op.outputs[0]) if op.outputs else 0
        if _BATCH_NORM in op.target or not n_after or not op.outputs[0].is_float:
            continue
        if n_after > 1 == n_before or any(name in reduced for name in _read_values(op)):
            return op
    return None


def nonlinear_op(graph: OpGraph) -> Op | None:
    """The last op of the loss that is not linear in sums over samples; None where the loss is a sum of such sums.

    Counts that do not depend on values, such as the sum of ones, are numbers here.
    """
    specs, ops, constants = graph.specs(), {op.name: op for op in graph.ops}, _constants(graph)
    reduced = _of_all_samples(graph, without=constants)
    open_names, seen = [graph.loss], set()
    while open_names:
        op = ops.get(open_names.pop())
        if op is None or op.name in seen or op.name not in reduced:
            continue
        seen.add(op.name)
        read = op.input_names()
        word = operator_name(op)
        if any(_n_batch_dims(specs[name]) for name in read if name not in constants):
            if word in _NONLINEAR_REDUCTIONS:
                return op
        elif (word not in _LINEAR and not reduced.isdisjoint(read)) or _multiplies(op, word, reduced):
            return op
        open_names += read
    return None


def _multiplies(op: Op, word: str, reduced: frozenset[str]) -> bool:
    """Whether an op multiplies, or divides by, values that are made of all samples."""
    positions = {"mul": (0, 1), "div": (1,), "mse_loss": (0,), "l1_loss": (0,)}.get(word, ())
    return bool(positions) and all(isinstance(op.args[i], Ref) and op.args[i].name in reduced for i in positions)


def _constants(graph: OpGraph) -> frozenset[str]:
    """Values that depend on no value of the batch or of the model, only on sizes."""
    found = set[str]()
    for op in graph.ops:
        read = op.input_names()
        if operator_name(op) in _CONSTANTS or (read and found.issuperset(read)):
            found.add(op.name)
    return frozenset(found)


def _of_all_samples(
    graph: OpGraph, *, without: frozenset[str] = frozenset(), only_floats: bool = False
) -> frozenset[str]:
    """Values without a batch dim that follow from values with one, but for those `without`."""
    specs, found = graph.specs(), set[str]()
    for op in graph.ops:
        result = op.outputs[0] if op.outputs and op.name not in without else None
        if result is None or _n_batch_dims(result) or (only_floats and not result.is_float):
            continue
        if any(name in found or _n_batch_dims(specs[name]) for name in _read_values(op) if name not in without):
            found.add(op.name)
    return frozenset(found)


def _read_values(op: Op) -> tuple[str, ...]:
    """The operands of which an op reads more than the shape, the dtype or the device."""
    position = _READ_NO_VALUES.get(operator_name(op))
    if position is None:
        return op.input_names()
    return replace(op, args=(*op.args[:position], *op.args[position + 1 :])).input_names()


def operator_name(op: Op) -> str:
    """`add` of `aten.add.Tensor`."""
    return op.target.removeprefix("aten.").split(".")[0]


def sum_op(graph: OpGraph) -> Op | None:
    """The op that adds up the losses of samples without a division by their number; None for a mean."""
    specs, reduced, ops = graph.specs(), _of_all_samples(graph), {op.name: op for op in graph.ops}
    open_names, seen = [graph.loss], set()
    while open_names:
        op = ops.get(open_names.pop())
        if op is None or op.name in seen:
            continue
        seen.add(op.name)
        read = op.input_names()
        if any(_n_batch_dims(specs[name]) for name in read):
            if op.target in _SUMS or (op.target in _REDUCTION and _reduction(op) == _SUM):
                return op
        elif not _is_divided(op, reduced):
            open_names += read
    return None


def _n_batch_dims(spec: TensorSpec) -> int:
    return sum(isinstance(extent, PerSample) for extent in spec.shape)


def _reduction(op: Op) -> int:
    return int(argument(op, _REDUCTION[op.target], "reduction", default=1))


def _is_divided(op: Op, reduced: frozenset[str]) -> bool:
    """Whether a loss is divided here by the number of samples, or by a sum over them such as a count."""
    second = op.args[1] if op.target in _SCALINGS else None
    if isinstance(second, PerSample):
        return op.target in _DIVISIONS
    return isinstance(second, Ref) and second.name in reduced
