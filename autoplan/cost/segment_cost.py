"""SegmentCost from the work of a segment and its parameters: plain, recomputed (with attention kept or not), with its
loss in slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from autoplan.cost.launch import Launch, PassSeconds, late_share, launch, lead_s
from autoplan.cost.parameters import ParameterCost
from autoplan.cost.segment_work import SegmentWork
from autoplan.cost.table import SegmentCost

# Host time of the gradient of one op's weights in a pass of its own: torch runs the autograd engine once for each.
# 0.4 ms per block with 6 such ops, examples/gpt.py at width 8, torch 2.13, one CPU core; taken for all hosts.
WEIGHT_OP_HOST_S = 6e-5
# Host time of each tensor that autograd keeps in a block that is recomputed: torch.utils.checkpoint runs Python when it
# is kept, kept again and used. 27 to 31 us on blocks of Llama, T5, BERT and ResNet with 27 to 42 of them (recomputed
# less plain less forward, torch 2.13, one CPU core); taken for all hosts.
KEPT_TENSOR_HOST_S = 3e-5


def segment_costs(
    work: SegmentWork,
    parameters: ParameterCost,
    *,
    fixed_bytes: int,
    is_block: bool,
    splits: bool,
    repeats: bool,
    may_recompute: bool,
    loss: str | None,
    keeps_attention: bool = False,
    is_captured: bool = False,
) -> tuple[SegmentCost, ...]:
    """A block without recomputation and, where it may, with it; anything else has no such choice, and is there twice.

    `work` is as it runs there (`works.make_running_works`). `keeps_attention`: recomputation keeps what fused attention
    made. `is_captured`: the passes are a CUDA graph.

    The last segment has its loss whole and in slices instead, or twice the one that is asked for.
    """
    cost_of = partial(
        _plain_cost,
        parameters=parameters,
        fixed_bytes=fixed_bytes,
        splits=splits,
        repeats=repeats,
        is_captured=is_captured,
    )
    plain = cost_of(work)
    chunked = plain if work.chunked is None or loss == "whole" else cost_of(work.chunked)
    if loss == "chunked":
        plain = chunked
    elif chunked.saved_bytes >= plain.saved_bytes:  # the search looks for choices that keep less
        chunked = plain
    if not is_block:
        return plain, chunked
    if not may_recompute:
        return (plain,)
    again, kept = work.repeated, work.attention if keeps_attention else None
    kept_bytes = 0 if kept is None else kept.n_bytes
    saved_bytes = min(work.counted_input_bytes + kept_bytes, work.counted_saved_bytes)
    again_s = again.device * work.forward_s + again.tp * work.tp_forward_s
    host_again_s = again.host * work.host_forward_s + again.collectives * work.collectives_forward_s
    host_again_s += work.n_kept_tensors * KEPT_TENSOR_HOST_S
    if kept is not None:
        again_s = max(0.0, again_s - kept.forward_s)
        host_again_s = max(0.0, host_again_s - kept.host_forward_s) + kept.seen_s
    full = replace(
        plain,
        recompute_s=again_s if is_captured else max(again_s, host_again_s),
        saved_bytes=saved_bytes,
        working_bytes=plain.working_bytes + plain.saved_bytes - saved_bytes,
        kept_bytes=kept_bytes,
    )
    return plain, full


def with_late_optimizer(
    costs: Sequence[tuple[SegmentCost, ...]],
    parameters: Sequence[ParameterCost],
    n_segments: Sequence[int],
    *,
    n_micro_batches: int,
) -> tuple[tuple[SegmentCost, ...], ...]:
    """Costs of captured segments, with what the device waits for the host's part of the optimizer.

    All three have one entry per kind; there are `n_segments` of it. Each has the same share of the wait as of the
    host's time. Left out is the time that recomputation and the bubble of a pipeline give the host.
    """
    kinds = list(zip(costs, parameters, n_segments, strict=True))
    compute_s = sum(
        n * (plain.forward_s + plain.backward_s + plain.tp_forward_s + plain.tp_backward_s)
        for (plain, *_), _, n in kinds
    )
    copies_s = sum(n * own.once_s for _, own, n in kinds)
    passes_s = max(n_micro_batches * compute_s + copies_s, sum(n * plain.last_reduce_s for (plain, *_), _, n in kinds))
    share = late_share(sum(n * own.host_optimizer_s for _, own, n in kinds), passes_s)
    if not share:
        return tuple(costs)
    waits_s = [share * own.host_optimizer_s for own in parameters]
    return tuple(
        tuple(
            replace(cost, optimizer_s=cost.optimizer_s + wait_s, launch_once_s=cost.launch_once_s + wait_s)
            for cost in choices
        )
        for choices, wait_s in zip(costs, waits_s, strict=True)
    )


def _plain_cost(
    work: SegmentWork, *, parameters: ParameterCost, fixed_bytes: int, splits: bool, repeats: bool, is_captured: bool
) -> SegmentCost:
    """Nothing recomputed."""
    forward_s = work.forward_s + parameters.unpack_s
    unpack_again_s = 0.0 if parameters.is_kept else parameters.unpack_s
    backward_s = work.backward_s + unpack_again_s + parameters.pack_s + parameters.accumulate_s
    host = PassSeconds(
        work.host_forward_s + work.collectives_forward_s + parameters.host_forward_s,
        work.host_backward_s + work.collectives_backward_s + parameters.host_backward_s,
    )
    device = PassSeconds(forward_s + work.tp_forward_s, backward_s + work.tp_backward_s)
    if is_captured:
        added = Launch(0.0, 0.0, 0.0)
    else:
        last_s = parameters.host_last_s + parameters.host_optimizer_s
        added = launch(host, device, first_s=parameters.host_first_s, last_s=last_s, repeats=repeats)
    launch_weights_s = max(0.0, work.n_weight_ops * WEIGHT_OP_HOST_S - work.weight_backward_s) if splits else 0.0
    return SegmentCost(
        forward_s=forward_s,
        backward_s=backward_s,
        recompute_s=0.0,
        launch_forward_s=added.forward_s,
        launch_backward_s=added.backward_s + launch_weights_s,
        tp_forward_s=work.tp_forward_s,
        tp_backward_s=work.tp_backward_s,
        gather_s=parameters.gather_s,
        reduce_s=parameters.reduce_s,
        optimizer_s=parameters.optimizer_s + added.once_s,
        state_bytes=parameters.state_bytes + fixed_bytes,
        gathered_bytes=parameters.gathered_bytes,
        gradient_bytes=parameters.gradient_bytes,
        saved_bytes=work.counted_saved_bytes,
        working_bytes=work.working_bytes + work.elsewhere.of_kind_bytes,  # of what others hold a share, all is there
        weight_backward_s=work.weight_backward_s + launch_weights_s,
        pending_bytes=work.pending_bytes,
        launch_once_s=added.once_s,
        reduced_bytes=parameters.reduced_bytes,
        reducing_bytes=parameters.reducing_bytes,
        late_gradient_bytes=parameters.late_gradient_bytes,
        lead_s=lead_s(host.forward_s, device.forward_s) + lead_s(host.backward_s, device.backward_s),
        is_kept=parameters.is_kept,
        replicas_s=parameters.replicas_s,
        waiting_bytes=parameters.waiting_bytes,
    )
