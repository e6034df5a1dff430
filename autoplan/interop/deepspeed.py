"""A plan as a configuration of DeepSpeed."""

from __future__ import annotations

import json

from autoplan.interop.subject import Configuration, Subject, everywhere_missing


def deepspeed_file(subject: Subject) -> Configuration:
    """A JSON file for `deepspeed.initialize(config=...)`."""
    plan, mesh = subject.plan, subject.plan.mesh
    missing = list(everywhere_missing(subject))
    zero_stage = min(mesh.zero_stage, 1) if mesh.pp > 1 else mesh.zero_stage
    if zero_stage < mesh.zero_stage:
        missing.append(f"ZeRO {mesh.zero_stage} in a pipeline: this is ZeRO 1, as it refuses more there.")
    if zero_stage and subject.n_replicas > 1:
        missing.append(f"Shards over {mesh.zero_shard_degree} of {mesh.dp} ranks: it shards over all of them.")
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": mesh.micro_batch_size,
        "gradient_accumulation_steps": mesh.n_micro_batches,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": zero_stage},
    }
    if plan.precision in ("bf16", "fp16"):
        config |= _half_precision(subject, zero_stage, missing)
    if plan.grad_compression == "bf16":
        config["communication_data_type"] = "bf16"
    if zero_stage:
        missing.append("Optimizers other than Adam and AdamW: ZeRO wants zero_allow_untested_optimizer for them.")
    if mesh.tp == 1 or mesh.pp > 1:
        config["train_batch_size"] = subject.global_batch_size
    else:
        config["tensor_parallel"] = {"autotp_size": mesh.tp}
        missing.append("train_batch_size: it would count every rank as a data-parallel one, and is left out.")
    if mesh.tp > 1 and mesh.pp > 1:
        missing.append("Tensor parallelism in a pipeline: its AutoTP takes all other ranks as data parallel.")
    if mesh.pp > 1:
        name = f"pipeline of {mesh.n_stages} stages ({mesh.schedule})"
        missing.append(f"The {name}: build a PipelineModule in code; it runs 1F1B with one stage per rank.")
    if plan.recompute != "none":
        missing.append(f"Recomputation ({plan.recompute}): call its checkpointing in the code of the blocks.")
    if plan.mesh.keeps_attention:
        missing.append("Attention that is kept: its checkpointing recomputes all that it is given.")
    if mesh.cuda_graph:
        missing.append("The CUDA graph of a step's passes: it has graphs for inference only.")
    if mesh.compile:
        missing.append("Compiled blocks: call engine.compile() in code; it compiles the model as a whole.")
    use = (
        'Give it to `deepspeed.initialize(config="deepspeed.json", ...)` and start with `deepspeed train.py`. It says'
        " gradient_clipping 0.0, as without it DeepSpeed clips gradients to a norm of 1."
    )
    return Configuration("deepspeed.json", json.dumps(config, indent=2) + "\n", use, tuple(missing))


def _half_precision(subject: Subject, zero_stage: int, missing: list[str]) -> dict[str, object]:
    plan = subject.plan
    fields: dict[str, object] = {plan.precision: {"enabled": True}, "communication_data_type": "fp32"}
    if zero_stage:
        fields["data_types"] = {"grad_accum_dtype": "fp32"}
    elif plan.mesh.n_micro_batches > 1:
        missing.append(f"Gradients of micro-batches summed in fp32: without ZeRO it sums them in {plan.precision}.")
    return fields
