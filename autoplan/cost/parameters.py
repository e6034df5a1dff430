"""What the parameters of a segment cost one device: memory, the collectives of data parallelism, and the optimizer.

Memory of one parameter element after `fully_shard`, under mixed precision with a float32 master copy; d: shard degree.

                      always            gathered   gradient: computed   reduction's input   reduced   accumulated
    bf16 / fp16       (4 + 4 n) / d     2          2                    4                   4 / d     4
    fp32              (4 + 4 n) / d     4          4                    4                   4 / d     4
    fp64              (8 + 8 n) / d     8          8                    8                   8 / d     8

n: the states of the optimizer, 2 of Adam (`OpGraph.n_optimizer_states`).

Gradients are there from the backward pass of their segment to the end of the step: accumulated while micro-batches
accumulate, else reduced. Their sum over ranks has an input of its own, which is kept until the next reduction begins.
What is outside of blocks is one group of `fully_shard`, without a large head, which is a group of its own: the one is
reduced last, at the end of a pass, and stays gathered for all of it under ZeRO 3. Without `fully_shard` (one
data-parallel rank in full precision) gradients stay as computed.

On one stage the first call of a block that is called several times, with other segments in between, has its state and
its gradients, since backward ends with it: until then autograd adds up what the calls compute (`waiting_bytes`), which
is taken to need no time. Later calls pay for what `fully_shard` does in each. It gathers the block: under ZeRO 3 in
every pass, else for the backward pass of the last micro-batch, in which the call behind has freed it; that is priced in
the first forward pass. And what the micro-batches before have accumulated is reduced once the last call has run
backward in the last one, the rest after the first call.

Where gradients are reduced in every micro-batch, replicas of the shards sum them in the last one only: each group when
its own reduction is done, beside the backward pass of the segments before it.

Gathered parameters are copied out of the communication buffer and gradients into it, on the compute stream: per
micro-batch where the stage gathers or reduces that often, else once per step (counted with the optimizer). Under 16
bits the master copy is cast before it is gathered. Gradients of several micro-batches are added up. What all this takes
of the host is in `host_*_s`; `cost.launch` says where it is waited for.

ZeRO 0 is a shard degree of 1. The optimizer moves every byte of master, gradient and state once (and writes back
master and state), after the gradient norm has read the gradients: that is its time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from autoplan.cost.between import Exchange
from autoplan.cost.collective_time import Group
from autoplan.cost.grad_compression import (
    NO_COMPRESSION,
    CompressedReduction,
    Compression,
    Matrix,
    narrow_reduction,
    power_sgd_reduction,
)
from autoplan.cost.waits import ADDRESSES_S
from autoplan.graph import N_ADAM_STATES
from autoplan.hardware import Device, ShardingHost

# The calls of a block that is called once, and of one that is called several times.
ONLY_CALL, FIRST_CALL, LATER_CALL, LAST_CALL = "only", "first", "later", "last"
HOLDING_CALLS = (ONLY_CALL, FIRST_CALL)  # they have the state
# Element-wise ops on tensors of two dtypes / of one. 1.5 billion bf16 gradients added to float32 ones take 6.2 ms on an
# H200: 2.4 TB/s against 4.2 (benchmarks/results/step_kernels_h200_2026-11-21.txt, llama-1b).
MIXED_FRACTION = 0.57
# What such an op takes at least: additions to the gradients of biases of ViT-L, of 1024 elements, 2.8 to 3.4 us, and
# 0.4 us to the next one (H100, benchmarks/results/graph_kernels_h100_x2_2026-11-26.txt).
MIXED_KERNEL_S = 3.4e-6
# What a parameter that is not sharded takes at least on its way to where it is computed with: a copy of 1.0 us and a
# cast of 1.35, and 0.4 us to the next one (H100, benchmarks/results/step_kernels_resnet_h100_x4_2026-11-27.txt).
COPY_KERNEL_S, CAST_KERNEL_S = 1.4e-6, 1.75e-6
# Copying gradients to where their reduction reads them: 2.6 TB/s in one dtype, and 2.5 from bf16 to float32 where
# `runtime.stages.packing` does it at once, else as other ops of two dtypes; a copy of one tensor reaches 3.0 (H100,
# benchmarks/results/packing_h100_2026-11-27.jsonl; an H200 3.4 to 3.7, 3.3 and 4.2).
PACK_FRACTION = 0.87
PACK_MIXED_FRACTION = 0.82
LEAST_PART_ELEMENTS = 1 << 20  # as in `runtime.stages.packing`, which programs have without this module


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes per parameter element; see the table in the module docstring."""

    master: int
    gathered: int
    reduced: int
    optimizer: int


