"""CostTable: everything the search and the simulator know about one mesh, as numbers.

Neither of them sees an op, a link or a rule; whoever reads a plan's price can recompute it from this table.
All figures are for one device of the mesh. Times per micro-batch unless the name says `_per_step`.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.overlap import Overlap
from autoplan.parallel_plan import Mesh

# Where the times of a segment come from under a measured profile, the most trustworthy first; see `cost.measured`.
SOURCES = MEASURED, SCALED, CALIBRATED = ("measured", "scaled", "calibrated")


@dataclass(frozen=True, slots=True)
class SegmentCost:
    """One segment under one recompute choice.

    Attributes:
        forward_s, backward_s: compute, with copies into and out of communication buffers and adding up gradients;
            without recomputation, communication and launch.
        launch_forward_s, launch_backward_s: what the host adds to every pass where it is slower; see `cost.launch`.
        recompute_s: the forward pass run again in backward, with its tensor-parallel communication and launch;
            0 for "none".
        tp_forward_s, tp_backward_s: exposed tensor-parallel communication.
        gather_s: one all-gather of the segment's parameters over the ZeRO group; 0 when nothing is sharded.
        reduce_s: one reduction of its gradients over the data-parallel group.
        kept_bytes: the part of `saved_bytes` that attention made, where recomputation keeps it.
        replicas_s: what the last reduction of a step takes longer, where all others stay within a copy of the shards.
        optimizer_s: what comes once per step: its share of the optimizer, copies, and `launch_once_s`.
        state_bytes: what stays all step: (shards of) parameters, optimizer state, buffers; outer parameters under
            ZeRO 3.
        gathered_bytes: the full parameters in compute precision while gathered (0 if `state_bytes` holds them).
        gradient_bytes: its gradients, from its first backward on: whole while they accumulate, else as reduced.
        saved_bytes: activations one micro-batch keeps from forward to backward.
        working_bytes: the most that is alive during its forward or backward beyond saved activations, the gradients of
            its own weights as they are computed included (with recomputation: also everything recomputed for it).
        weight_backward_s: the part of `backward_s` and `launch_backward_s` for gradients of weights; a pass of its own
            where the schedule splits the backward pass.
        pending_bytes: gradients that one micro-batch keeps from the pass for inputs to the pass for weights.
        launch_once_s: the part of `optimizer_s` in which the device waits for the host.
        reduced_bytes: its gradients once they are reduced.
        reducing_bytes: the input of the reduction of its gradients.
        lead_s: by how much the host is faster than the device, forward and backward; see `action_s` of the table.
        late_gradient_bytes: where its gradients are reduced at the end of a pass, these as they are computed; else 0.
        is_kept: whether its parameters, once gathered for a forward pass, are still there for the backward pass.
        waiting_bytes: of the last of several calls of a block, its gradients as computed, which are there from its
            backward pass to that of the first call, of which this is less than 0; else 0.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    launch_forward_s: float
    launch_backward_s: float
    tp_forward_s: float
    tp_backward_s: float
    gather_s: float
    reduce_s: float
    optimizer_s: float
    state_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    saved_bytes: int
    working_bytes: int
    weight_backward_s: float = 0.0
    pending_bytes: int = 0
    launch_once_s: float = 0.0
    reduced_bytes: int = 0
    reducing_bytes: int = 0
    late_gradient_bytes: int = 0
    lead_s: float = 0.0
    is_kept: bool = False
    replicas_s: float = 0.0
    kept_bytes: int = 0
    waiting_bytes: int = 0

    @property
    def last_reduce_s(self) -> float:
        """The last reduction of its gradients in a step."""
        return self.reduce_s + self.replicas_s

    @property
    def gather_back_s(self) -> float:
        """One gathering of its parameters for a backward pass."""
        return 0.0 if self.is_kept else self.gather_s


