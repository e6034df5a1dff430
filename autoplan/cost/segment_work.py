"""What one kind of segment does on one tensor-parallel rank, for one micro-batch: the sum over its ops.

    forward_s  = sum of op_time.forward_s                    tp_forward_s  = collectives of conversions and split losses
    saved      = distinct tensors that some op keeps          working       = `working_bytes`

Autograd adds up the gradients of a value that several ops read: one addition per further reader. The runtime computes
the loss in float32 at least, so under 16 bits the loss function sees tensors of twice the size, after a cast.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from autoplan.cost.kept_attention import KeptAttention, kept_attention
from autoplan.cost.kept_tensors import KeptTensor, others_bytes
from autoplan.cost.local_segment import LocalOp, LocalSegment
from autoplan.cost.op_time import OpTime, host_s, op_time
from autoplan.cost.parameters import element_bytes
from autoplan.cost.work_context import WorkContext
from autoplan.hardware import Device
from autoplan.layout import Conversion
from autoplan.rules import LocalCall

LOSS_STATISTIC_BYTES = 4
# Reading a tensor in one order and writing it in another / copying it as it lies. H200, torch 2.11: the 664 copies of
# Llama-1B's conversions in a step, 33.5 MB each in pieces of 8 and 16 MB, take 23.5 ms, at 1.9 of 4.2 TB/s
# (benchmarks/results/graph_kernels_h200_x2_2026-11-25.txt).
MOVED_FRACTION = 0.45

# What a collective of a conversion takes of the host besides starting it, as a multiple of starting one in a loop: its
# autograd function and the views around it. Beyond what their kernels take, split blocks with two collectives or more
# take 12.2 launches for each in forward passes (median of 49), and 7.9 in backward passes, whose kernels take less than
# MODEL_LAUNCH_RATIO; starting one takes 9.7 (benchmarks/block_hosts.py, benchmarks/hosts.py, 2026-11-28).
AROUND_COLLECTIVE = 1.25

# Kernels that a conversion runs besides its collective, forward and backward together. `own_rows` also waits for the
# device, which is not priced.
CONVERSION_KERNELS = {
    "copy_to_tp": 0,
    "keep_first_rank_grad": 1,
    "first_rank_only": 1,
    "first_rank_only_both": 2,
    "own_rows": 4,
    "shard": 1,
    "shard_partial_grad": 2,
    "pad_to_partial": 2,
}


def fraction_of(own: float, whole: float) -> float:
    """How large a part it is; all of nothing."""
    return own / whole if whole else 1.0


@dataclass(frozen=True, slots=True)
class PassParts:
    """A forward pass in seconds, or how large a part of it another one is.

    Attributes:
        device, host: of the device and of the host, without communication.
        tp, collectives: of tensor-parallel communication, and of the host to start that.
    """

    device: float
    host: float
    tp: float
    collectives: float

    def fraction_of(self, whole: PassParts) -> PassParts:
        """How large a part of `whole` it is; all of what takes no time."""
        return PassParts(
            fraction_of(self.device, whole.device),
            fraction_of(self.host, whole.host),
            fraction_of(self.tp, whole.tp),
            fraction_of(self.collectives, whole.collectives),
        )


WHOLE_PASS = PassParts(1.0, 1.0, 1.0, 1.0)


class PassRatios(NamedTuple):
    """Device time of a forward and of a backward pass in a CUDA graph, over that in a stream; at most 1."""

    forward: float
    backward: float


AS_IN_STREAM = PassRatios(1.0, 1.0)


class Elsewhere(NamedTuple):
    """Bytes that a segment keeps, but that others keep as well and count; see `kept_tensors` and `handed_on`.

    Attributes:
        of_kind_bytes, inputs_of_kind_bytes: of all that it keeps, and of its inputs, what others of its kind count.
        made_bytes, made_input_bytes: what the segments that made it count.
        result_bytes: what it counts itself of its results where it is recomputed, since others leave that to it.
    """

    of_kind_bytes: int
    inputs_of_kind_bytes: int
    made_bytes: int
    made_input_bytes: int
    result_bytes: int

    def compiled(self, of_kind_bytes: int) -> Elsewhere:
        """Of the segment compiled, where results are not what is kept."""
        return Elsewhere(of_kind_bytes, self.inputs_of_kind_bytes, 0, 0, 0)


NOTHING = Elsewhere(0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class SegmentWork:
    """One segment, one micro-batch, one rank; see `cost.table.SegmentCost` for the fields they share.

    Attributes:
        host_forward_s, host_backward_s: what the host takes to launch it, without collectives.
        collectives_forward_s, collectives_backward_s: what the host takes to start its collectives.
        input_bytes: what recomputation keeps: its inputs that carry a gradient.
        elsewhere: what other segments keep as well.
        weight_bytes: gradients of its weights as they are computed.
        n_weight_ops, weight_backward_s, pending_bytes: see `weight_gradients`.
        n_kept_tensors: how often autograd keeps a tensor; see `kept_tensors`.
        repeated: how large a part of its forward pass recomputation runs again.
        attention: the fused attention that recomputation may keep; None where there is none.
        chunked: the same with the loss in slices, where it can be; see `cost.chunked_loss`.
        chunked_compiled: likewise with the loss of a slice compiled, for `chunked_as`.
        in_graph: as far as it was measured.
    """

    forward_s: float
    backward_s: float
    host_forward_s: float
    host_backward_s: float
    collectives_forward_s: float
    collectives_backward_s: float
    tp_forward_s: float
    tp_backward_s: float
    saved_bytes: int
    input_bytes: int
    working_bytes: int
    weight_bytes: int
    n_weight_ops: int
    weight_backward_s: float
    pending_bytes: int
    n_kept_tensors: int
    repeated: PassParts
    attention: KeptAttention | None = None
    chunked: SegmentWork | None = None
    chunked_compiled: SegmentWork | None = None
    in_graph: PassRatios = AS_IN_STREAM
    elsewhere: Elsewhere = NOTHING

    @property
    def counted_saved_bytes(self) -> int:
        """What it counts of what it keeps."""
        return max(0, self.saved_bytes - self.elsewhere.of_kind_bytes - self.elsewhere.made_bytes)

    @property
    def counted_input_bytes(self) -> int:
        """What it counts where it is recomputed."""
        others = self.elsewhere.inputs_of_kind_bytes + self.elsewhere.made_input_bytes
        return max(0, self.input_bytes - others) + self.elsewhere.result_bytes

    def captured(self) -> SegmentWork:
        """It as a part of a CUDA graph; the loss in slices has ratios of its own."""
        return replace(self.slowed(*self.in_graph), chunked=self.chunked and self.chunked.captured())

    def slowed(self, forward: float, backward: float) -> SegmentWork:
        """Its passes take so many times as long on the device."""
        return replace(
            self,
            forward_s=self.forward_s * forward,
            backward_s=self.backward_s * backward,
            weight_backward_s=self.weight_backward_s * backward,
            attention=self.attention and self.attention.timed(forward=forward, host_forward=1.0),
            chunked=self.chunked and self.chunked.slowed(forward, backward),
        )


def segment_work(context: WorkContext, segment: LocalSegment, batch_size: int) -> SegmentWork:
    """The sums of one kind of segment."""
    times = times_of(context, segment.ops, segment.alike, batch_size)
    n_additions, additions_s, _ = gradient_additions(context, segment, batch_size)
    cast_s = _loss_cast_s(context, segment, batch_size)
    n_weight_ops, weight_backward_s, pending_bytes = weight_gradients(segment, times, batch_size)
    item_bytes = element_bytes(context.precision).gathered
    forward = _forward_pass(context, segment, times, batch_size)
    collectives_backward_s = context.device.collective_launch_s * _n_collectives(segment, "backward")
    return SegmentWork(
        forward_s=forward.device + cast_s,
        backward_s=sum(t.backward_s for t in times)
        + additions_s
        + cast_s
        + conversion_kernels_s(context, segment, batch_size, backward=True),
        host_forward_s=forward.host,
        host_backward_s=host_s(context.device, sum(t.n_backward_launches for t in times) + n_additions)
        + AROUND_COLLECTIVE * collectives_backward_s,
        collectives_forward_s=forward.collectives,
        collectives_backward_s=collectives_backward_s,
        tp_forward_s=forward.tp,
        tp_backward_s=_communication_s(context, segment, batch_size, backward=True),
        saved_bytes=_saved_bytes(context, segment, batch_size),
        input_bytes=sum(item.spec.n_bytes(batch_size, context.precision) for item in segment.inputs),
        working_bytes=working_bytes(context, segment, batch_size, weight_item_bytes=item_bytes),
        weight_bytes=item_bytes * sum(n_elements for _, n_elements in segment.weights),
        n_weight_ops=n_weight_ops,
        weight_backward_s=weight_backward_s,
        pending_bytes=pending_bytes,
        n_kept_tensors=segment.n_kept_tensors,
        repeated=_forward_pass(context, repeated_part(segment), times, batch_size).fraction_of(forward),
        attention=kept_attention(context, segment, dict(enumerate(times)), batch_size),
        elsewhere=elsewhere(context, segment, batch_size),
    )


def repeated_part(segment: LocalSegment) -> LocalSegment:
    """What recomputation runs again of its forward pass."""
    ops = segment.ops[: segment.n_repeated_ops]
    return replace(segment, ops=ops, conversions=segment.repeated_conversions)


def _forward_pass(context: WorkContext, segment: LocalSegment, times: Sequence[OpTime], batch_size: int) -> PassParts:
    """Of the ops of a segment, the first that `times` are of; without the cast of a loss."""
    own = times[: len(segment.ops)]
    collectives_s = context.device.collective_launch_s * _n_collectives(segment, "forward")
    return PassParts(
        device=sum(t.forward_s for t in own) + conversion_kernels_s(context, segment, batch_size, backward=False),
        host=host_s(context.device, sum(t.n_launches for t in own)) + AROUND_COLLECTIVE * collectives_s,
        tp=_communication_s(context, segment, batch_size, backward=False),
        collectives=collectives_s,
    )


def times_of(context: WorkContext, ops: Sequence[LocalOp], alike: Sequence[int], batch_size: int) -> list[OpTime]:
    """Time of each op; each that has no like before it is looked at."""
    known = {place: timed(context, ops[place], batch_size) for place in set(alike)}
    return [known[place] for place in alike]


def timed(context: WorkContext, local: LocalOp, batch_size: int) -> OpTime:
    """Time of one op on one rank."""
    if local.is_idle:
        return OpTime(0.0, 0.0, 0, 0)
    return op_time(
        local.rule,
        _call(context, local, batch_size),
        device=context.device,
        has_gradient=local.has_gradient,
        is_strided=local.is_strided,
        pieces=local.pieces,
    )


def _call(context: WorkContext, local: LocalOp, batch_size: int) -> LocalCall:
    return LocalCall(
        local.op,
        local.whole_operands,
        local.operands,
        local.results,
        batch_size,
        local.precision,
        context.memory_format,
        context.device.attention,
        local.gradients,
        local.scattered,
        local.own,
        context.is_compiled,
        local.given_precision,
    )


def conversion_s(context: WorkContext, n_bytes: float, step: Conversion) -> float:
    """Forward and backward time of one conversion of a value of `n_bytes` (the global tensor)."""
    kinds = [kind for kind in (step.forward, step.backward) if kind]
    return _local_s(context.device, step) + sum(
        context.tp_collective_s(kind, n_bytes) + copies_s(context, kind, n_bytes, is_in_order=step.is_in_order)
        for kind in kinds
    )


def copies_s(context: WorkContext, kind: str, n_bytes: float, *, is_in_order: bool) -> float:
    """What is copied beside a collective of `n_bytes`: an all-reduce sums up a copy, others put parts in order."""
    bandwidth = context.device.copy_bytes_per_s
    if kind == "all_reduce":
        return 2 * n_bytes / bandwidth
    moved_bytes = 2 * n_bytes / context.degree if kind == "all_to_all" else n_bytes  # before and after it
    return 0.0 if is_in_order else 2 * moved_bytes / (MOVED_FRACTION * bandwidth)


def conversion_kernels_s(context: WorkContext, segment: LocalSegment, batch_size: int, *, backward: bool) -> float:
    """What the conversions of a segment run besides their collectives in one pass; kernels of their own in forward."""
    own_s = 0.0 if backward else sum(_local_s(context.device, step) for _, step in segment.conversions)
    return own_s + sum(
        copies_s(
            context,
            step.backward if backward else step.forward,
            spec.n_bytes(batch_size, context.precision),
            is_in_order=step.is_in_order,
        )
        for spec, step in segment.conversions
        if (step.backward if backward else step.forward)
    )


def _local_s(device: Device, step: Conversion) -> float:
    return device.kernel_s * CONVERSION_KERNELS.get(step.function, 1)


def _n_collectives(segment: LocalSegment, direction: str) -> int:
    """Collectives of conversions in the "forward" or "backward" pass; in forward also those of split losses."""
    of_losses = sum(local.all_reduce_elements > 0 for local in segment.ops) if direction == "forward" else 0
    return of_losses + sum(bool(getattr(step, direction)) for _, step in segment.conversions)


def gradient_additions(context: WorkContext, segment: LocalSegment, batch_size: int) -> tuple[int, float, int]:
    """How many gradients are added to others, the seconds of it, and the bytes: two reads and one write each."""
    n_additions = sum(count for count, _ in segment.additions)
    n_bytes = sum(3 * count * spec.n_bytes(batch_size, context.precision) for count, spec in segment.additions)
    bandwidth = context.device.copy_bytes_per_s
    return n_additions, n_additions * context.device.kernel_s + n_bytes / bandwidth, n_bytes


def weight_gradients(
    segment: LocalSegment, times: Sequence[OpTime], batch_size: int, *, without: Collection[int] = ()
) -> tuple[int, float, int]:
    """What a split backward pass does apart: for how many ops, its time, and the gradients that it keeps until then.

    Half of the backward pass of a product with a weight is for the weight. Gradients of other parameters (a sum, a
    scale) are counted with those of the inputs. Every op that reads a parameter keeps the gradient of its result.
    """
    total_s, pending_bytes = 0.0, 0
    for index in (index for index in segment.weight_ops if index not in without):
        local = segment.ops[index]
        is_product = local.rule is not None and local.rule.efficiency == "matmul"
        total_s += times[index].backward_s / 2 if is_product else 0.0
        pending_bytes += sum(spec.n_bytes(batch_size, local.precision) for spec in local.results)
    return len(segment.weight_ops), total_s, pending_bytes


def _loss_cast_s(context: WorkContext, segment: LocalSegment, batch_size: int) -> float:
    """Casting the model's outputs to float32 for the loss; the same time in backward."""
    bandwidth = context.device.copy_bytes_per_s
    precisions = (context.precision, "fp32")
    total_bytes = sum(spec.n_bytes(batch_size, p) for spec in segment.loss_outputs for p in precisions)
    return total_bytes / bandwidth