@cache
def element_bytes(precision: str, n_optimizer_states: int = N_ADAM_STATES) -> ElementBytes:
    """The row of the table."""
    master = 8 if precision == "fp64" else 4
    gathered = 2 if precision in ("bf16", "fp16") else master
    return ElementBytes(master, gathered, reduced=master, optimizer=n_optimizer_states * master)


@dataclass(frozen=True, slots=True)
class ParameterContext:
    """What costs of parameters depend on besides their number and their place.

    Attributes:
        collective_s: (kind, full bytes, group) -> seconds.
        adam_element_s: measured time of AdamW per element; None computes it.
        compression: of the gradients, where the placement allows it; see `cost.grad_compression`.
    """

    device: Device
    precision: str
    collective_s: Callable[[str, float, Group], float]
    adam_element_s: float | None
    compression: Compression = NO_COMPRESSION
    n_optimizer_states: int = N_ADAM_STATES

    @property
    def element(self) -> ElementBytes:
        return element_bytes(self.precision, self.n_optimizer_states)


@dataclass(frozen=True, slots=True)
class Placement:
    """How parameters lie on the data-parallel ranks: all that their cost depends on of a mesh.

    Attributes:
        shard: the ranks that have the state of one copy in parts.
        replicate: the ranks that have the same part.
        zero_stage: see `Mesh`.
        repeats: whether there are several micro-batches.
        exchange: with the replicas in other groups of hosts; None where there are none.
    """

    shard: Group
    replicate: Group
    zero_stage: int
    repeats: bool
    exchange: Exchange | None = None

    @property
    def is_divided(self) -> bool:
        """Whether there is more than one data-parallel rank."""
        return self.shard.n_devices * self.replicate.n_devices > 1 or self.exchange is not None

    @property
    def accumulates(self) -> bool:
        """Whether gradients of several micro-batches are added up before they are reduced."""
        return self.repeats and self.zero_stage < 2


@dataclass(frozen=True, slots=True)
class ParameterCost:
    """The parameters of one segment; see `cost.table.SegmentCost` for the fields they share.

    Attributes:
        accumulate_s: adding the gradients of a micro-batch to those of the ones before.
        unpack_s, pack_s: copies out of and into communication buffers, where they are made in every micro-batch.
        once_s: such copies where they are made once per step, in its first and last passes; part of `optimizer_s`.
        host_forward_s, host_backward_s: what `fully_shard` takes of the host in every pass.
        host_first_s: besides, in the first forward pass of a step.
        host_last_s: besides, in the last backward pass of a step; the device is still busy with it afterwards.
        host_optimizer_s: after that; also while the device is still busy.
    """

    accumulate_s: float
    unpack_s: float
    pack_s: float
    once_s: float
    gather_s: float
    reduce_s: float
    optimizer_s: float
    state_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    reduced_bytes: int
    reducing_bytes: int
    late_gradient_bytes: int
    is_kept: bool
    host_forward_s: float
    host_backward_s: float
    host_first_s: float
    host_last_s: float
    host_optimizer_s: float
    replicas_s: float
    waiting_bytes: int = 0


