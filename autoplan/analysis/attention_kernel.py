"""Which kernel torch takes for `F.scaled_dot_product_attention`: the first of these that the device has and that can.

    cpu         a CPU: no dropout, no gradient of a mask, a mask of 2 or 4 dims, values of the queries' size
    cudnn       Hopper and later, 16 bits: no gradient of a mask
    flash       A100 and later, 16 bits: no mask, values of the queries' size
    efficient   all GPUs, 16 and 32 bits: as many key as query heads
    math        op by op: all else, such as float64 on a GPU, or other dims than [sample, head, row, size]; and on all
                GPUs beside a mask of which the numbers of a row lie apart (`analysis.memory_order`)

On a CPU it is as `torch._fused_sdp_choice` of torch 2.13 says, on Hopper beside masks as that of 2.11 said
(benchmarks/results/attention_masks_h100_2026-11-26.jsonl). It is not looked at which sizes of heads a GPU has kernels
for.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from autoplan.analysis.memory_order import scattered_rows
from autoplan.equations import argument
from autoplan.graph import Op, OpGraph, TensorSpec, extent_at
from autoplan.rules import Specs, operand_names

Kernel = Literal["cpu", "cudnn", "flash", "efficient", "math"]

ATTENTION = "aten.scaled_dot_product_attention.default"
N_UNMASKED = 3  # operands in front of a mask
IN_16_BITS = frozenset({"bf16", "fp16"})
_DIMS = 4
_MASK_DIMS = (2, 4)
_STATISTICS_BYTES = 4


def kernel_of(
    op: Op,
    operands: Specs,
    *,
    precision: str,
    attention: str,
    mask_has_gradient: bool = False,
    mask_is_scattered: bool = False,
) -> Kernel:
    """That of a call on these operands, of a rank or whole; `attention` is that of `Device`."""
    query, key, value = (spec.shape for spec in operands[:N_UNMASKED])
    masks, is_grouped = operands[N_UNMASKED:], has_few_key_heads(op)
    is_broadcast = not is_grouped and not query[:2] == key[:2] == value[:2]
    if not len(query) == len(key) == len(value) == _DIMS or is_broadcast:
        return "math"
    is_of_one_size = query[-1] == value[-1]
    if attention == "cpu":
        is_taken = all(len(mask.shape) in _MASK_DIMS for mask in masks) and not mask_has_gradient
        return "cpu" if is_taken and is_of_one_size and not dropout_of(op) else "math"
    if precision == "fp64" or mask_is_scattered:
        return "math"
    if precision in IN_16_BITS and attention != "efficient":
        # where the rows of a causal query are split, `runtime.tensor_parallel.attention` calls flash attention itself
        if not masks and is_of_one_size and (attention == "flash" or has_split_rows(op, operands)):
            return "flash"
        if attention == "cudnn" and not mask_has_gradient:
            return "cudnn"
    return "math" if is_grouped else "efficient"


def scattered_masks(graph: OpGraph, *, dense: Collection[str] = ()) -> frozenset[str]:
    """Masks of which the numbers of a row lie apart in memory, if only `dense` values are copied."""
    masks = {name for op in graph.ops if op.target == ATTENTION for name in operand_names(op)[N_UNMASKED:]}
    return scattered_rows(graph, dense=dense) & masks if masks else frozenset()


def has_few_key_heads(op: Op) -> bool:
    """Whether several query heads read one key head."""
    return bool(argument(op, 7, "enable_gqa", False))


def dropout_of(op: Op) -> float:
    """The part of the weights of keys that is dropped."""
    return float(argument(op, 4, "dropout_p", 0.0))


def is_causal(op: Op) -> bool:
    """Whether a row reads the keys up to its own place only."""
    return bool(argument(op, 5, "is_causal", False))


def has_split_rows(op: Op, operands: Specs) -> bool:
    """Whether these are a rank's rows of a causal query, which ranks exchange."""
    return is_causal(op) and operands[0].shape[-2] != op.outputs[0].shape[-2]


def log_sum_exp_bytes(query: TensorSpec, batch_size: int) -> int:
    """What a fused kernel keeps beside operands and result: a float32 number for each row of the query."""
    return _STATISTICS_BYTES * (query.n_elements(batch_size) // extent_at(query.shape[-1], 1))