@dataclass(frozen=True, slots=True)
class CostTable:
    """The price of every segment on one mesh.

    Attributes:
        kinds: the kind of each segment, in order (index into `costs`). On one stage, the calls of a block that has
            several have kinds of their own; see `cost.calls`.
        costs: per kind, its cost without recomputation and, where it has the choice, with it. The last segment has its
            loss in slices instead.
        cut_s: per boundary i between segment i and i+1, seconds to send one micro-batch over it (one direction);
            None where the pipeline cannot be cut. Length len(kinds) - 1.
        gathers_per_micro_batch: whether sharded parameters are gathered again in every micro-batch (ZeRO 3),
            in forward and, unless they are kept, in backward; otherwise once per step.
        reduces_per_micro_batch: whether gradients are reduced in every micro-batch; otherwise in the last one.
        overlap: what compute and communication take longer while both run; of a mesh with shards, beside gathering and
            scattering them, for the all-reduces of its replicas, too.
        per_step_s: fixed cost of a step on the critical path (tied weights, gradients of which tensor-parallel ranks
            have shares, the gradient norm, and `start_s`).
        start_s: the part of it in which the device waits for its host to begin.
        reserved_fixed_bytes: device context and communication buffers, outside of the allocator.
        reserved_ratio: reserved / allocated by rounding and fragmentation (>= 1).
        memory_limit_bytes: what a device offers.
        memory_margin: of what a plan allocates, the share that must be left beside what it needs, since it may
            allocate more than is computed, or its CUDA graph hold more; the same in all `rank_tables`.
        sources: per kind, one of SOURCES; empty when nothing was measured.
        rank_tables: one table per pipeline rank where these are on different devices; empty where all are alike. The
            `cut_s` and `sendrecv_s` of a rank are those to the next one. What concerns the mesh or the step (`kinds`,
            `per_step_s`, what is gathered and reduced when) is the same in all of them and in this one. Where the mesh
            has shares of the batch, one table per share, each with the mesh of that share.
        workspace_bytes: what libraries allocate once.
        message_bytes: like `cut_s`, what is sent over it per micro-batch; empty where nothing is.
        sendrecv_s: like `cut_s`, in a sendrecv: where as much is sent in the other direction at the same time; empty
            where that takes no longer.
        action_s: what a rank waits for its host in every action of the pipeline, beside its segments; 0 without one.
        batch_copy_s: copying the batch of one step to a device, beside the step before it; a step is never shorter.
        batch_bytes: of the batches that lie on a device while a step runs.
        drift: of the links that drift most, see `hardware.LinkTier`.
        graph_kinds: like `kinds`, as in the graph, where all calls of a block are of one kind; empty for `kinds`.
    """

    mesh: Mesh
    kinds: tuple[int, ...]
    costs: tuple[tuple[SegmentCost, ...], ...]
    cut_s: tuple[float | None, ...]
    gathers_per_micro_batch: bool
    reduces_per_micro_batch: bool
    overlap: Overlap
    per_step_s: float
    reserved_fixed_bytes: int
    reserved_ratio: float
    memory_limit_bytes: int
    sources: tuple[str, ...] = ()
    rank_tables: tuple[CostTable, ...] = ()
    workspace_bytes: int = 0
    message_bytes: tuple[int, ...] = ()
    sendrecv_s: tuple[float | None, ...] = ()
    action_s: float = 0.0
    start_s: float = 0.0
    batch_copy_s: float = 0.0
    batch_bytes: int = 0
    memory_margin: float = 0.0
    drift: float = 0.0
    graph_kinds: tuple[int, ...] = ()

    def at_rank(self, rank: int) -> CostTable:
        """The table of one pipeline rank."""
        return self.rank_tables[rank] if self.rank_tables else self

    @property
    def keeps_gathered(self) -> bool:
        """Whether gathered parameters stay for the whole step."""
        return not self.gathers_per_micro_batch

    @property
    def gathers_at_start(self) -> bool:
        """Whether ranks begin to gather all their parameters when the step begins, while they wait for their input.

        In pipelines, where parameters stay gathered. The first stage of the model does not wait: it gathers as it goes.
        """
        return self.mesh.pp > 1 and not self.gathers_per_micro_batch

    @property
    def constant_bytes(self) -> int:
        """What every rank has allocated all step, whatever its segments."""
        return self.workspace_bytes + self.batch_bytes

    @property
    def taken_ratio(self) -> float:
        """Bytes of the device that each allocated byte takes: with gaps of the allocator, and the margin."""
        return self.reserved_ratio + self.memory_margin

    @property
    def accumulates(self) -> bool:
        """Whether whole gradients are kept from one micro-batch to the next."""
        return not self.reduces_per_micro_batch and self.mesh.n_micro_batches > 1

    def cost_of(self, segment: int, *, recomputed: bool) -> SegmentCost:
        """The cost of segment number `segment` with or without recomputation."""
        return self.costs[self.kinds[segment]][1 if recomputed else 0]

    def has_choice(self, kind: int) -> bool:
        """Whether segments of this kind may be recomputed."""
        return len(self.costs[kind]) > 1


def forward_s(cost: SegmentCost) -> float:
    """Compute-stream time of one forward pass."""
    return cost.forward_s + cost.launch_forward_s + cost.tp_forward_s


def backward_s(cost: SegmentCost) -> float:
    """Compute-stream time of one backward pass, recomputation included."""
    return cost.recompute_s + cost.backward_s + cost.launch_backward_s + cost.tp_backward_s


def backward_part_s(cost: SegmentCost, kind: str, *, is_first: bool) -> float:
    """Compute-stream time of a whole backward pass ("B"), or of its half for inputs ("I") or for weights ("W").

    `is_first`: in the first stage, whose inputs need no gradient; there the half for weights is all of it.
    """
    weights_s = backward_s(cost) if is_first else cost.weight_backward_s
    return {"B": backward_s(cost), "I": backward_s(cost) - weights_s, "W": weights_s}[kind]
