"""The plan as the program needs it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

COMPUTE_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
}

V_SCHEDULES = ("zero_bubble_v",)
SPLIT_SCHEDULES = ("zero_bubble_v",)
AHEAD_SCHEDULES = ("interleaved", "zero_bubble_v")
MAX_SPLIT_ZERO_STAGE = 2
BATCH_NORMS = ("local", "synchronized")
MEMORY_FORMATS = ("contiguous", "channels_last")
GRAD_COMPRESSIONS = ("none", "bf16", "powersgd")


@dataclass(frozen=True, slots=True)
class Config:
    """Degrees of the mesh, and how a batch, the optimizer state and the activations are handled.

    Attributes:
        zero_stage: 0 replicates, 1 shards optimizer state, 2 also gradients, 3 also parameters.
        zero_shard_degree: over how many of the `dp` ranks that state is sharded; 1 exactly when `zero_stage` is 0.
        micro_batch_size: samples of one micro-batch on one data-parallel rank.
        shares: where data-parallel ranks take different shares of a batch, in order of rank: how many ranks, their
            micro_batch_size and n_micro_batches; the two fields are then those of the first. Empty where all are alike.
        share_recompute: `recompute` of each of `shares`, where they differ.
        schedule: "gpipe", "1f1b", "interleaved" or "zero_bubble_v"; without effect when `pp` is 1.
        n_chunks: pipeline stages per rank.
        precision: "bf16", "fp16", "tf32", "fp32" or "fp64". The 16-bit ones keep parameters and optimizer state in
            float32; tf32 is float32 whose products and convolutions round their operands to 10 bits, on GPUs that can.
        cuda_graph: forward and backward passes of a step are launched at once, on GPUs; see the module of that name.
        memory_format: of images, [sample, channel, height, width], "contiguous" or "channels_last".
        batch_norm: "local" normalizes by the statistics of a rank's own micro-batch, "synchronized" by those of all
            data-parallel ranks' micro-batches together.
        ignored_target: when given, the loss is one mean over the targets of the global batch that are not this one;
            otherwise it is the mean over micro-batches of their losses.
        chunked_head: the module whose product is computed together with the loss, in slices of `loss_slice_rows` rows;
            generated stages say so themselves.
        padded_head: the module whose product is computed with padded classes (see the module of that name); generated
            stages say so themselves.
        grad_compression: how gradients are made smaller for their reduction: "none", "bf16" or "powersgd"; see the
            module of that name. `powersgd_rank` is that of P and Q, `powersgd_start_step` the first step with them.
        recompute: names of modules whose activations are computed again in the backward pass.
        keep_attention: whether these keep what fused attention made; see `kept_attention`.
        blocks: names of the modules that are gathered and reduced one by one (generated stages name their own).
        head_group: the module behind the blocks that is gathered and reduced by itself, too; "" for none.
        writes_in_place: a block of the user's own writes into its inputs, or others into what it returned.
        writes_batch: forward or loss_fn writes into what they are given, so they are given copies.
        float32_buffers: names, with `*` for numbers, of buffers that stay in float32 in 16 bits; see `buffers`.
        computes_in_float32: forward casts to float32 by itself (norms, routers), which bounds how exact float64 can be.
        fails_in_float64: forward takes numbers that it cast to float32 together with weights, which then must be in it.
        device_bytes: device memory that torch's allocator is expected to take, per pipeline rank, or per share of the
            batch; empty if not known.
        is_module_level: forward branches on data, so each rank may use other parameters; see `unused`.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero_stage: int = 0
    zero_shard_degree: int = 1
    micro_batch_size: int = 1
    n_micro_batches: int = 1
    shares: tuple[tuple[int, int, int], ...] = ()
    share_recompute: tuple[tuple[str, ...], ...] = ()
    schedule: str = "1f1b"
    n_chunks: int = 1
    precision: str = "fp32"
    compile: bool = False
    cuda_graph: bool = False
    memory_format: str = "contiguous"
    batch_norm: str = "local"
    ignored_target: int | None = None
    chunked_head: str = ""
    loss_slice_rows: int = 0
    padded_head: str = ""
    grad_compression: str = "none"
    powersgd_rank: int = 0
    powersgd_start_step: int = 0
    recompute: tuple[str, ...] = ()
    keep_attention: bool = False
    blocks: tuple[str, ...] = ()
    head_group: str = ""
    writes_in_place: bool = False
    writes_batch: bool = False
    float32_buffers: tuple[str, ...] = ()
    computes_in_float32: bool = False
    fails_in_float64: bool = False
    is_module_level: bool = False
    device_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.precision not in COMPUTE_DTYPES:
            raise ValueError(f"precision: found {self.precision!r}, expected one of {', '.join(COMPUTE_DTYPES)}")
        if self.memory_format not in MEMORY_FORMATS:
            expected = ", ".join(MEMORY_FORMATS)
            raise ValueError(f"memory_format: found {self.memory_format!r}, expected one of {expected}")
        if self.batch_norm not in BATCH_NORMS:
            raise ValueError(f"batch_norm: found {self.batch_norm!r}, expected one of {', '.join(BATCH_NORMS)}")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_stage: found {self.zero_stage}, expected 0, 1, 2 or 3")
        if self.dp % self.zero_shard_degree:
            raise ValueError(f"zero_shard_degree: found {self.zero_shard_degree}, expected a divisor of dp = {self.dp}")
        if self.zero_stage == 0 and self.zero_shard_degree != 1:
            raise ValueError(f"zero_shard_degree: found {self.zero_shard_degree}, expected 1 because zero_stage is 0")
        if self.n_chunks > 1 and self.schedule not in AHEAD_SCHEDULES:
            raise ValueError(f"n_chunks: found {self.n_chunks}, expected 1 with schedule {self.schedule!r}")
        if self.splits_backward and self.zero_stage > MAX_SPLIT_ZERO_STAGE:
            raise ValueError(f"zero_stage: found {self.zero_stage}, expected 0, 1 or 2 with schedule {self.schedule!r}")
        if self.splits_backward and (self.recompute or self.compile):
            found = f"recompute: found {self.recompute}" if self.recompute else "compile: found True"
            raise ValueError(f"{found}, expected none with schedule {self.schedule!r}, whose backward pass is split")

        if self.cuda_graph and (
            self.splits_backward or self.is_module_level or self.shares or self.grad_compression != "none"
        ):
            raise ValueError(
                "cuda_graph: found True, expected False with a split backward pass, a forward that branches on data,"
                " shares, or compressed gradients"
            )
        if self.keep_attention and not (self.recompute or any(self.share_recompute)):
            raise ValueError("keep_attention: found True, expected False because nothing is recomputed")
        self._check_compression()
        if self.shares:
            self._check_shares()

    def _check_shares(self) -> None:
        if sum(n_ranks for n_ranks, _, _ in self.shares) != self.dp:
            raise ValueError(f"shares: found {self.shares}, expected ranks that are together dp = {self.dp}")
        if self.share_recompute and len(self.share_recompute) != len(self.shares):
            raise ValueError(f"share_recompute: found {self.share_recompute}, expected one of each of {self.shares}")
        if any(n_ranks % self.zero_shard_degree for n_ranks, _, _ in self.shares):
            raise ValueError(
                f"zero_shard_degree: found {self.zero_shard_degree}, expected a divisor of the ranks of each share"
            )
        # What ranks do together in every micro-batch would wait for those that have fewer.
        if self.pp > 1 or self.batch_norm != "local":
            raise ValueError(f"shares: found {self.shares}, expected none with pp above 1 or synchronized BatchNorm")

    def _check_compression(self) -> None:
        name = self.grad_compression
        if name not in GRAD_COMPRESSIONS:
            raise ValueError(f"grad_compression: found {name!r}, expected one of {', '.join(GRAD_COMPRESSIONS)}")
        if name != "none" and self.zero_shard_degree not in (1, self.dp):
            raise ValueError(f"zero_shard_degree: found {self.zero_shard_degree}, expected {self.dp} with {name}")
        if name == "powersgd":
            if self.zero_stage != 0:
                raise ValueError(f"zero_stage: found {self.zero_stage}, expected 0 with grad_compression powersgd")
            if self.precision == "fp16":
                raise ValueError("precision: found fp16, expected another with grad_compression powersgd")
            if self.powersgd_rank < 1:
                raise ValueError(f"powersgd_rank: found {self.powersgd_rank}, expected 1 or more")
            if self.powersgd_start_step < 2:
                raise ValueError(f"powersgd_start_step: found {self.powersgd_start_step}, expected 2 or more")

    def runs_as_graph(self, device: torch.device) -> bool:
        """Whether passes are to be a CUDA graph here; not in fp16, whose loss scale changes and is no tensor."""
        return self.cuda_graph and device.type == "cuda" and self.precision != "fp16"

    @property
    def n_ranks(self) -> int:
        """Processes the program needs."""
        return self.pp * self.dp * self.tp

    @property
    def n_stages(self) -> int:
        """Pipeline stages; `rank_of_stage` says where each lives."""
        return self.pp * self.n_chunks

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed in passes of their own."""
        return self.pp > 1 and self.schedule in SPLIT_SCHEDULES

    @property
    def receives_ahead(self) -> bool:
        """Whether a rank calls a receive when the other rank has come to the send, and computes while it waits."""
        return self.pp > 1 and self.schedule in AHEAD_SCHEDULES

    def rank_of_stage(self, stage: int) -> int:
        """The pipeline rank of a stage: around the ranks again and again, or down and up again."""
        turn, place = divmod(stage, self.pp)
        return self.pp - 1 - place if self.schedule in V_SCHEDULES and turn % 2 else place

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, ascending."""
        return tuple(stage for stage in range(self.n_stages) if self.rank_of_stage(stage) == pp_rank)

    def neighbours(self) -> tuple[tuple[int, int], ...]:
        """(from, to) of all pairs of pipeline ranks between which a step sends, in the order of the stages."""
        ranks = [self.rank_of_stage(stage) for stage in range(self.n_stages)]
        pairs = [(one, other) for one, other in pairwise(ranks) if one != other]
        return tuple(dict.fromkeys(way for one, other in pairs for way in ((one, other), (other, one))))

    def share_of(self, dp_rank: int) -> int:
        """Which of `shares` a data-parallel rank has; 0 where all are alike."""
        ends = accumulate(n_ranks for n_ranks, _, _ in self.shares)
        return next((index for index, end in enumerate(ends) if dp_rank < end), 0)

    def micro_batches_of(self, dp_rank: int) -> tuple[int, int]:
        """Size and number of the micro-batches of a data-parallel rank."""
        if not self.shares:
            return self.micro_batch_size, self.n_micro_batches
        _, size, n_micro_batches = self.shares[self.share_of(dp_rank)]
        return size, n_micro_batches

    def recompute_of(self, dp_rank: int) -> tuple[str, ...]:
        """Names of the modules that a data-parallel rank recomputes."""
        return self.share_recompute[self.share_of(dp_rank)] if self.share_recompute else self.recompute

    def samples_of(self, dp_rank: int) -> slice:
        """Which samples of a global batch a data-parallel rank takes."""
        n_samples = [size * count for size, count in map(self.micro_batches_of, range(dp_rank + 1))]
        return slice(sum(n_samples[:-1]), sum(n_samples))

    def mean_divisor(self, dp_rank: int) -> float:
        """By what a rank divides the losses of its micro-batches, so that the mean over ranks is that over all samples.

        It is `n_micro_batches` where all ranks are alike.
        """
        size, _ = self.micro_batches_of(dp_rank)
        return self.global_batch_size / (self.dp * size)

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step."""
        if not self.shares:
            return self.dp * self.micro_batch_size * self.n_micro_batches
        return sum(n_ranks * size * n_micro_batches for n_ranks, size, n_micro_batches in self.shares)

    @property
    def parameter_dtype(self) -> torch.dtype:
        """In which parameters and optimizer state are kept, and gradients are reduced."""
        return torch.float64 if self.precision == "fp64" else torch.float32

    @property
    def compute_dtype(self) -> torch.dtype:
        """In which the forward and backward passes run."""
        return COMPUTE_DTYPES[self.precision]
