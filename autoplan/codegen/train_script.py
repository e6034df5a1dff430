"""Text of the emitted `train.py`: the plan as a config block, and a training loop a reader can change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoplan.codegen.text import import_lines, quoted

_TEMPLATE = '''\
"""{header}

A run that can be stopped: --checkpoint-dir DIR saves every --checkpoint-every steps, and in the end, beside the
training; the same command goes on from the newest complete checkpoint, as one under another plan or on another number
of devices does. --steps counts all steps of the run. SIGTERM finishes the step, saves, and exits with 143;
Ctrl-C finishes the step, saves if there is a folder, and exits with 130; a second Ctrl-C ends at once.
Weights under the model's own names: --init-from FILE, --export FILE.safetensors, and for a checkpoint
`python -m runtime export DIR FILE.safetensors`.
Exit codes: 0 done; 1 failed; 2 wrong command line; 8 --check found a difference; 130, 143 stopped.
torchrun ends with 1 for all but 0.
"""

import contextlib
import dataclasses
import sys
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

{imports}
PLAN = Config(
{config}
)
PLANNED = PlannedFigures(
{workload}
)
MODEL_OVERRIDES = {overrides}
PRECISIONS = {{name: name for name in ("bf16", "fp16", "tf32", "fp32", "fp64")}}
PRECISIONS |= {{"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}}  # torch's names


def parse_arguments():
    parser = ProgramParser(description="Train under the plan in this file; start it with torchrun.")
    parser.add_argument("--steps", type=whole_number(0), default=10, help="Train up to this step, also on resume.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=tuple(PRECISIONS), help="Compute in this instead of the plan's precision.")
    parser.add_argument("--seed", type=whole_number(-(2**63), 2**63 - 1), default=0)
    parser.add_argument("--timeout", type=positive, default=600.0, help="Fail if a rank waits this many seconds.")
    parser.add_argument("--lr", type=not_negative, help="Rate of AdamW (3e-4); build_optimizer() sets its own.")
    parser.add_argument("--lr-schedule", choices=("constant", "cosine", "linear"), default="constant")
    parser.add_argument("--warmup-steps", type=whole_number(0), default=0, help="Let the rate rise over so many steps.")
    parser.add_argument("--min-lr", type=not_negative, default=0.0, help="End cosine and linear schedules at this.")
    parser.add_argument("--clip", type=positive, help="Scale gradients down to this global norm.")
    parser.add_argument("--workers", type=whole_number(0), default=0, help="Read ahead in so many processes per rank.")
    parser.add_argument("--repeat-batches", type=whole_number(1), metavar="K", help="Repeat K random batches.")
    parser.add_argument("--fill-last-batch", action="store_true", help="Fill an epoch's last batch, not drop it.")
    parser.add_argument("--eval-every", type=whole_number(1), metavar="N", help="Evaluate after every N steps.")
    parser.add_argument("--eval-batches", type=whole_number(1), metavar="K", help="Evaluate on K batches, not on all.")
    parser.add_argument("--log-jsonl", type=written_file, metavar="FILE", help="Append a line per step and evaluation.")
    parser.add_argument("--tensorboard", type=written_folder, metavar="DIR", help="Write curves (needs tensorboard).")
    parser.add_argument("--out-json", type=written_file, metavar="FILE", help="Write every step's figures in the end.")
    parser.add_argument("--profile-steps", type=parse_steps, metavar="A:B", help="Trace steps A to B, B exclusive.")
    parser.add_argument("--profile-dir", type=named_path, metavar="DIR", help="Write each rank's trace here (profile).")
    parser.add_argument("--check", action="store_true", help="Compare with one process; exit 8 if it differs.")
    parser.add_argument("--alone", type=whole_number(0), metavar="RANK", help="Run one rank by itself, for its memory.")
{launch_option}    add_checkpoint_options(parser)
    arguments = parser.parse_args()
    check_options(parser, arguments, model_file)
    check_rate(parser, arguments, model_file)
{refusals}    return arguments


@record
@said_once
def main():
    arguments = parse_arguments()
    config = dataclasses.replace(PLAN, precision=PRECISIONS.get(arguments.dtype, PLAN.precision))
{changes}    start_process_group(arguments.device, config, timeout_s=arguments.timeout, alone=arguments.alone)
    mesh = build_rank_mesh(config, arguments.device)
    written = {{"jsonl": arguments.log_jsonl, "tensorboard": arguments.tensorboard}}
    log = MetricLog(rank=mesh.rank, n_steps=arguments.steps, **written)
    options = {{
        "overrides": MODEL_OVERRIDES,
        "seed": arguments.seed,
        "learning_rate": arguments.lr,
        "max_grad_norm": arguments.clip,
        "learning_rates": LearningRate(
            arguments.lr_schedule, arguments.steps, arguments.warmup_steps, smallest=arguments.min_lr
        ),
    }}
    model = ParallelModel(config, model_file, {parallel_model}, mesh=mesh, **options)
    reading = {{
        "config": config,
        "dp_rank": mesh.dp_rank,
        "device": mesh.device,
        "rehearsal": model.rehearsal,
        "n_workers": arguments.workers,
    }}
    run = evaluation = trace = None
    if arguments.eval_every:
        data = evaluation_data(model_file, **reading)
        evaluation = Evaluation(model, data, every=arguments.eval_every, n_batches=arguments.eval_batches)
    if arguments.profile_steps:
        folder = arguments.profile_dir or Path("profile")
        trace = StepTrace(arguments.profile_steps, folder, mesh, n_steps=arguments.steps)
    if arguments.check:
        plain = PlainTraining(config, model_file, build_device=model.full_build_device, device=mesh.device, **options)
        steps = check_steps(model, plain, model_file, n_steps=arguments.steps, seed=arguments.seed)
    else:
        reading |= {{"n_different": arguments.repeat_batches, "fills": arguments.fill_last_batch}}
        data = training_data(model_file, seed=arguments.seed, **reading)
        run = TrainingRun(model, arguments, data=data, n_steps=arguments.steps)
        steps = train_steps(model, data, n_steps=arguments.steps, planned=PLANNED, trace=trace)

    watch_for_hangs(model, limit_s=arguments.timeout)
    done = []
    is_kept = arguments.check or arguments.out_json is not None
    with log, run or contextlib.nullcontext():
        for step in steps:
            if is_kept:
                done.append(step)
            log.write(step)
            if evaluation and (found := evaluation.after(step.step)):
                log.write(found)
            if run and run.ends_after(step.step):
                break
        if trace and trace.found:
            log.say(str(trace.found))
    code = run.finish() if run else exit_code(done)
    if arguments.out_json:
        write_records(arguments.out_json, model, done, trace and trace.found)
    stop_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
'''
_LAUNCH_OPTION = """\
    parser.add_argument("--no-cuda-graph", action="store_true", help="Launch every kernel by itself, which is slower.")
