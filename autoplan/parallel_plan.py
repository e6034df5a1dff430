"""Mesh, Plan and Estimate: the decision, and what it is predicted to cost.

The JSON form of each is a contract that outside scripts read: a unit in every name, `schema_version` first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import accumulate

SCHEMA_VERSION = 1
ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True, order=True)
class Execution:
    """How the modules of a program run, which changes no number.

    Attributes:
        compile, memory_format: as in `Mesh`.
    """

    compile: bool = False
    memory_format: str = "contiguous"


@dataclass(frozen=True, slots=True, order=True)
class BatchShare:
    """What each of `dp` neighbouring data-parallel ranks takes of a batch: `n_micro_batches` of `micro_batch_size`."""

    dp: int
    micro_batch_size: int
    n_micro_batches: int

    @property
    def n_samples(self) -> int:
        """Samples of all of these ranks in a step."""
        return self.dp * self.micro_batch_size * self.n_micro_batches


@dataclass(frozen=True, slots=True, order=True)
class Mesh:
    """A plan but for its stages and what they recompute: the degrees, how a batch is cut, and how passes run.

    rank = (pp_index * dp + dp_index) * tp + tp_index.

    Attributes:
        zero_stage: 0 replicates, 1 shards optimizer state, 2 also gradients, 3 also parameters.
        zero_shard_degree: over how many of the `dp` ranks that state is sharded; 1 exactly when `zero_stage` is 0.
            A smaller degree than `dp` replicates the shards (hybrid sharding).
        micro_batch_size: samples of one micro-batch on one data-parallel rank.
        n_chunks: pipeline stages per rank; 1 under "gpipe" and "1f1b", 2 under "zero_bubble_v".
        sharding: which tensor-parallel assignment (a key of `Shardings`); "" when `tp` is 1.
        compile: whether torch.compile makes one function of each block, and of the loss.
        memory_format: in which order images lie in memory, "contiguous" or "channels_last".
        generated: whether the program is generated from the graph although the user's own classes would do, because
            it is faster, or can be a CUDA graph; false with tensor or pipeline parallelism, which have no other way.
        wraps_head: whether the head is a group of `fully_shard` by itself (`analysis.head_group`), gathered and reduced
            beside the blocks; false where the program is generated, whose head is no module.
        keeps_attention: whether blocks that are recomputed keep what fused attention made: its result and log-sum-exp.
            Never of a plan that recomputes no attention.
        cuda_graph: whether the host launches all forward and backward passes of a step at once, as a CUDA graph.
        shares: where data parallelism spans groups of a mixed cluster, what the ranks of each take of the batch, in
            order of rank; no shard group spans two of them. The two fields on micro-batches are then the first one's.
            Empty where all ranks take the same.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    zero_stage: int = 0
    zero_shard_degree: int = 1
    micro_batch_size: int = 1
    n_micro_batches: int = 1
    schedule: str = "1f1b"
    n_chunks: int = 1
    sharding: str = ""
    compile: bool = False
    memory_format: str = "contiguous"
    generated: bool = False
    wraps_head: bool = False
    keeps_attention: bool = False
    cuda_graph: bool = False
    shares: tuple[BatchShare, ...] = ()

    @property
    def execution(self) -> Execution:
        """How its modules run."""
        return Execution(self.compile, self.memory_format)

    def run_as(self, way: Execution) -> Mesh:
        """The same mesh with modules that run so."""
        return replace(self, compile=way.compile, memory_format=way.memory_format)

    @property
    def n_devices(self) -> int:
        """Devices the mesh occupies."""
        return self.pp * self.dp * self.tp

    @property
    def n_stages(self) -> int:
        """Pipeline stages; on which rank each lives, `OrderedSchedule.ranks` says."""
        return self.pp * self.n_chunks

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step."""
        return sum(share.n_samples for share in self.all_shares)

    @property
    def all_shares(self) -> tuple[BatchShare, ...]:
        """The shares of the batch; one where all ranks take the same."""
        return self.shares or (BatchShare(self.dp, self.micro_batch_size, self.n_micro_batches),)

    @property
    def pipeline_rank_bounds(self) -> tuple[int, ...]:
        """Where the ranks of each pipeline rank, or share of the batch, begin; at last, how many there are."""
        return (0, *accumulate(share.dp * self.tp for share in self.all_shares * self.pp))

    def of_share(self, index: int) -> Mesh:
        """The mesh with the data-parallel ranks of one share alone."""
        own = self.all_shares[index]
        return replace(
            self,
            dp=own.dp,
            micro_batch_size=own.micro_batch_size,
            n_micro_batches=own.n_micro_batches,
            shares=(),
        )

    @property
    def needs_generated_model(self) -> bool:
        """Whether the program is generated from the graph, not made of the user's own classes."""
        return self.tp > 1 or self.pp > 1 or self.generated


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Segments `start` to `stop` (exclusive) of the graph form one pipeline stage.

    `recomputed` names the segments whose activations are dropped and computed again (indices into the graph).
    """

    start: int
    stop: int
    recomputed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SegmentSharding:
    """The tensor-parallel assignment of one kind of segment, in the text form of `layout` types.

    Attributes:
        kind: the segment kind.
        values: (value name, type) for every input, parameter and op result of the first segment of this kind,
            the type in which the value is produced.
        uses: (op name, operand number, type) wherever an op reads a value in another type than it is produced in;
            ("", value name, type) where a value leaves the segment in another one.
    """

    kind: int
    values: tuple[tuple[str, str], ...]
    uses: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class GroupRanks:
    """`n_ranks` neighbouring pipeline ranks on the hosts of one group of a mixed cluster.

    Where the mesh has shares of the batch, those of one share: all pipeline ranks of its data-parallel ranks. `group`
    is an index into the groups of the cluster, `hardware` the name of its hardware profile.
    """

    group: int
    n_ranks: int
    hardware: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """One complete decision: enough, with the graph, to generate the program.

    Attributes:
        precision: "bf16", "fp16", "tf32" (float32 whose products round their operands), "fp32" or "fp64"; parameters
            and their gradients are computed in it, optimizer state and reductions stay in fp32 (fp64 under fp64).
        shardings: one entry per segment kind; empty when `tp` is 1.
        recompute: "none", "selective", or "full" when every block is recomputed; the stages say which.
        loss: "whole", or "chunked": the head and its loss in slices of the rows; see `analysis.chunked_loss`.
        batch_norm: "local" or "synchronized" over the data-parallel ranks.
        loss_average: over which targets a loss that leaves some out is averaged: those of each "micro_batch", and then
            over micro-batches, or all those of the "global_batch".
        grad_compression: how gradients are made smaller to be reduced over data-parallel ranks: "none", "bf16", or
            "powersgd" with matrices of rank `powersgd_rank`; see `cost.grad_compression`.
        stages: where the mesh has shares of the batch, one per share instead: the whole model, with what its ranks
            recompute; whether the last segment is among that is the same in all.
        groups: where the pipeline ranks are on a mixed cluster, in their order, or the shares of the batch in theirs;
            empty with one kind of host.
    """

    mesh: Mesh
    stages: tuple[StagePlan, ...]
    precision: str = "bf16"
    shardings: tuple[SegmentSharding, ...] = ()
    graph_hash: str = ""
    hardware: str = ""
    n_hosts: int = 1
    recompute: str = "none"
    loss: str = "whole"
    batch_norm: str = "local"
    loss_average: str = "micro_batch"
    grad_compression: str = "none"
    powersgd_rank: int | None = None
    groups: tuple[GroupRanks, ...] = ()

    @property
    def program_stages(self) -> tuple[StagePlan, ...]:
        """The stages that the program is cut into; shares of the batch have the same one."""
        return self.stages[:1] if self.mesh.shares else self.stages

    @property
    def n_devices_of_groups(self) -> tuple[int, ...]:
        """Devices that the plan uses of each of `groups`."""
        mesh = self.mesh
        degrees = (share.dp for share in mesh.shares) if mesh.shares else (mesh.dp for _ in self.groups)
        return tuple(own.n_ranks * dp * mesh.tp for own, dp in zip(self.groups, degrees, strict=True))


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the step time of the slowest rank goes; the terms sum to the step time.

    `exposed_batch_copy_s` is by how much copying the next batch to the device outlasts all else.
    """

    compute_s: float
    recompute_s: float
    exposed_tp_s: float
    exposed_dp_s: float
    exposed_pp_s: float
    bubble_s: float
    optimizer_s: float
    launch_s: float
    exposed_batch_copy_s: float = 0.0

    @property
    def exposed_communication_s(self) -> float:
        """What is waited for links."""
        return self.exposed_tp_s + self.exposed_dp_s + self.exposed_pp_s

    @property
    def total_s(self) -> float:
        """The step time."""
        return sum(getattr(self, name) for name in self.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One box of the predicted step: `stage` does `name` (such as "2F0") from `start_s` to `stop_s` on `stream`."""

    rank: int
    stage: int
    stream: str
    name: str
    start_s: float
    stop_s: float


# The part of `memory_parts_bytes` for the device context and communication buffers.
OUTSIDE_ALLOCATOR = "context_and_communicators"


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the simulator says of a plan: the only judge of its time and memory.

    Where the mesh has shares of the batch, a rank means one of each share.

    Attributes:
        step_s: seconds of one optimizer step.
        breakdown: of `slowest_rank`, a pipeline rank; None in plans written before it was told which.
        allocated_bytes: per pipeline rank, the most bytes the training itself has allocated at once.
        needed_bytes: per pipeline rank, `allocator_bytes` and what lies outside of the allocator: the device context
            and communication buffers. This is what must not exceed `memory_limit_bytes`, and what JSON, rows and
            remedies call `peak_bytes`: of each rank (`peak_bytes_per_stage`), or of the one they name.
        memory_parts_bytes: per pipeline rank, (part, bytes) that sum to `needed_bytes`.
        memory_limit_bytes: what a device offers; of several kinds, the one with the least.
        rank_limits_bytes: per pipeline rank, what its devices offer, where they differ; empty where all are alike.
        memory_margin: of `allocated_bytes`, the share that must be left beside `needed_bytes` for the plan to fit.
        segment_sources: per segment, whether its times are "measured", "scaled" or "calibrated"; empty without a
            measured profile.
        drift: share by which the step may be longer or shorter since its links are not equally fast at all times: one
            standard deviation.
    """

    step_s: float
    breakdown: Breakdown
    allocated_bytes: tuple[int, ...]
    needed_bytes: tuple[int, ...]
    memory_parts_bytes: tuple[tuple[tuple[str, int], ...], ...]
    memory_limit_bytes: int
    segment_sources: tuple[str, ...] = ()
    rank_limits_bytes: tuple[int, ...] = ()
    slowest_rank: int | None = None
    memory_margin: float = 0.0
    drift: float = 0.0
    timeline: tuple[TimelineEvent, ...] = field(default=(), compare=False)

    @property
    def allocator_bytes(self) -> tuple[int, ...]:
        """Per pipeline rank, what torch's allocator needs: `allocated_bytes` and what gaps lose; it may keep more."""
        pairs = zip(self.needed_bytes, self.memory_parts_bytes, strict=True)
        return tuple(needed - dict(parts).get(OUTSIDE_ALLOCATOR, 0) for needed, parts in pairs)

    def limit_bytes(self, rank: int) -> int:
        """What the devices of a pipeline rank offer."""
        return self.rank_limits_bytes[rank] if self.rank_limits_bytes else self.memory_limit_bytes

    @property
    def has_several_ranks(self) -> bool:
        """Whether times and memory may differ from one rank to another."""
        return len(self.needed_bytes) > 1

    @property
    def tightest_rank(self) -> int:
        """The pipeline rank that has the least memory left, or lacks the most."""
        return max(range(len(self.needed_bytes)), key=lambda rank: self.needed_bytes[rank] - self.limit_bytes(rank))

    def short_bytes(self, rank: int) -> int:
        """What a pipeline rank lacks to fit, its margin included; 0 or less where it fits."""
        margin_bytes = math.ceil(self.memory_margin * self.allocated_bytes[rank])
        return self.needed_bytes[rank] + margin_bytes - self.limit_bytes(rank)

    @property
    def fits(self) -> bool:
        """Whether every rank stays within its memory limit, its margin included."""
        return all(self.short_bytes(rank) <= 0 for rank in range(len(self.needed_bytes)))

    @property
    def fits_as_computed(self) -> bool:
        """Whether every rank stays within its memory limit, with nothing to spare."""
        return self.needed_bytes[self.tightest_rank] <= self.limit_bytes(self.tightest_rank)
