"""A plan as settings of a configuration of torchtitan."""

from __future__ import annotations

from collections.abc import Mapping

from autoplan.interop.subject import Configuration, Subject, everywhere_missing
from autoplan.plain_text import count

_SCHEDULES = {
    ("gpipe", 1): "GPipe",
    ("1f1b", 1): "1F1B",
    ("interleaved", 2): "Interleaved1F1B",
    ("zero_bubble_v", 2): "ZBVZeroBubble",
}


def torchtitan_file(subject: Subject) -> Configuration:
    """A Python file with a function that puts the plan into a `Trainer.Config`."""
    plan, mesh = subject.plan, subject.plan.mesh
    missing = list(everywhere_missing(subject))
    missing.append("No gradient clipping: it clips to a norm of 1 unless training.max_norm says otherwise.")
    shards = mesh.zero_shard_degree > 1
    piped = mesh.pp > 1
    fields: dict[str, object] = {
        "training.disable_cuda_graphs": piped or not mesh.cuda_graph,
        "parallelism.data_parallel_replicate_degree": subject.n_replicas,
        "parallelism.data_parallel_shard_degree": mesh.zero_shard_degree,
        "parallelism.tensor_parallel_degree": mesh.tp,
        "parallelism.pipeline_parallel_degree": mesh.pp,
        "compile.enable": mesh.compile,
    }
    if plan.precision in ("bf16", "tf32", "fp32"):
        fields["training.mixed_precision_param"] = "bfloat16" if plan.precision == "bf16" else "float32"
    elif plan.precision == "fp16":
        missing.append("The precision fp16: it has bfloat16 and float32.")
    if plan.grad_compression == "bf16":
        missing.append("Gradients reduced in bf16: it reduces them in float32.")
    if mesh.tp > 1:
        fields["parallelism.enable_sequence_parallel"] = mesh.sharding.startswith("S(1)")
    if shards:
        fields["parallelism.fsdp_reshard_after_forward"] = "always" if mesh.zero_stage == 3 else "never"
    if mesh.zero_stage >= 2 and piped:
        missing.append(f"ZeRO {mesh.zero_stage} in a pipeline: gradients are whole until the last micro-batch.")
    if mesh.zero_stage == 1 and not piped:
        missing.append("ZeRO 1: this is ZeRO 2, which also reduces gradients in every micro-batch.")
    if mesh.dp > 1 and not shards and not piped and mesh.n_micro_batches > 1:
        missing.append("Gradients reduced once a step: it reduces them in every micro-batch.")
    if mesh.cuda_graph and (piped or mesh.n_micro_batches > 1):
        missing.append("The CUDA graph of a step's passes: it has one of each micro-batch's, and none in a pipeline.")
    if piped:
        fields |= _pipeline(subject, missing)
    recompute = _recompute(subject, missing)
    use = (
        "It is configured in Python: return `with_plan(config)` from your configuration function, and start as many "
        f"processes as the plan has devices, {mesh.n_devices}. Release 0.2 and before read TOML instead."
    )
    return Configuration("torchtitan.py", _python(_batch(subject, missing), fields, recompute), use, tuple(missing))


def _batch(subject: Subject, missing: list[str]) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """The fields of release 0.3.0, which counts samples, and of later versions, which count tokens."""
    mesh, n_tokens = subject.plan.mesh, subject.workload.tokens_per_sample
    piped = mesh.pp > 1
    # the local batch is what one rank takes at once: all micro-batches of a pipeline, else one
    samples = {
        "training.local_batch_size": mesh.micro_batch_size * (mesh.n_micro_batches if piped else 1),
        "training.global_batch_size": subject.global_batch_size,
        "parallelism.pipeline_parallel_microbatch_size": mesh.micro_batch_size,
    }
    if n_tokens is None:
        missing.append("Batches for versions after 0.3.0, which count tokens: a sample of this model has none.")
        return samples, {}
    return samples | {"training.seq_len": n_tokens}, {
        "training.num_tokens_per_microbatch_per_dp_rank": mesh.micro_batch_size * n_tokens,
        "training.num_tokens_per_train_step": subject.global_batch_size * n_tokens,
        "training.max_context_length": n_tokens,
        "parallelism.num_pp_microbatches": mesh.n_micro_batches if piped else 1,
    }


def _pipeline(subject: Subject, missing: list[str]) -> dict[str, object]:
    mesh, stages = subject.plan.mesh, subject.plan.stages
    fields: dict[str, object] = {}
    schedule = _SCHEDULES.get((mesh.schedule, min(mesh.n_chunks, 2)))
    if schedule is None:
        missing.append(f"The schedule {mesh.schedule} with {count(mesh.n_chunks, 'stage')} per rank.")
    else:
        fields["parallelism.pipeline_parallel_schedule"] = schedule
    blocks = [index for index, name in enumerate(subject.classes) if name]
    parts = [[f"layers.{blocks.index(index)}" for index in subject.blocks_of(stage)] for stage in stages]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return fields | {"parallelism.module_fqns_per_model_part": parts}


def _recompute(subject: Subject, missing: list[str]) -> str:
    """The name of its class of activation checkpointing, "" for none."""
    keeps = subject.plan.mesh.keeps_attention
    if subject.plan.recompute == "full" and keeps:
        missing.append("What is kept besides attention: SelectiveAC also keeps every second product, and collectives.")
        return "SelectiveAC"
    if subject.plan.recompute == "selective":
        missing.append("Which blocks are recomputed: it takes all or none; none here.")
        if keeps:
            missing.append("Attention that is kept: its SelectiveAC does so, in all blocks.")
    return "FullAC" if subject.plan.recompute == "full" else ""


def _python(
    batch: tuple[Mapping[str, object], Mapping[str, object]], fields: Mapping[str, object], recompute: str
) -> str:
    in_samples, in_tokens = batch
    imported = f"\nfrom torchtitan.distributed.activation_checkpoint import {recompute}\n" if recompute else ""
    later = f"    else:\n{_assigned(in_tokens, '        ')}" if in_tokens else ""
    return (
        f'"""What a plan sets in a configuration of torchtitan."""\n{imported}\n\n'
        'def with_plan(config):\n    """The configuration, a `Trainer.Config`, with the plan in it."""\n'
        '    if hasattr(config.training, "local_batch_size"):  # release 0.3.0\n'
        f"{_assigned(in_samples, '        ')}{later}{_assigned(fields, '    ')}"
        f"    config.activation_checkpoint = {f'{recompute}.Config()' if recompute else None}\n    return config\n"
    )


def _assigned(fields: Mapping[str, object], indent: str) -> str:
    return "".join(f"{indent}config.{name} = {value!r}\n" for name, value in fields.items())
