"""Options: everything a user may ask for, with its default; filled alike by the command line and the library."""

from __future__ import annotations

from dataclasses import dataclass

PRECISIONS = ("bf16", "fp16", "fp32", "fp64")
OBJECTIVES = ("time", "cost")


@dataclass(frozen=True, slots=True)
class Options:
    """What to plan for.

    Attributes:
        global_batch: samples of one optimizer step; None takes one micro-batch of 8 per device.
        fix: (name, value) pairs that the plan must have: dp, tp, pp, zero, shard, micro_batch, schedule, recompute,
            compile.
        time_limit_s: stop searching after this long and return the best plan so far with its gap.
        max_micro_batch_size: largest micro-batch considered.
        top: how many alternatives the result keeps.
    """

    global_batch: int | None = None
    precision: str = "bf16"
    objective: str = "time"
    fix: tuple[tuple[str, str], ...] = ()
    time_limit_s: float | None = None
    require_optimal: bool = False
    max_micro_batch_size: int = 64
    top: int = 5
    strict: bool = False
