"""What an emitted program runs on: torch, the standard library, and nothing else.

It is copied as it stands into the folder of a program.

    config, mesh           the plan, who does what of it, the process groups between ranks
    process_group, planned_devices    joining and leaving; whether processes and devices are as planned
    known_values           numbers that a model reads while it is built without memory
    weights, construction, named_parameters    parameters under the user's names, each rank's part of them
    buffers                the dtype of buffers where a program computes in 16 bits
    float32_products       whether GPUs round the operands of float32 products
    collectives            tensor-parallel conversions with their gradients
    attention, experts, vocabulary, random     what else generated code calls
    seeds                  where every random number of a run begins
    model_calls            the user's model and loss, whatever their inputs look like
    compiled, chunked_loss, padded_head, memory_format, recompute, kept_attention, scalar_parameters, zero,
    packing, grad_compression, pipeline, stage_shell, gradients, batch_norm, loss_average, unused, in_place
    stage_order            all of it, applied to a stage in order
    cuda_graph             forward and backward passes of a step, launched at once
    replicas               parameters that several ranks hold whole, kept equal
    held_values            what modules hold, and whether it has changed since passes were captured
    parallel               ParallelModel: stages, optimizer, pipeline, and one optimizer step
    checkpoint, folder_lock, host_copies, resume    saved runs, loaded under any plan; stopping and going on
    checkpoint_state, checkpoint_pieces    what of a run is saved, and which part of each tensor a rank has
    checkpoint_folder, checkpoint_planner, checkpoint_weights    how it lies in files, written whole or not at all
    finite, hang_watch, same_batch    numbers that are not finite, ranks that do not come, or have other samples
    optimizer, learning_rate, loss_scale    what changes the weights, and what else changes from step to step
    batches, reading, loading, train    batches, their order and position, the loop
    samples, rehearsal           what is wrong with those of a dataset; the first batch, tried before a step
    metrics                      what is measured and written of a step
    parity, dropout              the comparison with one process, in which nothing is dropped at random
    step_trace, step_profile     traces of some steps, where the time of one goes
    command_line, number_options, written_paths    options, and what numbers and paths they take
    refusal                      ends a program with a message, where what it was given cannot work
"""

from .batches import global_batch, local_batch
from .checkpoint import Checkpoints, load_checkpoint
from .checkpoint_planner import CheckpointError
from .command_line import ProgramParser, check_options
from .config import Config
from .hang_watch import watch_for_hangs
from .learning_rate import LearningRate, check_rate
from .loading import TrainingData, evaluation_data, training_data
from .mesh import RankMesh, build_rank_mesh
from .metrics import EvaluationRecord, MetricLog, PlannedFigures, StepRecord
from .number_options import not_negative, positive, whole_number
from .parallel import ParallelModel
from .parity import TOLERANCES, Differences, PlainTraining, compare
from .pipeline import Boundary, PerSample
from .planned_devices import WorldSizeError, check_world_size, world_size
from .process_group import (
    default_device_type,
    from_first_rank,
    join_process_group,
    start_process_group,
    stop_process_group,
)
from .refusal import said_once
from .resume import Run, add_checkpoint_options
from .step_profile import StepProfile
from .step_trace import StepTrace, parse_steps
from .train import Evaluation, check_steps, exit_code, timed_step, train_steps, write_records
from .weights import Buffer, Shard, Weights, attach, load_weights, take_shard
from .written_paths import written_file, written_folder

__all__ = [
    "TOLERANCES",
    "Boundary",
    "Buffer",
    "CheckpointError",
    "Checkpoints",
    "Config",
    "Differences",
    "Evaluation",
    "EvaluationRecord",
    "LearningRate",
    "MetricLog",
    "ParallelModel",
    "PerSample",
    "PlainTraining",
    "ProgramParser",
    "RankMesh",
    "Run",
    "Shard",
    "StepProfile",
    "StepRecord",
    "StepTrace",
    "TrainingData",
    "Weights",
    "PlannedFigures",
    "WorldSizeError",
    "add_checkpoint_options",
    "attach",
    "build_rank_mesh",
    "check_options",
    "check_rate",
    "check_steps",
    "check_world_size",
    "default_device_type",
    "compare",
    "evaluation_data",
    "exit_code",
    "from_first_rank",
    "global_batch",
    "join_process_group",
    "load_checkpoint",
    "load_weights",
    "local_batch",
    "not_negative",
    "parse_steps",
    "positive",
    "said_once",
    "start_process_group",
    "stop_process_group",
    "take_shard",
    "timed_step",
    "train_steps",
    "training_data",
    "watch_for_hangs",
    "whole_number",
    "world_size",
    "write_records",
    "written_file",
    "written_folder",
]
