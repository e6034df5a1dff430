"""Time of one operator on one device: a roofline with a cost per kernel.

    t = kernel_s * kernels + max(flops / rate, bytes / copy_rate) / fraction + further_bytes / copy_rate + fixed_s
    rate = peak * matmul_efficiency    copy_rate = bandwidth * memory_efficiency

Further bytes are those of copies beside the op, of sums of gradients, and what pieces of tensors take longer. The cost
per kernel is the efficiency curve: a product that needs as long as `kernel_s` runs at half its rate. The host must
launch every kernel too; that is added up apart (`host_s`), because it only counts where the device waits for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from autoplan.equations import broadcast_equation
from autoplan.errors import InputError
from autoplan.graph import COMPUTE_DTYPES, DTYPE_BYTES, Op
from autoplan.hardware import Device
from autoplan.options import DEFAULT_PRECISION
from autoplan.rules import Arithmetic, LocalCall, OpRule, Specs, equation_of, forward_flops, parse_equation

# Host time of one kernel of a model / of a bare `x.add_(1)`: Python, modules and autograd come on top. Medians on 13
# machines: 5.8 forward and 5.2 backward of blocks of the user's modules, 4.0 and 4.5 of generated code
# (benchmarks/block_hosts.py, 2026-11-28).
MODEL_LAUNCH_RATIO = 5.0
# Rate of a 16-bit matrix product by the bytes at whose multiples the rows of all its matrices start, against 8 and
# more. The heads of GPT-2 XL (50257 classes) and BERT-large (30522), less their losses: 97 and 131 TFLOP/s forward and
# backward, and 277 and 224, of 679 (benchmarks/results/profile_h200_x4_2026-11-21.jsonl).
RATE_OF_ALIGNMENT = {2: 0.16, 4: 0.37}
# Element-wise ops on a transposed tensor / on a contiguous one. H200, torch 2.11, [2, 32, 4096, 64] bf16: 1.2 to
# 1.4 TB/s against 4.2 (rotary embedding in benchmarks/results/kernels_h200_2026-11-20.jsonl).
STRIDED_FRACTION = 0.33
# What a copy moves while an element-wise op that broadcasts one of its operands makes an element, whose place in each
# operand it computes: 11 to 18 bytes in products and a `where` of T5-large, H200, torch 2.11, 64 x 512 tokens (ops of
# benchmarks/results/profile_h200_x2_2026-11-25_compiled.jsonl), whether that is of 16 or 32 bits.
BROADCAST_ELEMENT_BYTES = 12
# Reading a piece of each row of a larger tensor / reading a whole one. silu and the product of two halves [65536, 2048]
# of a chunk, bf16, H200, torch 2.11: 0.21 and 0.27 forward, 0.22 and 0.29 backward, once each
# (ops of the mixture in benchmarks/results/profile_h200_2026-11-22.jsonl).
PIECE_FRACTION = 0.25


@dataclass(frozen=True, slots=True)
class OpTime:
    """Seconds on the device and launches by the host, forward and backward; of both passes flops and moved bytes."""

    forward_s: float
    backward_s: float
    n_launches: int
    n_backward_launches: int
    flops: float = 0.0
    moved_bytes: float = 0.0


def peak_flops_per_s(device: Device, precision: str, *, error: type[InputError] = InputError) -> float:
    """The dense peak of a precision. No profile has that of fp64, which is priced as fp32: too fast on many GPUs.

    Raises: `error` if the device has no such precision.
    """
    peaks = dict(device.peak_flops_per_s)
    found = peaks.get("fp32" if precision == "fp64" else precision)
    if found is None:
        other = next((name for name in ("bf16", "fp16") if name in peaks), "fp32")
        raise error.of(
            f"--precision {precision}" + (", the default" if precision == DEFAULT_PRECISION else ""),
            found=f"{device.name} without {precision}",
            expected="one of " + ", ".join(peaks),
            fix=f"use --precision {other}, or another device",
        )
    return found


def host_s(device: Device, n_launches: float) -> float:
    """What the host takes for so many kernels of a model in eager mode."""
    return MODEL_LAUNCH_RATIO * device.launch_s * n_launches


def op_time(
    rule: OpRule | None,
    call: LocalCall,
    *,
    device: Device,
    has_gradient: bool,
    is_strided: bool = False,
    pieces: tuple[bool, ...] = (),
) -> OpTime:
    """Time of one call; an op without a rule is priced by its bytes.

    `pieces` says which operands are of a larger tensor (none, if it is empty); with `is_strided` the op reads a tensor
    whose dims are permuted in memory.

    Raises: InputError if the device has no rate for the precision of a product.
    """
    rule = rule or OpRule()
    if rule.is_view and not rule.n_backward_kernels:
        return OpTime(0.0, 0.0, 0, 0)
    rates, fractions = _rates(rule, call, device), _fractions(rule, call)
    bandwidth = device.copy_bytes_per_s
    if is_strided and rule.efficiency == "memory":
        bandwidth *= STRIDED_FRACTION
    least_bytes = 0 if is_strided else _broadcast_bytes(rule, call)
    slower_s = _slower_by_pieces_s(rule, call, pieces, bandwidth)

    def work_s(work: _Pass, direction: int) -> float:
        roofline_s = max(work.flops / rates[direction], work.moved_bytes / bandwidth) / fractions[direction]
        return roofline_s + work.further_bytes / bandwidth + slower_s[direction]

    forward = _forward(rule, call, least_bytes)
    fixed_s = (0.0, 0.0) if rule.fixed_s is None else rule.fixed_s(call, bandwidth)
    forward_s = 0.0 if rule.is_view else device.kernel_s * forward.n_kernels + work_s(forward, 0) + fixed_s[0]
    if not has_gradient:
        return OpTime(forward_s, 0.0, forward.n_kernels, 0, forward.flops, forward.all_bytes)
    backward = _backward(rule, call, forward)
    return OpTime(
        forward_s,
        device.kernel_s * backward.n_kernels + work_s(backward, 1) + fixed_s[1],
        forward.n_kernels,
        backward.n_kernels,
        forward.flops + backward.flops,
        forward.all_bytes + backward.all_bytes,
    )


class _Pass(NamedTuple):
    """One pass of a call: its kernels and FLOPs, what they move, and what is moved besides, at the rate of a copy."""

    n_kernels: int
    flops: float
    moved_bytes: float
    further_bytes: float

    @property
    def all_bytes(self) -> float:
        return self.moved_bytes + self.further_bytes


def _forward(rule: OpRule, call: LocalCall, least_bytes: int) -> _Pass:
    return _Pass(
        n_kernels=rule.n_kernels * _n_calls(rule, call),
        flops=forward_flops(
            rule, call.op, operands=call.operands, batch_size=call.batch_size, whole_operands=call.whole_operands
        ),
        moved_bytes=max(_moved_bytes(rule, call), least_bytes),
        further_bytes=_further_bytes(rule, call)[0],
    )


def _backward(rule: OpRule, call: LocalCall, forward: _Pass) -> _Pass:
    part = _part_of_backward(rule, call)
    if rule.backward_bytes is not None:
        n_bytes = rule.backward_bytes(call)
    else:
        n_bytes = rule.backward_bytes_ratio * forward.moved_bytes * part
    n_sums = _n_summed_gradients(rule, call.op, call.whole_operands)
    summed_bytes = n_sums * sum(spec.n_bytes(call.batch_size, call.precision) for spec in call.results)
    return _Pass(
        n_kernels=math.ceil(rule.n_backward_kernels * part) * _n_calls(rule, call) + n_sums,
        flops=rule.backward_flops_ratio * forward.flops * part,
        moved_bytes=n_bytes,
        further_bytes=_further_bytes(rule, call)[1] * part + summed_bytes,
    )


def _moved_bytes(rule: OpRule, call: LocalCall) -> int:
    """Bytes read and written by one call: every operand once, every result once; of a table the rows that are read."""
    if rule.moved_bytes is not None:
        return rule.moved_bytes(call)
    read = (*call.results, *call.operands[1:]) if rule.reads_rows else call.operands
    return sum(spec.n_bytes(call.batch_size, call.precision) for spec in (*read, *call.results))


def _broadcast_bytes(rule: OpRule, call: LocalCall) -> int:
    """What an element-wise op counts for at least that broadcasts an operand, not a number."""
    if rule.equation is not broadcast_equation or len(call.operands) < 2:
        return 0
    n_elements = call.results[0].n_elements(call.batch_size)
    sizes = [spec.n_elements(call.batch_size) for spec in call.operands]
    return BROADCAST_ELEMENT_BYTES * n_elements if any(1 < size < n_elements for size in sizes) else 0


def _further_bytes(rule: OpRule, call: LocalCall) -> tuple[float, float]:
    return (0.0, 0.0) if rule.further_bytes is None else rule.further_bytes(call)


def _n_calls(rule: OpRule, call: LocalCall) -> int:
    return 1 if rule.n_calls is None else rule.n_calls(call.op)


def _fractions(rule: OpRule, call: LocalCall) -> tuple[float, float]:
    return (rule.rate_fraction, rule.backward_rate_fraction) if rule.fractions is None else rule.fractions(call)


def _rates(rule: OpRule, call: LocalCall, device: Device) -> tuple[float, float]:
    """FLOP/s of a call, forward and backward."""
    if rule.arithmetic is None:
        used = Arithmetic(rule.efficiency == "matmul")
    else:
        used = rule.arithmetic(call)
    if used.uses_matrix_units:
        rate = peak_flops_per_s(device, call.precision) * device.matmul_efficiency
        if rule.is_matrix_product:
            rate *= RATE_OF_ALIGNMENT.get(_alignment_bytes((*call.operands, *call.results), call.precision), 1.0)
    else:
        rate = peak_flops_per_s(device, "fp32")
    return rate * used.fraction, rate * used.backward_fraction


def _slower_by_pieces_s(
    rule: OpRule, call: LocalCall, pieces: tuple[bool, ...], bandwidth: float
) -> tuple[float, float]:
    """What an element-wise op takes longer to read pieces, forward, and backward those that it keeps."""
    if rule.efficiency != "memory" or not any(pieces):
        return 0.0, 0.0
    found_s = [
        spec.n_bytes(call.batch_size, call.precision) * (1 / PIECE_FRACTION - 1) / bandwidth if is_piece else 0.0
        for spec, is_piece in zip(call.operands, pieces, strict=True)
    ]
    return sum(found_s), sum(found_s[position] for position in rule.saves if 0 <= position < len(found_s))


def _part_of_backward(rule: OpRule, call: LocalCall) -> float:
    """A product has a gradient for each of its factors; those of data and of frozen weights are not computed."""
    if not (call.gradients and rule.is_product and rule.efficiency == "matmul"):
        return 1.0
    factors = [call.gradients[i] for i in rule.saves if i < len(call.operands) and call.operands[i].is_float]
    return sum(factors) / len(factors) if any(factors) else 1.0


def _alignment_bytes(specs: Specs, precision: str) -> int:
    """The largest power of 2, up to 16, that divides the bytes of a row of every matrix; 16 but for 16-bit numbers."""
    item_bytes = DTYPE_BYTES[COMPUTE_DTYPES[precision]]
    rows = (extent for spec in specs if len(spec.shape) > 1 for extent in spec.shape[-1:] if isinstance(extent, int))
    return math.gcd(16, *(item_bytes * extent for extent in rows)) if item_bytes == 2 else 16


def _n_summed_gradients(rule: OpRule, op: Op, operands: Specs) -> int:
    """Added operands that are smaller than the result (a bias): their gradient is a sum over the result's gradient."""
    equation = equation_of(rule, op, operands)
    if equation is None:
        return 0
    terms, result = parse_equation(equation)
    return sum(term.is_added and len(term.letters) < len(result.letters) for term in terms)
