"""A plan as a configuration of torchtitan."""

from __future__ import annotations

import json
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
    """A TOML file for its `--job.config_file`; flags override it."""
    plan, mesh = subject.plan, subject.plan.mesh
    missing = list(everywhere_missing(subject))
    shards = mesh.zero_stage >= 1 and mesh.zero_shard_degree > 1
    piped = mesh.pp > 1
    # its local batch is what one rank takes at once: all micro-batches of a pipeline, else one
    local_batch = mesh.micro_batch_size * (mesh.n_micro_batches if piped else 1)
    training: dict[str, object] = {"local_batch_size": local_batch, "global_batch_size": mesh.global_batch_size}
    if subject.workload.tokens_per_sample is not None:
        training["seq_len"] = subject.workload.tokens_per_sample
    if plan.precision in ("bf16", "tf32", "fp32"):
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
    if mesh.cuda_graph:
        missing.append("The CUDA graph of a step's passes.")
    if piped:
        parallelism |= _pipeline(subject, missing)
    recompute: dict[str, object] = {"mode": "none"}
    if plan.recompute == "full" and mesh.keeps_attention:
        recompute = {"mode": "selective", "selective_ac_option": "op"}
        missing.append("What is kept besides attention: this mode also keeps every second product, and collectives.")
    elif plan.recompute == "full":
        recompute = {"mode": "full"}
    elif plan.recompute == "selective":
        missing.append("Which blocks are recomputed: its selective mode takes every n-th; none are set here.")
        if mesh.keeps_attention:
            missing.append("Attention that is kept: its selective mode by op does so, in all blocks.")
    sections: dict[str, dict[str, object]] = {
        "training": training,
        "parallelism": parallelism,
        "activation_checkpoint": recompute,
        "compile": {"enable": mesh.compile},
    }
    use = "Put these tables into the TOML file of your model, in place of its own ones of the same name."
    return Configuration("torchtitan.toml", _toml(sections), use, tuple(missing))


def _pipeline(subject: Subject, missing: list[str]) -> dict[str, object]:
    mesh = subject.plan.mesh
    fields: dict[str, object] = {"pipeline_parallel_microbatch_size": mesh.micro_batch_size}
    schedule = _SCHEDULES.get((mesh.schedule, min(mesh.n_chunks, 2)))
    if schedule is None:
        missing.append(f"The schedule {mesh.schedule} with {count(mesh.n_chunks, 'stage')} per rank.")
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
