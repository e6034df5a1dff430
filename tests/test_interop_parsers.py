"""Configurations read by the parsers of the programs they are for, where these are installed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import WORKLOAD

from autoplan.interop.subject import Subject
from autoplan.interop.targets import TARGETS
from autoplan.parallel_plan import Mesh, Plan, StagePlan

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

STAGES = (StagePlan(0, 5), StagePlan(5, 10))
PLANS = {
    "ddp": Plan(Mesh(dp=2, n_micro_batches=4), (StagePlan(0, 10),), recompute="full"),
    "zero_2": Plan(Mesh(dp=2, zero_stage=2, zero_shard_degree=2), (StagePlan(0, 10),), precision="fp32"),
    "zero_3": Plan(Mesh(dp=4, zero_stage=3, zero_shard_degree=2, compile=True), (StagePlan(0, 10),), recompute="full"),
    "tensor": Plan(Mesh(dp=2, tp=2, zero_stage=1, zero_shard_degree=2, sharding="S(1)"), (StagePlan(0, 10),)),
    "pipeline": Plan(Mesh(pp=2, dp=2, n_micro_batches=4, schedule="1f1b"), STAGES, grad_compression="bf16"),
    "graph": Plan(Mesh(cuda_graph=True), (StagePlan(0, 10),), precision="fp16"),
}


def _text(target: str, plan: str) -> str:
    workload = replace(WORKLOAD, tokens_per_sample=1024)
    return TARGETS[target](Subject(PLANS[plan], workload, ("", *["Block"] * 8, ""), ties_weights=True)).text


@pytest.mark.parametrize("plan", PLANS)
def test_accelerate_launch_takes_every_key(plan: str, tmp_path: Path) -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    file = tmp_path / "accelerate.yaml"
    file.write_text(_text("accelerate", plan))
    arguments = launch.launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    known = set(vars(arguments))
    taken, config, _ = launch._validate_launch_command(arguments)
    for section in (config.fsdp_config, config.parallelism_config, config.dynamo_config):
        assert section.keys() <= known
        assert all(getattr(taken, key) == value for key, value in section.items())


@pytest.mark.parametrize("plan", PLANS)
def test_deepspeed_config_takes_every_key(plan: str) -> None:
    constants = pytest.importorskip("deepspeed.runtime.constants")
    config = pytest.importorskip("deepspeed.runtime.config")
    written = json.loads(_text("deepspeed", plan))
    names = {value for name, value in vars(constants).items() if name.isupper() and isinstance(value, str)}
    assert written.keys() <= names | {"zero_optimization", "tensor_parallel"}
    written["train_batch_size"] = written["train_micro_batch_size_per_gpu"] * written["gradient_accumulation_steps"]
    found = config.DeepSpeedConfig(written)  # of one process, as no process group is there
    assert found.zero_config.stage == written["zero_optimization"]["stage"]
    assert found.gradient_clipping == 0.0
    assert found.bfloat16_config.enabled == ("bf16" in written)


@pytest.mark.parametrize("plan", PLANS)
def test_torchtitan_configurations_have_every_field(plan: str) -> None:
    configs = pytest.importorskip("torchtitan.config.configs", exc_type=ImportError)
    pytest.importorskip("torchtitan.distributed.activation_checkpoint", exc_type=ImportError)
    config = SimpleNamespace(
        training=configs.TrainingConfig(), parallelism=configs.ParallelismConfig(), compile=configs.CompileConfig()
    )
    names: dict = {}
    exec(_text("torchtitan", plan), names)
    names["with_plan"](config)  # they have slots: an unknown field is an AttributeError
    for part in (config.training, config.parallelism, config.compile):
        dataclasses.replace(part)  # checks its values again


@pytest.mark.parametrize("plan", PLANS)
def test_megatron_has_every_argument(plan: str) -> None:
    arguments = pytest.importorskip("megatron.training.arguments", exc_type=ImportError)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    parser.parse_args(shlex.split(_text("megatron", plan)))
