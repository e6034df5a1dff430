"""Options: everything a user may ask for, with its default; filled alike by the command line and the library."""

from __future__ import annotations

from dataclasses import dataclass

PRECISIONS = ("bf16", "fp16", "fp32", "fp64")
DEFAULT_MICRO_BATCH_SIZE = 8  # per device, when no global batch is given
OBJECTIVES = ("time", "cost")
# Long enough for the best plan of Llama-70B on 64 devices (it is there after 2 to 5 s); the proof that the rest of so
# large a space is slower takes minutes.
DEFAULT_TIME_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Options:
    """What to plan for.

    Attributes:
        global_batch: samples of one optimizer step; None takes DEFAULT_MICRO_BATCH_SIZE per device.
        fix: (name, value) pairs that the plan must have: dp, tp, pp, zero, shard, micro_batch, schedule, recompute,
            compile.
        time_limit_s: stop searching after this long and return the best plan so far with its gap; None takes as long
            as the proof does.
        max_micro_batch_size: largest micro-batch considered.
        top: how many alternatives the result keeps.
    """

    global_batch: int | None = None
    precision: str = "bf16"
    objective: str = "time"
    fix: tuple[tuple[str, str], ...] = ()
    time_limit_s: float | None = DEFAULT_TIME_LIMIT_S
    require_optimal: bool = False
    max_micro_batch_size: int = 64
    top: int = 5
    strict: bool = False
