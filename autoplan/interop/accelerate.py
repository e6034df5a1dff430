"""A plan as a configuration of Hugging Face Accelerate."""

from __future__ import annotations

import json
from collections.abc import Mapping

from autoplan.interop.subject import Configuration, Subject, everywhere_missing


def accelerate_file(subject: Subject) -> Configuration:
    """A YAML file for `accelerate launch --config_file`."""
    plan, mesh = subject.plan, subject.plan.mesh
    missing = list(everywhere_missing(subject))
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
    if mesh.cuda_graph:
        missing.append("The CUDA graph of a step's passes.")
    if mesh.zero_stage == 1:
        missing.append("ZeRO 1: this is ZeRO 2, which also shards gradients.")
    if mesh.pp > 1:
        missing.append(
            f"The pipeline of {mesh.n_stages} stages, whose ranks num_processes counts: nothing cuts the model."
        )
    if plan.recompute == "selective" or (plan.recompute == "full" and not shards):
        missing.append(f"Recomputation ({plan.recompute}): it has all blocks or none, with FSDP only.")
    if mesh.keeps_attention:
        missing.append("Attention that is kept: it recomputes all of a block.")
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
