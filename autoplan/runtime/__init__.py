"""What an emitted program runs on: torch, the standard library, and nothing else.

It is copied as it stands into the folder of a program.

    config, mesh           the plan, the process groups
    weights, construction  parameters under the user's names, each rank's part of them
    collectives            tensor-parallel conversions with their gradients
    experts, random        what else generated code calls
    recompute, zero, pipeline, gradients, batch_norm, loss_average, unused
    parallel               ParallelModel: all of it in order, and one optimizer step
    checkpoint*, resume    saved runs, loaded under any plan; stopping and going on
    finite, hang_watch     numbers that are not finite, ranks that do not come
    data, train, parity    batches, the loop's plumbing, the comparison with one process
    step_profile           where the time of one measured step goes
"""

from .checkpoint import Checkpoints, load_checkpoint
from .checkpoint_planner import CheckpointError
from .config import Config
from .data import dataset_batches, global_batch, local_batch, synthetic_batches
from .hang_watch import watch_for_hangs
from .mesh import (
    RankMesh,
    WorldSizeError,
    build_rank_mesh,
    check_world_size,
    from_first_rank,
    join_process_group,
    start_process_group,
    stop_process_group,
    world_size,
)
from .parallel import ParallelModel
from .parity import TOLERANCES, Differences, PlainTraining, compare
from .pipeline import Boundary, PerSample
from .resume import Run, add_checkpoint_options
from .step_profile import StepProfile
from .train import StepRecord, check_steps, exit_code, profile_step, timed_step, train_steps, write_records
from .weights import Buffer, Shard, Weights, attach, load_weights, take_shard

__all__ = [
    "TOLERANCES",
    "Boundary",
    "Buffer",
    "CheckpointError",
    "Checkpoints",
    "Config",
    "Differences",
    "ParallelModel",
    "PerSample",
    "PlainTraining",
    "RankMesh",
    "Run",
    "Shard",
    "StepProfile",
    "StepRecord",
    "Weights",
    "WorldSizeError",
    "add_checkpoint_options",
    "attach",
    "build_rank_mesh",
    "check_steps",
    "check_world_size",
    "compare",
    "dataset_batches",
    "exit_code",
    "from_first_rank",
    "global_batch",
    "join_process_group",
    "load_checkpoint",
    "load_weights",
    "local_batch",
    "profile_step",
    "start_process_group",
    "stop_process_group",
    "synthetic_batches",
    "take_shard",
    "timed_step",
    "train_steps",
    "watch_for_hangs",
    "world_size",
    "write_records",
]
