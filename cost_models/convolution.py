"""Convolutions: split over output channels, over input channels (partial sums), or over groups.

    x: [batch, in, *space]    weight: [out, in / groups, *kernel]    transposed: weight: [in, out / groups, *kernel]

With groups only whole groups can be split; input and output channels go together then. A depthwise convolution (one
output channel per group) is element-wise in its channels. Space and kernel stay whole.
"""

from collections.abc import Iterator

from autoplan.equations import added, argument, dim_names, marked, write_equation
from autoplan.graph import Op, TensorSpec, extent_at
from autoplan.layout import sharded
from autoplan.rules import OpRule, Specs, Strategy


def _is_transposed(op: Op) -> bool:
    return bool(op.args[6]) if "convolution" in op.target else "transpose" in op.target


def _n_groups(op: Op) -> int:
    position = 8 if "convolution" in op.target else 6
    return argument(op, position, "groups", 1)


def _convolution(op: Op, operands: Specs) -> str:
    """Letters for one group or depthwise; other groups are split by `_split_groups`."""
    x, weight, *bias = operands
    n_groups, out_channels = _n_groups(op), op.outputs[0].shape[-len(weight.shape) + 1]
    kernel = marked(dim_names(len(weight.shape) - 2, "w"), range(len(weight.shape)), "^")
    space = marked(dim_names(len(weight.shape) - 2, "s"), range(len(weight.shape)), "^")
    batch = ("b",) if len(x.shape) == len(weight.shape) else ()
    if n_groups == 1:
        ends = ("k+", "c") if _is_transposed(op) else ("c", "k+")
        terms = [(*batch, "k+", *space), (*ends, *kernel), *(added(("c",)) for _ in bias)]
        return write_equation(terms, (*batch, "c", *space))
    if n_groups == out_channels and not _is_transposed(op):
        terms = [(*batch, "c", *space), ("c", "i^", *kernel), *(added(("c",)) for _ in bias)]
        return write_equation(terms, (*batch, "c", *space))
    terms = [(*batch, "k^", *space), ("m^", "i^", *kernel), *(added(("c^",)) for _ in bias)]
    return write_equation(terms, (*batch, "c^", *space))


def _split_groups(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    """Whole groups: input channels, the weight's first dim and output channels alike."""
    n_groups, channel_dim = _n_groups(op), len(operands[0].shape) - len(operands[1].shape) + 1
    if n_groups > 1 and n_groups % degree == 0:
        channels = sharded(channel_dim)
        yield Strategy((channels, sharded(0), sharded(0))[: len(operands)], channels, is_split=True)


def _flops(op: Op, operands: Specs, batch_size: int) -> int:
    """2 * batch * weight elements * positions: each weight meets every position of the output once.

    Of a transposed convolution the input counts.
    """
    x, weight = operands[:2]
    positions = x.shape if _is_transposed(op) else op.outputs[0].shape
    count = 2 * weight.n_elements(1)
    for extent in positions[2 - len(weight.shape) :]:
        count *= extent_at(extent, batch_size)
    return count * (extent_at(x.shape[0], batch_size) if len(x.shape) == len(weight.shape) else 1)


_CONVOLUTION = OpRule(
    _convolution,
    flops=_flops,
    backward_flops_ratio=2.0,
    backward_bytes_ratio=2.0,
    n_backward_kernels=2,
    saves=(0, 1),
    is_product=True,
    efficiency="matmul",
    linear_in=(0,),
    strategies=_split_groups,
)

RULES = {
    "aten.conv1d.default": _CONVOLUTION,
    "aten.conv1d.padding": _CONVOLUTION,
    "aten.conv2d.default": _CONVOLUTION,
    "aten.conv2d.padding": _CONVOLUTION,
    "aten.conv3d.default": _CONVOLUTION,
    "aten.conv3d.padding": _CONVOLUTION,
    "aten.conv_transpose1d.default": _CONVOLUTION,
    "aten.conv_transpose2d.input": _CONVOLUTION,
    "aten.conv_transpose3d.input": _CONVOLUTION,
    "aten.convolution.default": _CONVOLUTION,
}
