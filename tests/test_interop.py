"""Plans in the words of other programs: every field from the plan, everything else listed."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import WORKLOAD
from yaml import safe_load

from autoplan.errors import UsageError
from autoplan.interop.subject import Subject
from autoplan.interop.targets import SOURCES, TARGETS, check_targets, interop_files
from autoplan.parallel_plan import GroupRanks, Mesh, Plan, StagePlan

# embedding, eight blocks, head
CLASSES = ("", *["Block"] * 8, "")
ALL = (StagePlan(0, 10),)
SHARDED = Mesh(dp=8, zero_stage=3, zero_shard_degree=4, micro_batch_size=2, n_micro_batches=4)
PIPED = Mesh(
    pp=2, dp=2, tp=2, zero_stage=1, zero_shard_degree=2, micro_batch_size=1, n_micro_batches=8, sharding="S(1)"
)


def _subject(mesh: Mesh, stages: tuple[StagePlan, ...] = ALL, **fields) -> Subject:
    return Subject(Plan(mesh, stages, **fields), replace(WORKLOAD, tokens_per_sample=1024), CLASSES)


def _made(name: str, subject: Subject) -> tuple[str, str]:
    configuration = TARGETS[name](subject)
    return configuration.text, " ".join(configuration.missing)


def test_torchtitan_gets_hybrid_sharding_and_accumulation() -> None:
    text, missing = _made("torchtitan", _subject(SHARDED))
    found = tomllib.loads(text)
    # global batch 8 x 2 x 4 = 64 samples; 8 ranks as 2 replicas of 4 shards
    assert found["training"] == {
        "local_batch_size": 2,
        "global_batch_size": 64,
        "seq_len": 1024,
        "mixed_precision_param": "bfloat16",
        "mixed_precision_reduce": "float32",
    }
    assert found["parallelism"]["data_parallel_replicate_degree"] == 2
    assert found["parallelism"]["data_parallel_shard_degree"] == 4
    assert found["parallelism"]["fsdp_reshard_after_forward"] == "always"
    assert found["activation_checkpoint"]["mode"] == "none" and found["compile"]["enable"] is False
    assert (
        missing
        == "The model: it must exist there under its own name, and data, optimizer and learning rate are set there."
    )


def test_torchtitan_gets_a_pipeline_whose_local_batch_holds_all_micro_batches() -> None:
    text, missing = _made("torchtitan", _subject(PIPED, (StagePlan(0, 5), StagePlan(5, 10)), recompute="selective"))
    found = tomllib.loads(text)
    assert found["training"]["local_batch_size"] == 8
    assert found["parallelism"]["pipeline_parallel_schedule"] == "1F1B"
    assert found["parallelism"]["pipeline_parallel_microbatch_size"] == 1
    assert found["parallelism"]["pipeline_parallel_layers_per_stage"] == 4
    for what in ("ZeRO 1", "tensor-parallel layout", "Which blocks are recomputed"):
        assert what in missing
    uneven, missing = _made("torchtitan", _subject(PIPED, (StagePlan(0, 4), StagePlan(4, 10))))
    assert "layers_per_stage" not in uneven and "Blocks of the stages: 3, 5" in missing


def test_megatron_gets_uneven_stages_and_the_first_blocks_recomputed() -> None:
    stages = (StagePlan(0, 4, recomputed=(1, 2)), StagePlan(4, 10, recomputed=(4, 5)))
    text, missing = _made("megatron", _subject(PIPED, stages, recompute="selective"))
    assert text.splitlines() == [
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--micro-batch-size 1",
        "--global-batch-size 16",
        "--seq-length 1024",
        "--bf16",
        "--accumulate-allreduce-grads-in-fp32",
        "--sequence-parallel",
        "--use-distributed-optimizer",
        "--pipeline-model-parallel-layout 'Et*3|t*5L'",
        "--recompute-granularity full",
        "--recompute-method block",
        "--recompute-num-layers 2",
    ]
    assert "recomputed" not in missing


def test_megatron_gets_sharded_parameters_and_says_which_schedules_it_lacks() -> None:
    text, _ = _made("megatron", _subject(SHARDED, recompute="full"))
    assert "--data-parallel-sharding-strategy optim_grads_params" in text
    assert "--num-distributed-optimizer-instances 2" in text
    assert "--recompute-method uniform" in text
    others = (StagePlan(0, 4, recomputed=(2,)), StagePlan(4, 10))
    text, missing = _made("megatron", _subject(replace(PIPED, schedule="gpipe"), others, recompute="selective"))
    assert "layout" not in text and "recompute" not in text
    assert "The schedule gpipe" in missing and "Which blocks are recomputed" in missing


def test_deepspeed_batches_multiply_to_the_global_batch() -> None:
    text, missing = _made("deepspeed", _subject(SHARDED))
    found = json.loads(text)
    assert (
        found["train_batch_size"] == found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"] * 8
    )
    assert found["zero_optimization"] == {"stage": 3, "mics_shard_size": 4}
    assert found["bf16"] == {"enabled": True} and found["communication_data_type"] == "fp32"
    text, missing = _made("deepspeed", _subject(replace(SHARDED, zero_stage=2), precision="fp32", recompute="full"))
    assert (
        "bf16" not in json.loads(text) and "Recomputation (full)" in missing and "Shards over 4 of 8 ranks" in missing
    )
    text, missing = _made("deepspeed", _subject(PIPED, (StagePlan(0, 5), StagePlan(5, 10))))
    assert json.loads(text)["tensor_parallel"] == {"autotp_size": 2} and "pipeline of 2 stages" in missing


def test_accelerate_gets_fsdp_with_its_blocks_or_plain_data_parallelism() -> None:
    text, missing = _made("accelerate", _subject(SHARDED, recompute="full"))
    found = safe_load(text)
    assert found["distributed_type"] == "FSDP" and found["num_processes"] == 8 and found["mixed_precision"] == "bf16"
    assert found["fsdp_config"]["fsdp_reshard_after_forward"] is True
    assert found["fsdp_config"]["fsdp_activation_checkpointing"] is True
    assert found["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "Block"
    assert found["parallelism_config"]["parallelism_config_dp_replicate_size"] == 2
    assert "gradient_accumulation_steps=4" in missing
    plain, missing = _made("accelerate", _subject(Mesh(dp=8), recompute="full"))
    assert safe_load(plain)["distributed_type"] == "MULTI_GPU" and "fsdp" not in plain
    assert "Recomputation (full)" in missing


@pytest.mark.parametrize("name", TARGETS)
def test_what_no_target_has_is_said_by_all(name: str) -> None:
    fields = {
        "loss": "chunked",
        "batch_norm": "synchronized",
        "loss_average": "global_batch",
        "grad_compression": "powersgd",
        "powersgd_rank": 4,
        "groups": (GroupRanks(0, 1), GroupRanks(1, 1)),
    }
    mesh = replace(PIPED, memory_format="channels_last")
    _, missing = _made(name, _subject(mesh, (StagePlan(0, 5), StagePlan(5, 10)), **fields))
    for what in (
        "The loss in slices",
        "channels_last",
        "Synchronized BatchNorm",
        "One mean of the loss",
        "PowerSGD",
        "several kinds of hosts",
    ):
        assert what in missing
    assert name in SOURCES


def test_files_are_a_configuration_and_a_page_for_each_target() -> None:
    files = interop_files(("deepspeed", "megatron"), _subject(SHARDED))
    assert sorted(files) == [
        f"interop/{name}" for name in ("deepspeed.json", "deepspeed.md", "megatron.md", "megatron.txt")
    ]
    assert "## Not expressed\n\n- The model" in files["interop/deepspeed.md"]


def test_a_wrong_target_or_a_missing_folder_is_refused() -> None:
    with pytest.raises(UsageError, match="found 'jax'\n  expected: torchtitan, megatron, deepspeed, accelerate"):
        check_targets(("jax",), out=Path("x"))
    with pytest.raises(UsageError, match="add --out DIR"):
        check_targets(("megatron",), out=None)
