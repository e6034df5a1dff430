"""What a segment takes where torch.compile makes one function of it: FusedSegment -> SegmentWork.

    forward_s  = kernels of their own as in eager mode + for each fusion: kernel_s + bytes / rate
    bytes      forward: what it reads and writes; backward: gradients and kept tensors that it reads, gradients it
               writes, and where it has weights a second kernel reads the same to sum their gradients over the rows
    saved      = what `fusions` says is kept

so a chain of element-wise ops costs the bytes at its ends, at a part of the rate of a copy. Convolutions are those of
images in channels_last, to which the compiler turns them. Of a segment that is split, conversions between layouts are
taken to lie beside products, where they mostly do, and to copy what they copy in eager mode.

The table of what was measured beside what is computed here: benchmarks/compiled_blocks.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from autoplan.cost.chunked_loss import chunked_as
from autoplan.cost.fusions import FusedSegment, Fusion
from autoplan.cost.kept_attention import KeptAttention, kept_attention
from autoplan.cost.kept_tensors import others_bytes
from autoplan.cost.local_segment import LocalOp, LocalSegment, alike_ops
from autoplan.cost.op_time import OpTime, host_s
from autoplan.cost.parameters import element_bytes
from autoplan.cost.segment_work import (
    WHOLE_PASS,
    SegmentWork,
    conversion_kernels_s,
    fraction_of,
    inside_bytes,
    kept_bytes,
    times_of,
    working_bytes,
)
from autoplan.cost.work_context import WorkContext
from autoplan.graph import TensorSpec

# Rate of a fused kernel / of a copy, and how often a fusion with such an op goes over its first operand beyond once,
# forward and backward. By hand to blocks of Llama, GPT-2 XL, BERT and ViT, losses of 32,000 to 128,256 classes and
# ResNet-152 on H200 (profile_h200_2026-11-22.jsonl and profile_h200_x2_2026-11-22_one_machine.jsonl in
# benchmarks/results); not to H100, T5 or the mixture's blocks. Batch norm by the order in which the images come: it
# reads them otherwise than they lie where convolutions turned them (17 rows of channels_last, |log| 0.08 and 0.04).
FUSED_FRACTION = 0.85
FURTHER_PASSES = {
    "aten.cross_entropy_loss.default": dict.fromkeys(("contiguous", "channels_last"), (1.7, 0.4)),
    "aten.batch_norm.default": {"contiguous": (2.5, 6.5), "channels_last": (2.2, 3.6)},
}
# What the host takes, as launches of eager ops: for a call (guards, the autograd function around it), forward and
# backward, and for each of its kernels. Chosen among four pairs for the 14 compiled runs on H200 that wait for the host
# (results/predictions_compiled_h200_2026-11-25_data_sheet.txt): blocks measured alone take about 20 and 28.
CALL_LAUNCHES_fit = (8, 14)
KERNEL_LAUNCHES = 0.8


@dataclass(frozen=True, slots=True)
class CompiledSegment:
    """A segment as it is compiled: all that does not depend on the micro-batch.

    Attributes:
        single: its ops that stay kernels of their own; `alike` as in `LocalSegment`.
        alike_fusions: likewise of its fusions.
        around: the segment with what is alive around each kernel; see `_around`.
    """

    local: LocalSegment
    fused: FusedSegment
    single: tuple[LocalOp, ...]
    alike: tuple[int, ...]
    alike_fusions: tuple[int, ...]
    around: LocalSegment


@dataclass(frozen=True, slots=True)
class CompiledPasses:
    """What both passes of a compiled segment take and keep, as in `SegmentWork`."""

    forward_s: float
    backward_s: float
    host_forward_s: float
    host_backward_s: float
    saved_bytes: int
    of_kind_bytes: int
    working_bytes: int
    n_kept_tensors: int
    attention: KeptAttention | None


def compiled_segment(context: WorkContext, local: LocalSegment, fused: FusedSegment) -> CompiledSegment:
    """A segment that is fused so."""
    single = tuple(_contiguous(local.ops[index]) for index in fused.single)
    alike_fusions = _alike_fusions(local, fused.fusions)
    around = _around(context, local, fused)
    return CompiledSegment(local, fused, single, alike_ops(single), alike_fusions, around)


def compiled_passes(context: WorkContext, segment: CompiledSegment, batch_size: int) -> CompiledPasses:
    """Of a compiled segment and one micro-batch."""
    local, fused = segment.local, segment.fused
    memory_format = context.memory_format
    context = replace(context, memory_format="channels_last", is_compiled=True)
    single = times_of(context, segment.single, segment.alike, batch_size)
    known = {
        place: _fusion_pass(context, local, fused.fusions[place], batch_size, memory_format=memory_format)
        for place in set(segment.alike_fusions)
    }
    passes = [known[place] for place in segment.alike_fusions]
    added_bytes = sum(n_passes * _n_bytes(context, [spec], batch_size) for n_passes, spec in fused.additions)
    bandwidth = context.device.copy_bytes_per_s
    n_forward = CALL_LAUNCHES_fit[0] + KERNEL_LAUNCHES * sum(time.n_launches for time in (*passes, *single))
    n_backward = CALL_LAUNCHES_fit[1] + KERNEL_LAUNCHES * sum(time.n_backward_launches for time in (*passes, *single))
    item_bytes = element_bytes(context.precision).gathered
    return CompiledPasses(
        forward_s=sum(time.forward_s for time in (*passes, *single))
        + conversion_kernels_s(context, local, batch_size, backward=False),
        backward_s=sum(time.backward_s for time in (*passes, *single))
        + added_bytes / bandwidth
        + conversion_kernels_s(context, local, batch_size, backward=True),
        host_forward_s=host_s(context.device, n_forward),
        host_backward_s=host_s(context.device, n_backward),
        saved_bytes=_saved_bytes(context, local, fused, batch_size),
        of_kind_bytes=sum(
            others_bytes(spec.n_bytes(batch_size, context.precision), n_holders) for spec, n_holders in fused.kept
        ),
        working_bytes=working_bytes(context, segment.around, batch_size, weight_item_bytes=item_bytes),
        n_kept_tensors=len(fused.kept),
        attention=kept_attention(
            context, local, dict(zip(fused.single, single, strict=True)), batch_size, launches=KERNEL_LAUNCHES
        ),
    )


def as_compiled(eager: SegmentWork, passes: CompiledPasses) -> SegmentWork:
    """The work of a segment that takes this compiled, for which `eager` is that of its ops one by one."""
    found = replace(
        eager,
        forward_s=passes.forward_s,
        backward_s=passes.backward_s,
        host_forward_s=passes.host_forward_s,
        host_backward_s=passes.host_backward_s,
        saved_bytes=passes.saved_bytes,
        elsewhere=eager.elsewhere.compiled(passes.of_kind_bytes),
        working_bytes=passes.working_bytes,
        n_kept_tensors=passes.n_kept_tensors,
        repeated=WHOLE_PASS,
        attention=passes.attention,
    )
    weight_backward_s = eager.weight_backward_s * fraction_of(found.backward_s, eager.backward_s)
    chunked = chunked_as(found, eager, is_compiled=True)
    return replace(found, weight_backward_s=weight_backward_s, chunked=chunked)


def _contiguous(op: LocalOp) -> LocalOp:
    """As it reads what a fusion wrote in the order that it wants."""
    return replace(op, is_strided=False, pieces=(False,) * len(op.pieces))


def _further(local: LocalSegment, fusion: Fusion) -> tuple[tuple[tuple[TensorSpec, ...], str], ...]:
    """(operand that it goes over beyond once, name of the op) for each such op of a fusion."""
    found = (local.ops[index] for index in fusion.ops if local.ops[index].op.target in FURTHER_PASSES)
    return tuple((op.operands[:1], op.op.target) for op in found)


def _alike_fusions(local: LocalSegment, fusions: tuple[Fusion, ...]) -> tuple[int, ...]:
    """For each fusion the place of the first that moves the same."""
    first: dict[object, int] = {}
    return tuple(
        first.setdefault((replace(fusion, ops=()), _further(local, fusion)), place)
        for place, fusion in enumerate(fusions)
    )


def _fusion_pass(
    context: WorkContext, local: LocalSegment, fusion: Fusion, batch_size: int, *, memory_format: str
) -> OpTime:
    """Both passes of one fusion, of a segment that is given its images in this order."""

    def n_bytes(specs: Iterable[TensorSpec]) -> int:
        return _n_bytes(context, specs, batch_size)

    bandwidth = context.device.copy_bytes_per_s * FUSED_FRACTION
    further = [
        (n_bytes(operands), FURTHER_PASSES[target][memory_format]) for operands, target in _further(local, fusion)
    ]
    forward_bytes = n_bytes((*fusion.reads, *fusion.writes)) + sum(size * passes[0] for size, passes in further)
    read_bytes = n_bytes((*fusion.reads_gradients, *fusion.reads_again))
    backward_bytes = read_bytes + n_bytes(fusion.writes_gradients) + sum(size * passes[1] for size, passes in further)
    backward_bytes += read_bytes if fusion.has_weights and not further else 0
    n_backward = bool(backward_bytes) + fusion.has_weights
    return OpTime(
        forward_s=context.device.kernel_s + forward_bytes / bandwidth,
        backward_s=n_backward * context.device.kernel_s + backward_bytes / bandwidth,
        n_launches=1,
        n_backward_launches=n_backward,
    )


def _saved_bytes(context: WorkContext, local: LocalSegment, fused: FusedSegment, batch_size: int) -> int:
    """What fusions leave to be kept, and what tensor parallelism has gathered of weights."""
    inside = sum(inside_bytes(context, local.ops[i], batch_size) for i in fused.single if local.ops[i].has_gradient)
    gathered = kept_bytes([tensor for tensor in local.kept if tensor.is_weight], batch_size)
    return _n_bytes(context, (spec for spec, _ in fused.kept), batch_size) + inside + gathered


def _around(context: WorkContext, local: LocalSegment, fused: FusedSegment) -> LocalSegment:
    """The segment for `working_bytes`: as in eager mode, where around a fusion there are the gradients that it writes.

    One of these takes the place of a gradient that it read, but where it goes over its operands more than once: there
    are both then. Those of a loss that is split over the classes are float32 until all ranks have added to them.
    """
    ops = list(local.ops)
    for fusion in fused.fusions:
        alive = list(fusion.writes_gradients)
        if any(local.ops[index].op.target in FURTHER_PASSES for index in fusion.ops):
            alive += fusion.reads_gradients
        elif alive and fusion.reads_gradients:
            alive.pop()
        is_split = any(local.ops[index].all_reduce_elements for index in fusion.ops)
        for index in fusion.ops:
            ops[index] = replace(ops[index], rule=None, temporaries=())
        precision = ops[fusion.ops[-1]].precision if is_split else context.precision
        ops[fusion.ops[0]] = replace(ops[fusion.ops[0]], temporaries=tuple(alive), precision=precision)
    return replace(local, ops=tuple(ops), alike=alike_ops(ops))


def _n_bytes(context: WorkContext, specs: Iterable[TensorSpec], batch_size: int) -> int:
    return sum(spec.n_bytes(batch_size, context.precision) for spec in specs)
