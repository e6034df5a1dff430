"""A plan in the words of other training programs: the configuration that comes closest, and what it cannot say.

    Plan x Workload --TARGETS[name]--> Configuration: a file, how to use it, and what is not expressed

A field is written only where its documentation gives it the plan's meaning; what has no field is listed, never
approximated in silence. Other programs run their own model code, so layouts of tensor parallelism and what is fused are
theirs; the estimate holds for the program of the plan, not for them. `SOURCES` has the documentation of each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from autoplan.answers.answer import Workload
from autoplan.errors import UsageError
from autoplan.parallel_plan import Plan, StagePlan

# Read on 2026-11-21.
SOURCES: Mapping[str, str] = {
    "torchtitan": "https://github.com/pytorch/torchtitan, config/job_config.py: every field and its docstring",
    "megatron": "https://docs.nvidia.com/megatron-core/developer-guide/latest: parallelism guide, pipeline layout",
    "deepspeed": "https://www.deepspeed.ai/docs/config-json: batch size, ZeRO, bf16, data types; AutoTP tutorial",
    "accelerate": "https://huggingface.co/docs/accelerate: FSDP, ParallelismConfig, and the config file of `launch`",
}


@dataclass(frozen=True, slots=True)
class Subject:
    """What is put into other words.

    Attributes:
        classes: the class of each segment of the graph that is a block, "" of one that is none.
    """

    plan: Plan
    workload: Workload
    classes: tuple[str, ...]

    @property
    def n_replicas(self) -> int:
        """Data-parallel ranks that hold the same shards."""
        return self.plan.mesh.dp // self.plan.mesh.zero_shard_degree

    def blocks_of(self, stage: StagePlan) -> tuple[int, ...]:
        """The blocks of a stage, as indices of segments."""
        return tuple(index for index in range(stage.start, stage.stop) if self.classes[index])

    def recomputed_first(self) -> int | None:
        """If every stage recomputes its first n blocks and no other, that n; None otherwise."""
        found = set()
        for stage in self.plan.stages:
            recomputes = [index in stage.recomputed for index in self.blocks_of(stage)]
            if recomputes != sorted(recomputes, reverse=True):
                return None
            found.add(sum(recomputes))
        return found.pop() if len(found) == 1 else None


@dataclass(frozen=True, slots=True)
class Configuration:
    """One plan in other words.

    Attributes:
        file: name of the configuration file.
        use: the command, or where the file belongs.
        missing: what of the plan it does not express, a sentence each.
    """

    file: str
    text: str
    use: str
    missing: tuple[str, ...]


def check_targets(names: tuple[str, ...], *, out: Path | None) -> None:
    """Refuse targets before time is spent on a search.

    Raises: UsageError for one that is not known, or without a folder to write to.
    """
    for name in names:
        if name not in TARGETS:
            raise UsageError(f"--emit: found {name!r}\n  expected: {', '.join(TARGETS)}")
        if out is None:
            raise UsageError(f"--emit {name}: nowhere to write\n  fix: add --out DIR; it writes into DIR/interop")


def interop_files(names: tuple[str, ...], subject: Subject) -> dict[str, str]:
    """By relative path: for each target its configuration, and a page on how to use it and what it leaves out."""
    found = {}
    for name in names:
        configuration = TARGETS[name](subject)
        found[f"interop/{configuration.file}"] = configuration.text
        found[f"interop/{name}.md"] = _page(name, configuration)
    return found


def _page(name: str, configuration: Configuration) -> str:
    missing = "".join(f"- {sentence}\n" for sentence in configuration.missing)
    return (
        f"# This plan for {name}\n\n{configuration.use}\n\n## Not expressed\n\n{missing}\n"
        f"Fields as documented in {SOURCES[name]} (2026-11-21).\n"
    )


def _everywhere_missing(subject: Subject) -> Iterator[str]:
    """What no target has."""
    plan = subject.plan
    yield "The model: it must exist there under its own name, and data, optimizer and learning rate are set there."
    if plan.mesh.tp > 1:
        yield "The tensor-parallel layout of each operator: the target splits as its own model code does."
    if plan.groups:
        yield "Pipeline ranks on several kinds of hosts: place the ranks by the order of the hosts."
    if plan.loss == "chunked":
        yield "The loss in slices of the rows, which holds one slice of the logits at a time."
    if plan.mesh.memory_format == "channels_last":
        yield "Images in the order channels_last: call model.to(memory_format=torch.channels_last)."
    if plan.batch_norm == "synchronized":
        yield "Synchronized BatchNorm: convert the model with torch.nn.SyncBatchNorm."
    if plan.grad_compression == "powersgd":
        yield "PowerSGD: register torch's DDP hook of that name where the model is wrapped by DDP."
    if plan.loss_average == "global_batch":
        yield "One mean of the loss over the targets of the global batch."


# ------------------------------------------------------------------------------------------- torchtitan

_TITAN_SCHEDULES = {
    ("gpipe", 1): "GPipe",
    ("1f1b", 1): "1F1B",
    ("gpipe", 2): "LoopedBFS",
    ("interleaved", 2): "Interleaved1F1B",
    ("zero_bubble_v", 2): "ZBVZeroBubble",
}


def torchtitan(subject: Subject) -> Configuration:
    """A TOML file for its `--job.config_file`; flags override it."""
    plan, mesh = subject.plan, subject.plan.mesh
    missing = list(_everywhere_missing(subject))
    shards = mesh.zero_stage >= 1 and mesh.zero_shard_degree > 1
    piped = mesh.pp > 1
    # its local batch is what one rank takes at once: all micro-batches of a pipeline, else one
    local_batch = mesh.micro_batch_size * (mesh.n_micro_batches if piped else 1)
    training: dict[str, object] = {"local_batch_size": local_batch, "global_batch_size": mesh.global_batch_size}
    if subject.workload.tokens_per_sample is not None:
        training["seq_len"] = subject.workload.tokens_per_sample
    if plan.precision in ("bf16", "fp32"):
        training["mixed_precision_param"] = "bfloat16" if plan.precision == "bf16" else "float32"
        training["mixed_precision_reduce"] = "bfloat16" if plan.grad_compression == "bf16" else "float32"
    else:
        missing.append(f"The precision {plan.precision}: it has bfloat16 and float32.")
    parallelism: dict[str, object] = {
        "data_parallel_replicate_degree": subject.n_replicas if shards else mesh.dp,
        "data_parallel_shard_degree": mesh.zero_shard_degree if shards else 1,
        "tensor_parallel_degree": mesh.tp,
        "pipeline_parallel_degree": mesh.pp,
    }
    if shards:
        parallelism["fsdp_reshard_after_forward"] = "always" if mesh.zero_stage == 3 else "never"
    if mesh.zero_stage == 1:
        missing.append("ZeRO 1: this is ZeRO 2, which also reduces gradients in every micro-batch.")
    if not shards and mesh.dp > 1 and mesh.tp * mesh.pp > 1:
        missing.append("Replicated parameters beside tensor or pipeline parallelism: it refuses DDP there; shard them.")
    if piped:
        parallelism |= _titan_pipeline(subject, missing)
    recompute: dict[str, object] = {"mode": "none"}
    if plan.recompute == "full":
        recompute = {"mode": "full"}
    elif plan.recompute == "selective":
        missing.append("Which blocks are recomputed: its selective mode takes every n-th; none are set here.")
    sections: dict[str, dict[str, object]] = {
        "training": training,
        "parallelism": parallelism,
        "activation_checkpoint": recompute,
        "compile": {"enable": mesh.compile},
    }
    use = "Put these tables into the TOML file of your model, in place of its own ones of the same name."
    return Configuration("torchtitan.toml", _toml(sections), use, tuple(missing))


def _titan_pipeline(subject: Subject, missing: list[str]) -> dict[str, object]:
    mesh = subject.plan.mesh
    fields: dict[str, object] = {"pipeline_parallel_microbatch_size": mesh.micro_batch_size}
    schedule = _TITAN_SCHEDULES.get((mesh.schedule, min(mesh.n_chunks, 2)))
    if schedule is None:
        missing.append(f"The schedule {mesh.schedule} with {mesh.n_chunks} stages per rank.")
    else:
        fields["pipeline_parallel_schedule"] = schedule
    counts = {len(subject.blocks_of(stage)) for stage in subject.plan.stages}
    if len(counts) == 1:
        fields["pipeline_parallel_layers_per_stage"] = counts.pop()
    else:
        of_stages = ", ".join(str(len(subject.blocks_of(stage))) for stage in subject.plan.stages)
        missing.append(f"Blocks of the stages: {of_stages}; name its modules in module_fqns_per_model_part.")
    return fields


def _toml(sections: Mapping[str, Mapping[str, object]]) -> str:
    """Tables of strings, numbers and booleans, which JSON writes as TOML does."""
    texts = [
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        for name, values in sections.items()
    ]
    return "\n".join(texts)


# ------------------------------------------------------------------------------------------- Megatron-LM

_MEGATRON_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def megatron(subject: Subject) -> Configuration:
    """Arguments of `pretrain_gpt.py` and its like, one a line."""
    plan, mesh = subject.plan, subject.plan.mesh
    missing = list(_everywhere_missing(subject))
    flags = [
        f"--tensor-model-parallel-size {mesh.tp}",
        f"--pipeline-model-parallel-size {mesh.pp}",
        f"--micro-batch-size {mesh.micro_batch_size}",
        f"--global-batch-size {mesh.global_batch_size}",
    ]
    if subject.workload.tokens_per_sample is not None:
        flags.append(f"--seq-length {subject.workload.tokens_per_sample}")
    if plan.precision in ("bf16", "fp16"):
        flags.append(f"--{plan.precision}")
    if plan.grad_compression == "bf16":
        flags.append("--grad-reduce-in-bf16")
    elif plan.precision == "bf16":
        flags.append("--accumulate-allreduce-grads-in-fp32")
    if mesh.tp > 1 and mesh.sharding.startswith("S(1)"):
        flags.append("--sequence-parallel")
    if mesh.zero_stage >= 1:
        flags.append("--use-distributed-optimizer")
    if mesh.zero_stage in _MEGATRON_SHARDING:
        flags += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {_MEGATRON_SHARDING[mesh.zero_stage]}"]
    if mesh.zero_stage >= 1 and subject.n_replicas > 1:
        flags.append(f"--num-distributed-optimizer-instances {subject.n_replicas}")
    if mesh.pp > 1:
        if mesh.schedule in ("1f1b", "interleaved"):
            flags.append(f"--pipeline-model-parallel-layout {_megatron_layout(subject)}")
        else:
            missing.append(f"The schedule {mesh.schedule}, and so its stages: it runs 1F1B, plain or interleaved.")
    flags += _megatron_recompute(subject, missing)
    if mesh.compile:
        missing.append("Compiled blocks: it has fused kernels of its own.")
    use = "Add to the command of Megatron-LM: `xargs -a megatron.txt torchrun ... pretrain_gpt.py ...`."
    return Configuration("megatron.txt", "\n".join(flags) + "\n", use, tuple(missing))


def _megatron_layout(subject: Subject) -> str:
    """The stages in its letters: E embedding, t block, L loss; of what is before, between and after the blocks."""
    stages = []
    for number, stage in enumerate(subject.plan.stages):
        first = "E" if number == 0 else ""
        last = "L" if number == len(subject.plan.stages) - 1 else ""
        n_blocks = len(subject.blocks_of(stage))
        stages.append(first + (f"t*{n_blocks}" if n_blocks else "") + last)
    return "'" + "|".join(stages) + "'"  # * and | mean something to a shell


def _megatron_recompute(subject: Subject, missing: list[str]) -> list[str]:
    if subject.plan.recompute == "none":
        return []
    n_first = subject.recomputed_first() if subject.plan.mesh.n_chunks == 1 else None
    if subject.plan.recompute == "full":
        return ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    if n_first is None:
        missing.append("Which blocks are recomputed: it recomputes equally many first blocks of every stage.")
        return []
    return ["--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {n_first}"]


# ------------------------------------------------------------------------------------------- DeepSpeed


def deepspeed(subject: Subject) -> Configuration:
    """A JSON file for `deepspeed.initialize(config=...)`."""
    plan, mesh = subject.plan, subject.plan.mesh
    missing = list(_everywhere_missing(subject))
    zero: dict[str, object] = {"stage": mesh.zero_stage}
    if mesh.zero_stage == 3 and subject.n_replicas > 1:
        zero["mics_shard_size"] = mesh.zero_shard_degree
    elif mesh.zero_stage and subject.n_replicas > 1:
        missing.append(f"Shards over {mesh.zero_shard_degree} of {mesh.dp} ranks: only its stage 3 does that (MiCS).")
    config: dict[str, object] = {
        "train_batch_size": mesh.global_batch_size,
        "train_micro_batch_size_per_gpu": mesh.micro_batch_size,
        "gradient_accumulation_steps": mesh.n_micro_batches,
        "zero_optimization": zero,
    }
    if plan.precision in ("bf16", "fp16"):
        config[plan.precision] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
    if plan.grad_compression == "bf16":
        config["communication_data_type"] = "bf16"
    if mesh.tp > 1:
        config["tensor_parallel"] = {"autotp_size": mesh.tp}
        if mesh.zero_stage == 3:
            missing.append("ZeRO 3 beside tensor parallelism: its AutoTP goes with stages 0 to 2.")
    if mesh.pp > 1:
        missing.append(f"The pipeline of {mesh.n_stages} stages: build the model as a PipelineModule in code.")
    if plan.recompute != "none":
        missing.append(f"Recomputation ({plan.recompute}): call its checkpointing in the code of the blocks.")
    if mesh.compile:
        missing.append("Compiled blocks: call engine.compile() in code; it compiles the model as a whole.")
    use = "Start with `deepspeed train.py --deepspeed --deepspeed_config deepspeed.json`."
    return Configuration("deepspeed.json", json.dumps(config, indent=2) + "\n", use, tuple(missing))


# ------------------------------------------------------------------------------------------- Accelerate


def accelerate(subject: Subject) -> Configuration:
    """A YAML file for `accelerate launch --config_file`."""
    plan, mesh = subject.plan, subject.plan.mesh
    missing = list(_everywhere_missing(subject))
    shards = mesh.zero_stage >= 1 and mesh.zero_shard_degree > 1
    config: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if shards else "MULTI_GPU",
        "mixed_precision": plan.precision if plan.precision in ("bf16", "fp16") else "no",
        "num_machines": max(1, plan.n_hosts),
        "num_processes": mesh.n_devices,
    }
    if shards:
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": mesh.zero_stage == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": ",".join(dict.fromkeys(filter(None, subject.classes))),
            "fsdp_activation_checkpointing": plan.recompute == "full",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    if shards or mesh.tp > 1:
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": subject.n_replicas if shards else mesh.dp,
            "parallelism_config_dp_shard_size": mesh.zero_shard_degree if shards else 1,
            "parallelism_config_tp_size": mesh.tp,
        }
    if mesh.compile:
        config["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    if mesh.zero_stage == 1:
        missing.append("ZeRO 1: this is ZeRO 2, which also shards gradients.")
    if mesh.pp > 1:
        missing.append(
            f"The pipeline of {mesh.n_stages} stages, whose ranks num_processes counts: nothing cuts the model."
        )
    if plan.recompute == "selective" or (plan.recompute == "full" and not shards):
        missing.append(f"Recomputation ({plan.recompute}): it has all blocks or none, with FSDP only.")
    if plan.grad_compression == "bf16":
        missing.append("Gradients reduced in bf16: a comm_hook of DistributedDataParallelKwargs, set in code.")
    missing.append(
        f"Batches, which are set in code: {mesh.micro_batch_size} samples per device, "
        f"Accelerator(gradient_accumulation_steps={mesh.n_micro_batches})."
    )
    use = "Start with `accelerate launch --config_file accelerate.yaml train.py`."
    return Configuration("accelerate.yaml", _yaml(config), use, tuple(missing))


def _yaml(values: Mapping[str, object], indent: str = "") -> str:
    """Nested mappings of strings, numbers and booleans, which JSON writes as YAML does."""
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:\n{_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}\n")
    return "".join(lines)


TARGETS: Mapping[str, Callable[[Subject], Configuration]] = {
    "torchtitan": torchtitan,
    "megatron": megatron,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
}
