"""Time of one operator on one device: a roofline with a fixed cost per kernel.

    t = kernel_s * kernels + max(flops / (peak * matmul_efficiency), bytes / (bandwidth * memory_efficiency)) / fraction

The fixed cost is the efficiency curve: a product that needs as long as `kernel_s` runs at half its rate. The host must
launch every kernel too; that is added up apart (`launches`), because it only counts where the device waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.errors import InputError
from autoplan.graph import Op
from autoplan.hardware import Device
from autoplan.rules import OpRule, Specs, equation_of, forward_flops, parse_equation

# A training step meets other shapes than the best one: median / best achieved matrix product over 183 shapes,
# 0.72 / 0.80, A100 PCIe; SimuMax configs/system/a100_pcie.json @4dcaae5.
TYPICAL_MATMUL_FRACTION = 0.9
# Element-wise ops on a transposed tensor / on a contiguous one. H200, torch 2.11, [2, 32, 4096, 64] bf16: 1.2 to
# 1.4 TB/s against 4.2 (rotary embedding in benchmarks/results/kernels_h200_2026-11-20.jsonl).
STRIDED_FRACTION = 0.33


@dataclass(frozen=True, slots=True)
class OpTime:
    """Seconds on the device and launches by the host, forward and backward."""

    forward_s: float
    backward_s: float
    n_launches: int
    n_backward_launches: int


def peak_flops_per_s(device: Device, precision: str) -> float:
    """The dense peak of a precision; fp64 is only ever run on CPUs to check numbers, and priced as fp32.

    Raises: InputError if the device has no such precision.
    """
    peaks = dict(device.peak_flops_per_s)
    found = peaks.get("fp32" if precision == "fp64" else precision)
    if found is None:
        raise InputError.of(
            f"--precision {precision}",
            found=f"{device.name} without {precision}",
            expected="one of " + ", ".join(peaks),
            fix=f"use --precision {next(iter(peaks))}, or another device",
        )
    return found


def moved_bytes(op: Op, *, operands: Specs, results: Specs, batch_size: int, precision: str) -> int:
    """Bytes read and written by one call: every operand once, every result once.

    A look-up reads only the rows it returns.
    """
    read = operands[1:] if op.target == "aten.embedding.default" else operands
    written = sum(spec.n_bytes(batch_size, precision) for spec in results)
    again = written if op.target == "aten.embedding.default" else 0
    return sum(spec.n_bytes(batch_size, precision) for spec in read) + written + again


def op_time(
    rule: OpRule | None,
    op: Op,
    *,
    whole_operands: Specs,
    operands: Specs,
    results: Specs,
    batch_size: int,
    precision: str,
    device: Device,
    has_gradient: bool,
    is_strided: bool = False,
) -> OpTime:
    """Time of one call on local tensors (`operands`, `results`); an op without a rule is priced by its bytes.

    `whole_operands` are the operands before they were split.
    """
    rule = rule or OpRule()
    if rule.is_view and not rule.n_backward_kernels:
        return OpTime(0.0, 0.0, 0, 0)
    flops = forward_flops(rule, op, operands=operands, batch_size=batch_size, whole_operands=whole_operands)
    if rule.moved_bytes is not None:
        n_bytes = rule.moved_bytes(op, batch_size, precision)
    else:
        n_bytes = moved_bytes(op, operands=operands, results=results, batch_size=batch_size, precision=precision)
    n_calls = 1 if rule.n_calls is None else rule.n_calls(op)
    if rule.efficiency == "matmul":
        rate = peak_flops_per_s(device, precision) * device.matmul_efficiency * TYPICAL_MATMUL_FRACTION
    else:
        rate = peak_flops_per_s(device, "fp32")
    bandwidth = device.memory_bytes_per_s * device.memory_efficiency
    if is_strided and rule.efficiency == "memory":
        bandwidth *= STRIDED_FRACTION
    work_s = max(flops / rate, n_bytes / bandwidth) / rule.rate_fraction
    forward_s = 0.0 if rule.is_view else device.kernel_s * rule.n_kernels * n_calls + work_s
    if not has_gradient:
        return OpTime(forward_s, 0.0, rule.n_kernels * n_calls, 0)
    work_s = max(rule.backward_flops_ratio * flops / rate, rule.backward_bytes_ratio * n_bytes / bandwidth)
    n_sums = _n_summed_gradients(rule, op, whole_operands)
    result_bytes = sum(spec.n_bytes(batch_size, precision) for spec in results)
    n_kernels = rule.n_backward_kernels * n_calls + n_sums
    backward_s = device.kernel_s * n_kernels + work_s / rule.backward_rate_fraction + n_sums * result_bytes / bandwidth
    return OpTime(forward_s, backward_s, rule.n_kernels, n_kernels)


def _n_summed_gradients(rule: OpRule, op: Op, operands: Specs) -> int:
    """Added operands that are smaller than the result (a bias): their gradient is a sum over the result's gradient."""
    equation = equation_of(rule, op, operands)
    if equation is None:
        return 0
    terms, result = parse_equation(equation)
    return sum(term.is_added and len(term.letters) < len(result.letters) for term in terms)
