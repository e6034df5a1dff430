"""The last segment with its loss in slices: SegmentWork of the whole loss -> that of the chunked one.

With n slices of the rows, a head of x: [row, hidden] and W: [class, hidden], and dW its gradient:

    time      that of the whole loss, as every product and pass over the logits is the same
              + (n - 1) launches of each kernel, and of the collectives of a split loss
              + (n - 1) times dW read and written, since slices add to it
              + x's gradient and dW read and written once, when the gradient of the loss is known
    saved     what the other ops keep + x's gradient + dW
    working   as of the other ops, or one slice: logits, their log-softmax and two gradients of its size (compiled,
              logits and their gradient: 2.1 GB of 4,096 rows and 128,256 classes, benchmarks/chunked_rows.py; of a
              split loss its probabilities in float32 too), and what the product keeps inside itself (the copy of W
              with padding of a padded head)

The gradients are computed in the forward pass, but all time is counted where the whole loss has it: a last segment runs
backward right after forward under most schedules, and always both before the step ends.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.cost.local_segment import LocalOp, LocalSegment, SlicedOps
from autoplan.cost.op_time import host_s
from autoplan.cost.parameters import element_bytes
from autoplan.cost.segment_work import (
    LOSS_STATISTIC_BYTES,
    SegmentWork,
    fraction_of,
    inside_bytes,
    kept_bytes,
    times_of,
    weight_gradients,
    working_bytes,
)
from autoplan.cost.work_context import WorkContext
from autoplan.graph import COMPUTE_DTYPES, DTYPE_BYTES
from autoplan.rules import operand_names

N_SLICE_TENSORS = 3  # of the size of a slice of the logits, in the precision of the loss: log-softmax and two gradients
N_SCALINGS = 2  # kernels once per micro-batch, for the gradient of x and for dW


def with_chunked_loss(context: WorkContext, segment: LocalSegment, work: SegmentWork, batch_size: int) -> SegmentWork:
    """`work`, with that of the chunked loss if there is one, eager and compiled."""
    if segment.sliced is None:
        return work
    eager, compiled = (
        _chunked_work(replace(context, is_compiled=is_compiled), segment, segment.sliced, work, batch_size)
        for is_compiled in (False, True)
    )
    return replace(work, chunked=eager, chunked_compiled=compiled)


def chunked_as(found: SegmentWork, work: SegmentWork, *, is_compiled: bool) -> SegmentWork | None:
    """The chunked loss of `work`, as much faster or slower as the whole one was `found` to be; bytes as computed.

    It does all its work while a slice is there, so what is known of a whole loss says nothing about its bytes.
    """
    more = work.chunked_compiled if is_compiled else work.chunked
    if more is None:
        return None
    scale = fraction_of(found.forward_s + found.backward_s, work.forward_s + work.backward_s)
    hosts = fraction_of(found.host_forward_s + found.host_backward_s, work.host_forward_s + work.host_backward_s)
    return replace(
        more,
        forward_s=found.forward_s,
        backward_s=found.backward_s + scale * (more.backward_s - work.backward_s),
        host_forward_s=found.host_forward_s,
        host_backward_s=found.host_backward_s + hosts * (more.host_backward_s - work.host_backward_s),
        weight_backward_s=more.weight_backward_s * fraction_of(found.backward_s, work.backward_s),
        in_graph=found.in_graph,
    )


def _chunked_work(
    context: WorkContext, segment: LocalSegment, sliced: SlicedOps, work: SegmentWork, batch_size: int
) -> SegmentWork:
    product, times = segment.ops[sliced.indices[0]], times_of(context, segment.ops, segment.alike, batch_size)
    repeats = (_n_rows(segment, sliced, batch_size) - 1) // sliced.head.slice_rows(is_compiled=context.is_compiled)
    own = [times[index] for index in sliced.indices]
    n_launches = repeats * sum(time.n_launches + time.n_backward_launches for time in own) + N_SCALINGS
    x_bytes = product.operands[0].n_bytes(batch_size, context.precision)
    sums_bytes = _sums_bytes(context, segment, product)
    bandwidth = context.device.copy_bytes_per_s
    moved_bytes = 2 * repeats * sums_bytes + 2 * (x_bytes + sums_bytes)
    _, weight_backward_s, pending_bytes = weight_gradients(segment, times, batch_size, without=sliced.indices)
    others = [op for index, op in enumerate(segment.ops) if index not in sliced.indices and op.has_gradient]
    inside = sum(inside_bytes(context, op, batch_size) for op in others)
    statistics = [op for op in segment.ops if op.all_reduce_elements]
    return replace(
        work,
        backward_s=work.backward_s + context.device.kernel_s * n_launches + moved_bytes / bandwidth,
        host_backward_s=work.host_backward_s + host_s(context.device, n_launches),
        collectives_backward_s=work.collectives_backward_s
        + repeats * len(statistics) * context.device.collective_launch_s,
        tp_backward_s=work.tp_backward_s + sum(_again_s(context, op, repeats, batch_size) for op in statistics),
        saved_bytes=kept_bytes(sliced.kept, batch_size) + inside + x_bytes + sums_bytes,
        working_bytes=_chunked_working_bytes(context, segment, sliced, batch_size),
        weight_backward_s=weight_backward_s,
        pending_bytes=pending_bytes,
    )


def _again_s(context: WorkContext, op: LocalOp, repeats: int, batch_size: int) -> float:
    """The collectives of a split loss for each slice, less those of the whole."""
    n_bytes = op.all_reduce_elements * batch_size * LOSS_STATISTIC_BYTES
    each_s = context.tp_collective_s("all_reduce", n_bytes / (repeats + 1))
    return (repeats + 1) * each_s - context.tp_collective_s("all_reduce", n_bytes)


def _n_rows(segment: LocalSegment, sliced: SlicedOps, batch_size: int) -> int:
    """Of what the loss reads: [row, class]."""
    rows, _ = segment.ops[sliced.indices[-1]].operands[0].at(batch_size)
    return rows


def _sums_bytes(context: WorkContext, segment: LocalSegment, product: LocalOp) -> int:
    """The gradients of weight and bias, which slices add to; in float32 under float16."""
    precision, trained = "fp32" if context.precision == "fp16" else context.precision, dict(segment.weights)
    pairs = zip(operand_names(product.op), product.operands, strict=True)
    return sum(spec.n_bytes(1, precision) for name, spec in pairs if name in trained)


def _chunked_working_bytes(context: WorkContext, segment: LocalSegment, sliced: SlicedOps, batch_size: int) -> int:
    """The working bytes of a segment whose loss is chunked, compiled or not as the context is."""
    item_bytes = element_bytes(context.precision).gathered
    around = working_bytes(context, segment, batch_size, weight_item_bytes=item_bytes, without=sliced.indices)
    return max(around, _slice_bytes(context, segment, sliced, batch_size))


def _slice_bytes(context: WorkContext, segment: LocalSegment, sliced: SlicedOps, batch_size: int) -> int:
    """What is alive while the largest slice is computed: of the size of its logits, and inside the product."""
    item_bytes = DTYPE_BYTES[COMPUTE_DTYPES[context.precision]]
    precise_bytes, loss = max(item_bytes, DTYPE_BYTES["float32"]), segment.ops[sliced.indices[-1]]
    of_loss = N_SLICE_TENSORS * precise_bytes
    if context.is_compiled:
        of_loss = item_bytes + (precise_bytes if loss.all_reduce_elements else 0)
    n_classes = loss.operands[0].at(batch_size)[1]
    slice_rows = sliced.head.slice_rows(is_compiled=context.is_compiled)
    n_elements = min(_n_rows(segment, sliced, batch_size), slice_rows) * n_classes
    return n_elements * (item_bytes + of_loss) + inside_bytes(context, segment.ops[sliced.indices[0]], batch_size)
