"""The cost of one segment, its work and its parameters put together, and of what a rank has beside its segments."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from autoplan.cost.launch import PassSeconds, launch, lead_s
from autoplan.cost.parameters import ParameterCost
from autoplan.cost.segment_work import SegmentWork
from autoplan.cost.table import SegmentCost
from autoplan.hardware import Device
from autoplan.parallel_plan import Mesh
from autoplan.schedules import splits_backward
from autoplan.units import MiB

# Assumed until measured on the target: device context and communication buffers of one process.
CONTEXT_BYTES = 1024 * MiB
COMMUNICATOR_BYTES = 256 * MiB
# Host time of the gradient of one op's weights in a pass of its own: torch runs the autograd engine once for each.
# 0.4 ms per block with 6 such ops, examples/gpt.py at width 8, torch 2.13, one CPU core; taken for all hosts.
WEIGHT_OP_HOST_S = 6e-5


def segment_costs(
    work: SegmentWork,
    parameters: ParameterCost,
    *,
    fixed_bytes: int,
    is_block: bool,
    splits: bool,
    repeats: bool,
    loss: str | None,
) -> tuple[SegmentCost, ...]:
    """The segment without recomputation, and with it unless the backward pass is split; only blocks recompute.

    The last segment has its loss whole and in slices instead, or twice the one that is asked for.
    """
    cost_of = partial(_plain_cost, parameters=parameters, fixed_bytes=fixed_bytes, splits=splits, repeats=repeats)
    plain = cost_of(work)
    chunked = plain if work.chunked is None or loss == "whole" else cost_of(work.chunked)
    if loss == "chunked":
        plain = chunked
    elif chunked.saved_bytes >= plain.saved_bytes:  # the search looks for choices that keep less
        chunked = plain
    if splits:
        return (plain,)
    if not is_block:
        return plain, chunked
    input_bytes = min(work.input_bytes, work.saved_bytes)
    again_s, host_again_s = work.forward_s + work.tp_forward_s, work.host_forward_s + work.collectives_forward_s
    full = replace(
        plain,
        recompute_s=max(again_s, host_again_s),
        saved_bytes=input_bytes,
        working_bytes=work.working_bytes + work.saved_bytes - input_bytes,
    )
    return plain, full


def _plain_cost(
    work: SegmentWork, *, parameters: ParameterCost, fixed_bytes: int, splits: bool, repeats: bool
) -> SegmentCost:
    """Nothing recomputed."""
    forward_s = work.forward_s + parameters.unpack_s
    backward_s = work.backward_s + parameters.unpack_s + parameters.pack_s + parameters.accumulate_s
    host = PassSeconds(
        work.host_forward_s + work.collectives_forward_s + parameters.host_forward_s,
        work.host_backward_s + work.collectives_backward_s + parameters.host_backward_s,
    )
    device = PassSeconds(forward_s + work.tp_forward_s, backward_s + work.tp_backward_s)
    added = launch(
        host,
        device,
        first_s=parameters.host_first_s,
        last_s=parameters.host_last_s,
        repeats=repeats,
    )
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
        saved_bytes=work.saved_bytes,
        working_bytes=work.working_bytes,
        weight_backward_s=work.weight_backward_s + launch_weights_s,
        pending_bytes=work.pending_bytes,
        launch_once_s=added.once_s,
        reduced_bytes=parameters.reduced_bytes,
        reducing_bytes=parameters.reducing_bytes,
        late_gradient_bytes=parameters.late_gradient_bytes,
        lead_s=lead_s(host.forward_s, device.forward_s) + lead_s(host.backward_s, device.backward_s),
    )


def action_s(mesh: Mesh, device: Device, *, lead_s: float) -> float:
    """What an action waits for the host beside its segments, where the lead that this wins in the blocks is too short.

    `lead_s` is that of all blocks in one micro-batch; stages are taken to have equal shares of it. A stage in the
    middle receives and sends in each of two actions, one at an end does one of both.
    """
    if mesh.pp == 1:
        return 0.0
    n_actions = 3 if splits_backward(mesh.schedule) else 2
    n_transfers = 2 * (1 if mesh.n_stages == 2 else 2)
    host_s = n_actions * device.pipeline_action_s + n_transfers * device.pipeline_transfer_s
    return max(0.0, host_s - lead_s / mesh.n_stages) / n_actions


def fixed_bytes(mesh: Mesh) -> int:
    """Context and communicators."""
    n_communicators = sum(n > 1 for n in (mesh.pp, mesh.dp, mesh.tp))
    return CONTEXT_BYTES + COMMUNICATOR_BYTES * n_communicators