def _communication_s(context: WorkContext, segment: LocalSegment, batch_size: int, *, backward: bool) -> float:
    total_s = 0.0
    for spec, step in segment.conversions:
        kind = step.backward if backward else step.forward
        if kind:
            total_s += context.tp_collective_s(kind, spec.n_bytes(batch_size, context.precision))
    if not backward:
        for local in segment.ops:
            n_bytes = local.all_reduce_elements * batch_size * LOSS_STATISTIC_BYTES
            total_s += context.tp_collective_s("all_reduce", n_bytes)
    return total_s


def _saved_bytes(context: WorkContext, segment: LocalSegment, batch_size: int) -> int:
    inside = sum(inside_bytes(context, local, batch_size) for local in segment.ops if local.has_gradient)
    return kept_bytes(segment.kept, batch_size) + inside


def kept_bytes(kept: Sequence[KeptTensor], batch_size: int) -> int:
    """Views of one tensor have layouts of different dims but are the same memory: the largest per root counts, or the
    sum of its pieces where only those are kept; a gathered and a sharded copy count both.
    """
    largest: dict[tuple[str, bool], dict[str, int]] = {}
    for tensor in kept:
        pieces = largest.setdefault((tensor.root, tensor.is_part), {})
        pieces[tensor.piece] = max(pieces.get(tensor.piece, 0), tensor.n_bytes(batch_size))
    return sum(pieces.get("", sum(pieces.values())) for pieces in largest.values())


