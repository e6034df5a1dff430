"""Options: everything a user may ask for, with its default; filled alike by the command line and the library."""

from __future__ import annotations

from dataclasses import dataclass

PRECISIONS = ("bf16", "fp16", "tf32", "fp32", "fp64")
DEFAULT_PRECISION = "bf16"
TORCH_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}  # torch's names
DEFAULT_MICRO_BATCH_SIZE = 8  # per device, when no global batch is given
MAX_HOSTS = 10**6
MAX_GLOBAL_BATCH = 10**9  # samples of a step; the largest that anybody trains with are some 10 million
OBJECTIVES = ("time", "cost")
BATCH_NORMS = ("local", "synchronized")  # the first is the default, here and below
LOSS_AVERAGES = ("micro_batch", "global_batch")
LOSSES = ("whole", "chunked")
MEMORY_FORMATS = ("contiguous", "channels_last")
GRAD_COMPRESSIONS = ("none", "bf16", "powersgd")
PLAIN_SCHEDULE = "plain"  # 1f1b, and gpipe where there are fewer micro-batches than 1f1b needs: one stage per rank
DEFAULT_POWERSGD_RANK = 4  # the larger one of "PowerSGD: Practical Low-Rank Gradient Compression", NeurIPS 2019
POWERSGD_START_STEP = 100  # until then gradients are summed whole, as the first steps change most; see PLAN in train.py
# Long enough for the best plan of Llama-70B on 64 devices (it is there after 2 to 5 s); the proof that the rest of so
# large a space is slower takes minutes.
DEFAULT_TIME_LIMIT_S = 15.0
AS_COMPUTED = 0.5  # the confidence that memory suffices of a plan that fits as computed, with nothing to spare
MAX_TIME_LIMIT_S = 1e7  # four months; solvers count in integers


@dataclass(frozen=True, slots=True)
class Options:
    """What to plan for.

    Attributes:
        global_batch: samples of one optimizer step; None takes DEFAULT_MICRO_BATCH_SIZE per device.
        fix: (name, value) pairs that the plan must have: dp, tp, pp, zero, shard, micro_batch, schedule,
            stages_per_rank, recompute, keep_attention, loss, compile, memory_format, cuda_graph, generated, batch_norm,
            loss_average, grad_compression, powersgd_rank.
            Gradients are compressed only where that is fixed, since it changes what is trained.
        time_limit_s: stop searching after this long and return the best plan so far with its gap; None takes as long
            as the proof does.
        max_micro_batch_size: largest micro-batch considered; None considers all that divide a rank's part of the batch.
        memory_confidence: with what chance memory must suffice for a plan to count as fitting, by how far peaks of
            earlier runs were off; from `AS_COMPUTED` to below 1. Where nothing fits so, plans that fit as computed do.
        top: how many alternatives the result keeps.
        rules: files with op rules of one's own, in addition to those of `cost_models/`.
        profile: file of measurements of `autoplan profile`; None prices by the hardware profile alone.
        module_level: run the model instead of tracing it, and plan whole modules; for forwards that branch on data.
    """

    global_batch: int | None = None
    precision: str = DEFAULT_PRECISION
    objective: str = "time"
    fix: tuple[tuple[str, str], ...] = ()
    time_limit_s: float | None = DEFAULT_TIME_LIMIT_S
    require_optimal: bool = False
    max_micro_batch_size: int | None = None
    memory_confidence: float = 0.95
    top: int = 5
    strict: bool = False
    rules: tuple[str, ...] = ()
    profile: str | None = None
    module_level: bool = False
