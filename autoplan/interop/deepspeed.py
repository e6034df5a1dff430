"""A plan as a configuration of DeepSpeed."""

from __future__ import annotations

import json

from autoplan.interop.subject import Configuration, Subject, everywhere_missing


def deepspeed_file(subject: Subject) -> Configuration:
    """A JSON file for `deepspeed.initialize(config=...)`."""
    plan, mesh = subject.plan, subject.plan.mesh
    missing = list(everywhere_missing(subject))
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
    if plan.mesh.keeps_attention:
        missing.append("Attention that is kept: its checkpointing recomputes all that it is given.")
    if mesh.cuda_graph:
        missing.append("The CUDA graph of a step's passes: it has graphs for inference only.")
    if mesh.compile:
        missing.append("Compiled blocks: call engine.compile() in code; it compiles the model as a whole.")
    use = "Start with `deepspeed train.py --deepspeed --deepspeed_config deepspeed.json`."
    return Configuration("deepspeed.json", json.dumps(config, indent=2) + "\n", use, tuple(missing))
