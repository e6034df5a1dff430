"""What an emitted program runs on: torch, the standard library, and nothing else.

It is copied as it stands into the folder of a program.

    config, mesh           the plan, who does what of it, the process groups between ranks
    process_group, endings    joining and leaving, and what has to be done before
    alone                  one rank without the others, to see what it holds
    planned_devices        whether processes and devices are as planned
    seeds                  where every random number of a run begins
    float32_products       whether GPUs round the operands of float32 products
    parallel               ParallelModel: stages, optimizer, pipeline, and one optimizer step
    train, resume          the loop; a run that stops and goes on
    metrics                what is measured and written of a step
    parity, dropout        the comparison with one process, in which nothing is dropped at random
    step_trace, step_profile     traces of some steps, where the time of one goes
    hang_watch, failure_watch, job_store    ranks that do not come, or end with an error, and where they say so
    refusal                ends a program with a message, which one process of a host says
    command_line, number_options, written_paths    what the command line gives, and what is wrong with it
    building/              the model with each rank's part of the weights
    tensor_parallel/       what generated code calls
    stages/                what the plan changes in a stage, and how its passes are run
    update/                from gradients to new weights
    input_pipeline/        batches, and the user's model on them
    checkpoints/           saved runs
"""

from .building.weights import Buffer, Shard, Weights, attach, load_weights, take_shard
from .checkpoints.checkpoint import Checkpoints, load_checkpoint
from .checkpoints.planner import CheckpointError
from .command_line import ProgramParser, check_options
from .config import Config
from .hang_watch import watch_for_hangs
from .input_pipeline.batches import global_batch, local_batch
from .input_pipeline.loading import TrainingData, evaluation_data, training_data
from .mesh import RankMesh, build_rank_mesh
from .metrics import EvaluationRecord, MetricLog, PlannedFigures, StepRecord
from .number_options import not_negative, positive, whole_number
from .parallel import ParallelModel
from .parity import TOLERANCES, Differences, PlainTraining, compare
from .planned_devices import WorldSizeError, check_world_size, world_size
from .process_group import (
    default_device_type,
    from_first_rank,
    join_process_group,
    start_process_group,
    stop_process_group,
)
from .refusal import said_once
from .resume import TrainingRun, add_checkpoint_options
from .stages.pipeline import Boundary, PerSample
from .step_profile import StepProfile
from .step_trace import StepTrace, parse_steps
from .train import Evaluation, check_steps, exit_code, timed_step, train_steps, write_records
from .update.learning_rate import LearningRate, check_rate
from .written_paths import named_path, written_file, written_folder

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
    "Shard",
    "StepProfile",
    "StepRecord",
    "StepTrace",
    "TrainingData",
    "TrainingRun",
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
    "named_path",
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
