"""A plan as a configuration of Hugging Face Accelerate."""

from __future__ import annotations

import json
from collections.abc import Mapping

from autoplan.interop.subject import Configuration, Subject, everywhere_missing


def accelerate_file(subject: Subject) -> Configuration:
    """A YAML file for `accelerate launch --config_file`."""
    plan, mesh = subject.plan, subject.plan.mesh
    missing = list(everywhere_missing(subject))
    is_half = plan.precision in ("bf16", "fp16")
    shard_degree = _shard_degree(subject, missing)
    shards = shard_degree > 1
    n_processes, n_hosts = mesh.dp * mesh.tp, max(1, plan.n_hosts // mesh.pp)
    config: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if shards else "MULTI_GPU" if n_processes > 1 else "NO",
        "mixed_precision": plan.precision if is_half else "no",
        "num_machines": n_hosts,
        "num_processes": n_processes,
    }
    classes = ",".join(dict.fromkeys(filter(None, subject.classes)))
    if shards:
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_cpu_ram_efficient_loading": not subject.ties_weights,
            "fsdp_reshard_after_forward": mesh.zero_stage == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if classes else "NO_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": classes,
            "fsdp_activation_checkpointing": plan.recompute == "full",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    if shards or mesh.tp > 1:
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": mesh.dp // shard_degree,
            "parallelism_config_dp_shard_size": shard_degree,
            "parallelism_config_tp_size": mesh.tp,
        }
    if mesh.compile:
        config["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    if mesh.cuda_graph:
        missing.append("The CUDA graph of a step's passes.")
    if mesh.pp > 1:
        missing.append(
            f"The pipeline of {mesh.n_stages} stages: nothing cuts the model; the processes are those of one stage."
        )
    if plan.recompute == "selective" or (plan.recompute == "full" and not shards):
        missing.append(f"Recomputation ({plan.recompute}): it has all blocks or none, with FSDP only.")
    if mesh.keeps_attention:
        missing.append("Attention that is kept: it recomputes all of a block.")
    if shards and subject.ties_weights:
        missing.append(
            "Weights that one process loads: fsdp_cpu_ram_efficient_loading is off, as it unties weights, so every"
            " process must build the same ones, as after accelerate.utils.set_seed."
        )
    if shards and is_half and plan.grad_compression != plan.precision:
        missing.append(
            f"Gradients reduced in fp32: FSDP does so in {plan.precision}, unless its plugin has a policy set in code."
        )
    if plan.grad_compression == "bf16" and not shards:
        missing.append("Gradients reduced in bf16: a comm_hook of DistributedDataParallelKwargs, set in code.")
    missing.append(
        f"Batches, which are set in code: {mesh.micro_batch_size} samples per device, "
        f"Accelerator(gradient_accumulation_steps={mesh.n_micro_batches}), each under accelerator.accumulate(model)."
    )
    hosts = "" if n_hosts == 1 else " --machine_rank N --main_process_ip HOST --main_process_port PORT"
    use = f"Start with `accelerate launch --config_file accelerate.yaml{hosts} train.py`."
    if shards:
        use += " FSDP wants the model and its optimizer in one call of `accelerator.prepare`, and a GPU."
    return Configuration("accelerate.yaml", _yaml(config), use, tuple(missing))


def _shard_degree(subject: Subject, missing: list[str]) -> int:
    """Over how many ranks it shards; 1 where it replicates."""
    mesh = subject.plan.mesh
    if mesh.zero_stage == 0 and mesh.tp > 1 and mesh.dp > 1:
        missing.append("Replicated parameters beside tensor parallelism: this is ZeRO 2, as it refuses them there.")
        return mesh.dp
    if mesh.zero_stage == 1:
        missing.append("ZeRO 1: this is ZeRO 2, which also shards gradients.")
    return mesh.zero_shard_degree


def _yaml(values: Mapping[str, object], indent: str = "") -> str:
    """Nested mappings of strings, numbers and booleans, which JSON writes as YAML does."""
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:\n{_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}\n")
    return "".join(lines)