def parameter_cost(
    context: ParameterContext,
    matrices: Sequence[Matrix],
    placement: Placement,
    *,
    is_group: bool,
    is_kept: bool,
    call: str = ONLY_CALL,
) -> ParameterCost:
    """The cost of parameters that have these sizes on a tensor-parallel rank: (first dim, elements behind it).

    `is_group`: gathered and reduced by themselves, as blocks are and a head may be; else with all others outside.
    `is_kept`: gathered for a forward pass they are kept for the backward pass, as all are that are not of blocks.
    `call`: which call of a block it is; later ones pay for what comes with every call, outside of groups for nothing.
    """
    matrices = matrices if is_group or call in HOLDING_CALLS else ()
    n_elements, n_tensors = sum(n * m for n, m in matrices), len(matrices)
    element, degree = context.element, placement.shard.n_devices
    n_shard_elements = -(-n_elements // degree)
    is_wrapped = placement.is_divided or context.precision in ("bf16", "fp16")
    gathered_bytes = element.gathered * n_elements if is_wrapped else 0
    is_held = placement.zero_stage == 3 and not is_group
    reduced_bytes = element.reduced * n_shard_elements
    unpack_s, pack_s = _copies_s(context, matrices, placement, is_group=is_group) if is_wrapped else (0.0, 0.0)
    gathers_often, reduces_often = placement.zero_stage == 3, placement.zero_stage >= 2
    reduction = _reduction(context, matrices, placement)
    once_s = reduction.once_s + (0.0 if gathers_often else unpack_s) + (0.0 if reduces_often else pack_s)
    hooks_s, gather_s, reduce_s, step_s = _host_s(context.device.sharding, n_tensors, is_group=is_group)
    reduce_s += reduction.host_s
    backward_s = hooks_s + (gather_s if gathers_often and not is_kept else 0.0) if is_wrapped else 0.0
    found = ParameterCost(
        accumulate_s=sum(_accumulate_s(context.device, element, n * m, placement) for n, m in matrices),
        unpack_s=unpack_s if gathers_often else 0.0,
        pack_s=pack_s if reduces_often else 0.0,
        once_s=once_s,
        gather_s=context.collective_s("all_gather", element.gathered * n_elements, placement.shard),
        reduce_s=reduction.scatter_s + (0.0 if reduces_often else reduction.replicas_s),
        optimizer_s=_optimizer_s(context, n_shard_elements) + once_s,
        state_bytes=(element.master + element.optimizer) * n_shard_elements
        + (gathered_bytes if is_held else 0)
        + reduction.state_bytes,
        gathered_bytes=0 if is_held else gathered_bytes,
        gradient_bytes=element.reduced * n_elements if placement.accumulates else reduced_bytes,
        reduced_bytes=reduced_bytes,
        reducing_bytes=(element.reduced * n_elements if is_wrapped else 0) + reduction.reducing_bytes,
        late_gradient_bytes=element.gathered * n_elements if is_wrapped and not is_group else 0,
        is_kept=is_kept,
        host_forward_s=hooks_s + (gather_s if gathers_often else 0.0) if is_wrapped else 0.0,
        host_backward_s=backward_s + (reduce_s if is_wrapped and reduces_often else 0.0),
        host_first_s=gather_s if is_wrapped and not gathers_often else 0.0,
        host_last_s=reduce_s if is_wrapped and not reduces_often else 0.0,
        host_optimizer_s=step_s if is_wrapped else 0.0,
        replicas_s=reduction.replicas_s if reduces_often else 0.0,
    )
    summed_bytes = element.gathered * n_elements if is_group else 0
    if call in HOLDING_CALLS:
        return replace(found, waiting_bytes=-summed_bytes if call == FIRST_CALL else 0)
    is_reduced = call == LAST_CALL and placement.accumulates
    return _of_later_call(
        found,
        is_reduced=is_reduced,
        once_s=(reduction.once_s + pack_s if is_reduced else 0.0) + (0.0 if gathers_often else unpack_s),
        gathered_bytes=gathered_bytes if gathers_often else 0,
        waiting_bytes=summed_bytes if call == LAST_CALL else 0,
        host_backward_s=backward_s,
    )


def _copies_s(
    context: ParameterContext, matrices: Sequence[Matrix], placement: Placement, *, is_group: bool
) -> tuple[float, float]:
    """Parameters out of the buffer that they are gathered in, cast before; gradients into that of their reduction."""
    element, degree, bandwidth = context.element, placement.shard.n_devices, context.device.copy_bytes_per_s
    n_elements, n_tensors = sum(n * m for n, m in matrices), len(matrices)
    if degree == 1:
        unpack_s = sum(_unsharded_s(context.device, element, n * m) for n, m in matrices)
    else:
        unpack_s = 2 * element.gathered * n_elements / bandwidth
        if element.gathered < element.master:
            cast_bytes = (element.master + element.gathered) * -(-n_elements // degree)
            unpack_s += cast_bytes / bandwidth / MIXED_FRACTION
    has_large_parts = n_elements >= LEAST_PART_ELEMENTS * n_tensors * degree
    packs_at_once = has_large_parts and all(n % degree == 0 for n, _ in matrices)
    pack_s = _pack_s(context.device, element, n_elements, placement, at_once=packs_at_once)
    if is_group and n_tensors:
        unpack_s += ADDRESSES_S if degree > 1 else 0.0
        pack_s += 0.0 if packs_at_once else ADDRESSES_S
    return unpack_s, pack_s


def _of_later_call(
    found: ParameterCost,
    *,
    is_reduced: bool,
    once_s: float,
    gathered_bytes: int,
    waiting_bytes: int,
    host_backward_s: float,
) -> ParameterCost:
    """What a call costs that does not have the state: of `found` what it would, if it had. See the module docstring."""
    return replace(
        found,
        accumulate_s=0.0,
        pack_s=0.0,
        once_s=once_s,
        reduce_s=found.reduce_s if is_reduced else 0.0,
        optimizer_s=once_s,
        state_bytes=0,
        gathered_bytes=gathered_bytes,
        gradient_bytes=0,
        reduced_bytes=0,
        reducing_bytes=found.reducing_bytes if is_reduced else 0,
        waiting_bytes=waiting_bytes,
        host_backward_s=host_backward_s,
        host_last_s=found.host_last_s if is_reduced else 0.0,
        host_optimizer_s=0.0,
        replicas_s=0.0,
    )


def _unsharded_s(device: Device, element: ElementBytes, n_elements: int) -> float:
    """To copy a parameter that is not sharded to where it is computed with, cast before that; a kernel each."""
    copy_s = max(device.kernel_s, COPY_KERNEL_S, 2 * element.gathered * n_elements / device.copy_bytes_per_s)
    if element.gathered == element.master:
        return copy_s
    n_bytes = (element.master + element.gathered) * n_elements
    return copy_s + max(device.kernel_s, CAST_KERNEL_S, n_bytes / (MIXED_FRACTION * device.copy_bytes_per_s))


def _accumulate_s(device: Device, element: ElementBytes, n_elements: int, placement: Placement) -> float:
    """To add the gradient of a micro-batch, whole or reduced, to that of those before it; one kernel a tensor."""
    if not placement.repeats:
        return 0.0
    if not placement.accumulates:
        n_bytes = 3 * element.reduced * n_elements / placement.shard.n_devices
        return max(device.kernel_s, n_bytes / device.copy_bytes_per_s)
    n_bytes = (element.gathered + 2 * element.reduced) * n_elements
    is_mixed = element.gathered < element.reduced
    seconds = n_bytes / ((MIXED_FRACTION if is_mixed else 1.0) * device.copy_bytes_per_s)
    return max(device.kernel_s, MIXED_KERNEL_S if is_mixed else 0.0, seconds)


def _pack_s(device: Device, element: ElementBytes, n_elements: int, placement: Placement, *, at_once: bool) -> float:
    """Copying gradients to where their reduction reads them; those that were added up have its dtype already."""
    if placement.accumulates or element.gathered == element.reduced:
        return 2 * element.reduced * n_elements / (PACK_FRACTION * device.copy_bytes_per_s)
    fraction = PACK_MIXED_FRACTION if at_once else MIXED_FRACTION
    return (element.gathered + element.reduced) * n_elements / (fraction * device.copy_bytes_per_s)


def _host_s(host: ShardingHost, n_tensors: int, *, is_group: bool) -> tuple[float, float, float, float]:
    """The host's time for hooks, a gathering, a reduction, and the optimizer; per group only where it is one."""
    n_groups = int(is_group and n_tensors > 0)
    return (
        n_groups * host.hooks_s + n_tensors * host.hooks_of_parameter_s,
        n_groups * host.gather_s + n_tensors * host.gather_of_parameter_s,
        n_groups * host.reduce_s + n_tensors * host.reduce_of_parameter_s,
        n_tensors * host.optimizer_of_parameter_s,
    )


def optimizer_s(n_elements: int, *, device: Device, element: ElementBytes) -> float:
    """Read the gradient for the norm; read master, gradient and state; write master and state."""
    return n_elements * _moved_bytes(element) / device.copy_bytes_per_s


def _moved_bytes(element: ElementBytes) -> int:
    return 4 * element.master + 2 * element.optimizer


def _optimizer_s(context: ParameterContext, n_elements: int) -> float:
    if context.adam_element_s is None:
        return optimizer_s(n_elements, device=context.device, element=context.element)
    ratio = _moved_bytes(context.element) / _moved_bytes(element_bytes(context.precision))
    return n_elements * context.adam_element_s * ratio


@dataclass(frozen=True, slots=True)
class _Reduction:
    """How the gradients of a segment are reduced.

    Attributes:
        scatter_s: inside the shard group, with the kernels that make gradients smaller.
        replicas_s: of the shards between replicas, once per step.
        once_s: beside which nothing runs, once per step.
        host_s: beside what every reduction takes of the host.
        state_bytes, reducing_bytes: beside the gradients, all the time, and while they are reduced.
    """

    scatter_s: float
    replicas_s: float
    once_s: float = 0.0
    host_s: float = 0.0
    state_bytes: int = 0
    reducing_bytes: int = 0


def _reduction(context: ParameterContext, matrices: Sequence[Matrix], placement: Placement) -> _Reduction:
    """Reduce-scatter inside the shard group, and all-reduce of the shards between replicas; compressed or not."""
    n_elements, item_bytes = sum(n * m for n, m in matrices), context.element.reduced
    n_shards, n_replicas = placement.shard.n_devices, placement.replicate.n_devices
    compression = context.compression.over(n_shards=n_shards, n_replicas=n_replicas)
    if compression.name == "none" or n_elements == 0:
        return _Reduction(*_reduce_s(context, item_bytes * n_elements, placement))
    if compression.name == "bf16":
        narrow = narrow_reduction(
            n_elements,
            item_bytes=item_bytes,
            n_shards=n_shards,
            device=context.device,
            mixed_fraction=MIXED_FRACTION,
        )
        scatter_s, replicas_s = _reduce_s(context, sum(narrow.wire_bytes), placement)
        return _Reduction(
            scatter_s + narrow.kernels_s, replicas_s, host_s=narrow.host_s, reducing_bytes=narrow.reducing_bytes
        )
    assert compression.rank is not None
    found = power_sgd_reduction(matrices, item_bytes=item_bytes, rank=compression.rank, device=context.device)
    once_s = max(found.kernels_s, found.host_s) + _all_reduces_s(context, found, placement)
    return _Reduction(0.0, 0.0, once_s, state_bytes=found.state_bytes, reducing_bytes=found.reducing_bytes)


def _all_reduces_s(context: ParameterContext, reduction: CompressedReduction, placement: Placement) -> float:
    sizes = (n_bytes for n_bytes in reduction.wire_bytes if n_bytes)
    return sum(context.collective_s("all_reduce", n_bytes, placement.replicate) for n_bytes in sizes)


def _reduce_s(context: ParameterContext, n_bytes: int, placement: Placement) -> tuple[float, float]:
    """Reduce-scatter inside the shard group, and all-reduce of the shards between replicas (once per step)."""
    scatter_s = context.collective_s("reduce_scatter", n_bytes, placement.shard)
    share_bytes = n_bytes / placement.shard.n_devices
    replicas_s = context.collective_s("all_reduce", share_bytes, placement.replicate)
    return scatter_s, replicas_s + (0.0 if placement.exchange is None else placement.exchange.seconds(share_bytes))
