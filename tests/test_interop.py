"""Plans in the words of other programs: every field from the plan, everything else listed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from conftest import WORKLOAD
from yaml import safe_load

from autoplan import api
from autoplan.errors import UsageError
from autoplan.interop.subject import Subject
from autoplan.interop.targets import SOURCES, TARGETS, check_targets, interop_files
from autoplan.options import Options
from autoplan.parallel_plan import BatchShare, GroupRanks, Mesh, Plan, StagePlan

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


def _titan(subject: Subject, version: str = "0.3.0") -> tuple[SimpleNamespace, str]:
    """The fields that the written function sets, in classes that have the batch of that version and no other field."""
    text, missing = _made("torchtitan", subject)
    training = {"local_batch_size": 8} if version == "0.3.0" else {}
    config = SimpleNamespace(
        training=SimpleNamespace(**training), parallelism=SimpleNamespace(), compile=SimpleNamespace()
    )
    checkpointing = SimpleNamespace(FullAC=SimpleNamespace(Config=lambda: "full"))
    modules = {"torchtitan.distributed.activation_checkpoint": checkpointing}
    names: dict = {}
    with patch.dict(sys.modules, modules):  # type: ignore[arg-type]
        exec(text, names)
    assert names["with_plan"](config) is config
    return config, missing


def test_torchtitan_gets_hybrid_sharding_and_accumulation() -> None:
    found, missing = _titan(_subject(SHARDED))
    # global batch 8 x 2 x 4 = 64 samples; 8 ranks as 2 replicas of 4 shards
    assert vars(found.training) == {
        "local_batch_size": 2,
        "global_batch_size": 64,
        "seq_len": 1024,
        "disable_cuda_graphs": True,
        "mixed_precision_param": "bfloat16",
    }
    assert found.parallelism.data_parallel_replicate_degree == 2
    assert found.parallelism.data_parallel_shard_degree == 4
    assert found.parallelism.fsdp_reshard_after_forward == "always"
    assert found.activation_checkpoint is None and found.compile.enable is False
    assert missing == (
        "The model: it must exist there by its own name; data, optimizer, learning rate and clipping are set there."
        " No gradient clipping: it clips to a norm of 1 unless training.max_norm says otherwise."
    )
    assert _titan(_subject(SHARDED, recompute="full"))[0].activation_checkpoint == "full"


def test_torchtitan_after_0_3_0_gets_its_batches_in_tokens() -> None:
    found, _ = _titan(_subject(PIPED, (StagePlan(0, 5), StagePlan(5, 10))), version="later")
    # micro-batches of 1 sample of 1024 tokens; 8 of them on 2 data-parallel ranks are 16 samples
    assert found.training.num_tokens_per_microbatch_per_dp_rank == 1024
    assert found.training.num_tokens_per_train_step == 16384
    assert found.parallelism.num_pp_microbatches == 8
    assert "local_batch_size" not in vars(found.training)
    sampled = replace(_subject(SHARDED), workload=replace(WORKLOAD, tokens_per_sample=None))
    assert "Batches for versions after 0.3.0" in _made("torchtitan", sampled)[1]


def test_torchtitan_gets_a_pipeline_whose_local_batch_holds_all_micro_batches() -> None:
    stages = (StagePlan(0, 4), StagePlan(4, 10))
    found, missing = _titan(_subject(PIPED, stages, recompute="selective"))
    assert found.training.local_batch_size == 8
    assert found.parallelism.pipeline_parallel_schedule == "1F1B"
    assert found.parallelism.pipeline_parallel_microbatch_size == 1
    assert found.parallelism.enable_sequence_parallel is True
    assert found.parallelism.module_fqns_per_model_part == [
        ["tok_embeddings", "layers.0", "layers.1", "layers.2"],
        ["layers.3", "layers.4", "layers.5", "layers.6", "layers.7", "norm", "lm_head"],
    ]
    for what in ("tensor-parallel layout", "Which blocks are recomputed"):
        assert what in missing
    # torch's pipelines reduce the gradients of fully_shard once, after the last micro-batch: that is ZeRO 1
    assert (
        "ZeRO" not in missing
        and "ZeRO 1: this is ZeRO 2" in _made("torchtitan", _subject(replace(SHARDED, zero_stage=1)))[1]
    )
    assert "ZeRO 2 in a pipeline" in _titan(_subject(replace(PIPED, zero_stage=2), stages))[1]


def test_torchtitan_captures_passes_only_where_the_plan_does() -> None:
    captured, missing = _titan(_subject(Mesh(cuda_graph=True, n_micro_batches=2)))
    assert captured.training.disable_cuda_graphs is False and "one of each micro-batch" in missing


def test_megatron_gets_uneven_stages_and_the_first_blocks_recomputed() -> None:
    stages = (StagePlan(0, 4, recomputed=(1, 2)), StagePlan(4, 10, recomputed=(4, 5)))
    text, missing = _made("megatron", _subject(PIPED, stages, recompute="selective"))
    assert text.splitlines() == [
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--micro-batch-size 1",
        "--global-batch-size 16",
        "--clip-grad 0.0",
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
    assert "--ckpt-format fsdp_dtensor" in text  # Megatron-FSDP refuses every other one
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
    assert found["gradient_clipping"] == 0.0  # left out, it is 1.0
    assert found["zero_optimization"] == {"stage": 3} and "Shards over 4 of 8 ranks" in missing
    assert found["bf16"] == {"enabled": True} and found["communication_data_type"] == "fp32"
    text, missing = _made("deepspeed", _subject(replace(SHARDED, zero_stage=2), precision="fp32", recompute="full"))
    assert (
        "bf16" not in json.loads(text) and "Recomputation (full)" in missing and "Shards over 4 of 8 ranks" in missing
    )
    text, missing = _made("deepspeed", _subject(PIPED, (StagePlan(0, 5), StagePlan(5, 10))))
    assert "pipeline of 2 stages" in missing and "Tensor parallelism in a pipeline" in missing


def test_deepspeed_gets_what_it_does_not_refuse() -> None:
    split, missing = _made("deepspeed", _subject(Mesh(dp=4, tp=2, micro_batch_size=2)))
    # without an mpu it takes all 8 ranks as data parallel, and 2 x 8 is not 8 samples
    assert json.loads(split)["tensor_parallel"] == {"autotp_size": 2}
    assert "train_batch_size" not in json.loads(split) and "train_batch_size" in missing
    piped, missing = _made(
        "deepspeed", _subject(replace(PIPED, tp=1, zero_stage=2), (StagePlan(0, 5), StagePlan(5, 10)))
    )
    assert json.loads(piped)["zero_optimization"] == {"stage": 1} and "ZeRO 2 in a pipeline" in missing
    plain, missing = _made("deepspeed", _subject(Mesh(dp=8, n_micro_batches=2)))
    # without ZeRO it knows no gradients of another type than that of the parameters
    assert "data_types" not in json.loads(plain) and "it sums them in bf16" in missing
    assert json.loads(_made("deepspeed", _subject(SHARDED))[0])["data_types"] == {"grad_accum_dtype": "fp32"}


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


def test_accelerate_keeps_tied_weights_tied() -> None:
    # loaded by the first process they are copied to a model on the meta device, which has lost what is tied
    for ties in (False, True):
        text, missing = _made("accelerate", replace(_subject(SHARDED), ties_weights=ties))
        assert safe_load(text)["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] is not ties
        assert ("as it unties weights" in missing) is ties


def test_accelerate_gets_degrees_that_multiply_to_its_processes() -> None:
    piped, missing = _made("accelerate", _subject(PIPED, (StagePlan(0, 5), StagePlan(5, 10)), n_hosts=2))
    found = safe_load(piped)
    # 2 shards x 2 of tensor parallelism; the other stage of the pipeline is on the other host
    assert found["num_processes"] == 4 and found["num_machines"] == 1 and "those of one stage" in missing
    assert "Gradients reduced in fp32" in missing
    split, missing = _made("accelerate", _subject(Mesh(dp=4, tp=2)))
    assert safe_load(split)["parallelism_config"]["parallelism_config_dp_shard_size"] == 4
    assert "Replicated parameters beside tensor parallelism" in missing
    assert safe_load(_made("accelerate", _subject(Mesh()))[0])["distributed_type"] == "NO"
    unnamed = replace(_subject(SHARDED), classes=("",))
    assert safe_load(_made("accelerate", unnamed)[0])["fsdp_config"]["fsdp_auto_wrap_policy"] == "NO_WRAP"


@pytest.mark.parametrize("name", TARGETS)
def test_unequal_shares_are_written_as_the_first_and_said(name: str) -> None:
    shares = (BatchShare(2, 4, 2), BatchShare(2, 2, 2))
    mesh = Mesh(dp=4, micro_batch_size=4, n_micro_batches=2, shares=shares)
    subject = _subject(mesh, (*ALL, *ALL), groups=(GroupRanks(0, 1), GroupRanks(1, 1)), precision="fp64")
    text, missing = _made(name, replace(subject, workload=replace(WORKLOAD, tokens_per_sample=None)))
    assert "Unequal shares of the batch" in missing and "The precision fp64" in missing
    assert "24" not in text  # 4 x 4 x 2 = 32 samples, where the plan has 24


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


@pytest.mark.parametrize("name", TARGETS)
def test_a_model_of_synchronized_norms_is_not_to_be_converted(name: str) -> None:
    def missing(batch_norm: str) -> str:
        return _made(name, replace(_subject(SHARDED, batch_norm=batch_norm), synchronizes_batch_norm=True))[1]

    assert "convert the model" not in missing("synchronized")
    assert "beside nn.SyncBatchNorm: convert those" in missing("synchronized")
    assert "nn.SyncBatchNorm takes those of all ranks" in missing("local")


def test_emitted_pages_know_the_norms_of_the_model(tmp_path: Path) -> None:
    model = tmp_path / "norms.py"
    model.write_text(
        "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"
        "def build_model():\n    return nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4), nn.Linear(4, 2))\n"
        "def make_batch(n):\n    return torch.randn(n, 4), torch.randint(2, (n,))\n"
        "loss_fn = F.cross_entropy\n"
    )
    problem = api.make_problem(model, hw="dgx_a100_x8/2", options=Options(fix=(("dp", "2"),)))
    api.emit(problem, api.solve(problem), tmp_path / "out", targets=("deepspeed",))
    page = (tmp_path / "out" / "interop" / "deepspeed.md").read_text()
    assert "nn.SyncBatchNorm" in page and "convert the model" not in page


def test_files_are_a_configuration_and_a_page_for_each_target() -> None:
    files = interop_files(("deepspeed", "megatron"), _subject(SHARDED))
    assert sorted(files) == [
        f"interop/{name}" for name in ("deepspeed.json", "deepspeed.md", "megatron.md", "megatron.txt")
    ]
    assert "## Not expressed\n\n- The model" in files["interop/deepspeed.md"]


def test_a_wrong_target_or_a_missing_folder_is_refused() -> None:
    known = "torchtitan, megatron, deepspeed, accelerate"
    with pytest.raises(UsageError, match=f"found 'jax'\n  expected: one of {known}\n  fix: use one of these$"):
        check_targets(("jax",), out=Path("x"))
    with pytest.raises(UsageError, match='found .mgatron.; did you mean "megatron"\\?\n.*\n  fix: use one of these$'):
        check_targets(("mgatron",), out=None)
    with pytest.raises(UsageError, match="add --out DIR"):
        check_targets(("megatron",), out=None)