def elsewhere(context: WorkContext, segment: LocalSegment, batch_size: int) -> Elsewhere:
    """Of an eager segment."""
    of_kind: dict[int, list[KeptTensor]] = {}
    for tensor in segment.kept:
        of_kind.setdefault(1 if tensor.is_handed_on else tensor.n_holders, []).append(tensor)
    sizes = [(item, item.spec.n_bytes(batch_size, context.precision)) for item in segment.inputs]
    return Elsewhere(
        of_kind_bytes=sum(others_bytes(kept_bytes(kept, batch_size), n) for n, kept in of_kind.items()),
        inputs_of_kind_bytes=sum(others_bytes(size, item.n_holders) for item, size in sizes if not item.is_handed_on),
        made_bytes=kept_bytes([tensor for tensor in segment.kept if tensor.is_handed_on], batch_size),
        made_input_bytes=sum(size for item, size in sizes if item.is_handed_on),
        result_bytes=sum(spec.n_bytes(batch_size, context.precision) for spec in segment.handed_on),
    )


def working_bytes(
    context: WorkContext,
    segment: LocalSegment,
    batch_size: int,
    *,
    weight_item_bytes: int,
    without: Collection[int] = (),
) -> int:
    """The largest sum of temporaries around one op and the gradients of weights that backward has computed by then.

    These take the place of what backward has freed by then, but for passes that are split, which free nothing before
    they have all of them: so it is no less than the temporaries. Of the ops `without` only the weights count.
    """
    known = {place: _temporary_bytes(context, segment.ops[place], batch_size) for place in set(segment.alike)}
    freed_bytes = [0] * (len(segment.ops) + 1) if without else _freed_bytes(segment, batch_size)
    largest = 0
    for index, (place, n_elements) in enumerate(zip(segment.alike, segment.weight_elements, strict=True)):
        temporary = 0 if index in without else known[place]
        largest = max(largest, temporary + max(0, weight_item_bytes * n_elements - freed_bytes[index + 1]))
    return largest


def _freed_bytes(segment: LocalSegment, batch_size: int) -> list[int]:
    """For each op, and behind the last one, what backward has freed when it is done with it."""
    memories: dict[tuple[str, bool], list[KeptTensor]] = {}
    for tensor in segment.kept:
        memories.setdefault((tensor.root, tensor.is_part), []).append(tensor)
    freed = [0] * (len(segment.ops) + 1)
    for tensors in memories.values():
        freed[min(tensor.first for tensor in tensors)] += kept_bytes(tensors, batch_size)
    return list(accumulate(reversed(freed)))[::-1]


def _temporary_bytes(context: WorkContext, local: LocalOp, batch_size: int) -> int:
    """Temporaries around one op, and what it keeps only inside itself."""
    if local.rule is not None and local.rule.is_view:
        return 0
    total = sum(spec.n_bytes(batch_size, local.precision) for spec in local.temporaries)
    return total + inside_bytes(context, local, batch_size)


def inside_bytes(context: WorkContext, local: LocalOp, batch_size: int) -> int:
    """What the op keeps beside its operands and results."""
    if local.rule is None or local.rule.extra_saved_bytes is None:
        return 0
    return local.rule.extra_saved_bytes(_call(context, local, batch_size))