"""
_LAUNCH_PLAINLY = """\
    if arguments.no_cuda_graph:
        config = dataclasses.replace(config, cuda_graph=False)
"""
_CHECK_PLAINLY = """\
    if arguments.check:  # one process loses nothing of its gradients
        config = dataclasses.replace(config, grad_compression="none")
"""
_REFUSE_FLOAT64 = """\
    if PRECISIONS.get(arguments.dtype, PLAN.precision) == "fp64":
        parser.error(
            "argument --dtype: found float64, which the model cannot compute in\\n"
            "  expected: float32 weights, since forward casts to float32 what it computes with them: head(x.float())\\n"
            "  fix: --dtype float32"
        )
"""
_TRY_CONVOLUTIONS = """\
    torch.backends.cudnn.benchmark = True  # the first step tries which algorithm of each convolution is fastest
"""
_RUNTIME_NAMES = (
    "Config", "Evaluation", "LearningRate", "MetricLog", "ParallelModel", "PlainTraining", "PlannedFigures",
    "ProgramParser", "StepTrace", "TrainingRun", "add_checkpoint_options", "build_rank_mesh", "check_options",
    "check_rate", "check_steps", "evaluation_data", "exit_code", "named_path", "not_negative", "parse_steps",
    "positive", "said_once", "start_process_group", "stop_process_group", "train_steps", "training_data",
    "watch_for_hangs", "whole_number", "write_records", "written_file", "written_folder",
)  # fmt: skip


def train_script(
    *,
    header: str,
    config: Mapping[str, Any],
    has_parallel_model: bool,
    has_convolutions: bool = False,
    overrides: Mapping[str, Any] | None = None,
    workload: Mapping[str, Any] | None = None,
) -> str:
    """The text of `train.py`.

    `header` is its docstring, `config` the fields of `runtime.Config` (those left out keep their defaults),
    `workload` those of `runtime.PlannedFigures`, `overrides` the keyword arguments of `build_model`.
    Values are strings, numbers, booleans, None, and tuples of them.
    """
    imports = "import model as model_file\n" + ("import parallel_model\n" if has_parallel_model else "")
    imports += "".join(f"{line}\n" for line in import_lines("runtime", _RUNTIME_NAMES))
    return _TEMPLATE.format(
        header=header.replace("\\", "\\\\").replace('"""', r"\"\"\"").strip(),
        imports=imports,
        config=_fields(config),
        workload=_fields(workload or {}),
        overrides=_value(dict(overrides or {})),
        launch_option=_LAUNCH_OPTION if "cuda_graph" in config else "",
        refusals=_REFUSE_FLOAT64 if config.get("fails_in_float64") else "",
        changes=_CHECK_PLAINLY * ("grad_compression" in config)
        + _LAUNCH_PLAINLY * ("cuda_graph" in config)
        + _TRY_CONVOLUTIONS * has_convolutions,
        parallel_model="parallel_model" if has_parallel_model else "None",
    )


def _fields(values: Mapping[str, Any]) -> str:
    """Keyword arguments, one to a line."""
    return "\n".join(f"    {name}={_value(value)}," for name, value in values.items())


def _value(value: Any) -> str:
    """A literal of the value in double quotes; a long tuple over several lines."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_value(key)}: {_value(item)}" for key, item in value.items()) + "}"
    if not isinstance(value, tuple):
        return repr(value)
    items = [_value(item) for item in value]
    text = "(" + ", ".join(items) + ("," if len(items) == 1 else "") + ")"
    return text if len(text) < 90 else "(\n" + "".join(f"        {item},\n" for item in items) + "    )"
