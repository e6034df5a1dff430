"""A plan as arguments of Megatron-LM."""

from __future__ import annotations

from autoplan.interop.subject import Configuration, Subject, everywhere_missing
from autoplan.plain_text import count

_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def megatron_file(subject: Subject) -> Configuration:
    """Arguments of `pretrain_gpt.py` and its like, one a line."""
    plan, mesh = subject.plan, subject.plan.mesh
    missing = list(everywhere_missing(subject))
    flags = [
        f"--tensor-model-parallel-size {mesh.tp}",
        f"--pipeline-model-parallel-size {mesh.pp}",
        f"--micro-batch-size {mesh.micro_batch_size}",
        f"--global-batch-size {subject.global_batch_size}",
        "--clip-grad 0.0",
    ]
    if subject.workload.tokens_per_sample is not None:
        flags.append(f"--seq-length {subject.workload.tokens_per_sample}")
    is_half = plan.precision in ("bf16", "fp16")
    if is_half:
        flags.append(f"--{plan.precision}")
    if plan.grad_compression == "bf16":
        flags.append("--grad-reduce-in-bf16")
    elif is_half:
        flags.append("--accumulate-allreduce-grads-in-fp32")
    if mesh.tp > 1 and mesh.sharding.startswith("S(1)"):
        flags.append("--sequence-parallel")
    if mesh.zero_stage >= 1:
        flags.append("--use-distributed-optimizer")
    if mesh.zero_stage in _SHARDING:
        flags += ["--use-megatron-fsdp", "--ckpt-format fsdp_dtensor"]
        flags.append(f"--data-parallel-sharding-strategy {_SHARDING[mesh.zero_stage]}")
    if mesh.zero_stage >= 1 and subject.n_replicas > 1:
        flags.append(f"--num-distributed-optimizer-instances {subject.n_replicas}")
    if mesh.pp > 1:
        if mesh.schedule == "1f1b" or (mesh.schedule == "interleaved" and mesh.n_chunks > 1):
            flags.append(f"--pipeline-model-parallel-layout {_layout(subject)}")
        else:
            name = f"{mesh.schedule} with {count(mesh.n_chunks, 'stage')} per rank"
            missing.append(f"The schedule {name}, and so its stages: it runs 1F1B, plain or interleaved.")
    flags += _recompute(subject, missing)
    if mesh.cuda_graph:
        flags += ["--cuda-graph-impl full_iteration", "--te-rng-tracker", "--no-check-for-nan-in-loss-and-grad"]
    if mesh.compile:
        missing.append("Compiled blocks: it has fused kernels of its own.")
    use = (
        "Add to the command of Megatron-LM: `xargs -a megatron.txt torchrun ... pretrain_gpt.py ...`. It says"
        " --clip-grad 0.0, as without it Megatron-LM clips gradients to a norm of 1."
    )
    if mesh.tp > 1 and mesh.zero_stage not in _SHARDING:
        use += " On GPUs before Blackwell it wants CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment."
    return Configuration("megatron.txt", "\n".join(flags) + "\n", use, tuple(missing))


def _layout(subject: Subject) -> str:
    """The stages in its letters: E embedding, t block, L loss; of what is before, between and after the blocks."""
    stages = []
    for number, stage in enumerate(subject.plan.stages):
        first = "E" if number == 0 else ""
        last = "L" if number == len(subject.plan.stages) - 1 else ""
        n_blocks = len(subject.blocks_of(stage))
        stages.append(first + (f"t*{n_blocks}" if n_blocks else "") + last)
    return "'" + "|".join(stages) + "'"  # * and | mean something to a shell


def _recompute(subject: Subject, missing: list[str]) -> list[str]:
    if subject.plan.recompute == "none":
        return []
    if subject.plan.mesh.keeps_attention:
        missing.append(
            "Attention that is kept: its granularity selective is the opposite, which recomputes that alone."
        )
    n_first = subject.recomputed_first() if subject.plan.mesh.n_chunks == 1 else None
    if subject.plan.recompute == "full":
        return ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    if not n_first:
        missing.append("Which blocks are recomputed: it recomputes equally many first blocks of every stage.")
        return []
    return ["--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {n_first}"]
