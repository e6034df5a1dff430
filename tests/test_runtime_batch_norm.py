"""BatchNorm under data parallelism: local or synchronized, as in one process that does the same, in float64."""

import dataclasses
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from distributed import tiny_norm
from distributed.launch import run_ranks
from distributed.programs import check_programs, make_plan, write_programs
from torch import nn
from torch.nn import functional as F

from autoplan.runtime import Config, ParallelModel, PlainTraining, build_rank_mesh, check_steps
from autoplan.runtime.stages.batch_norm import synchronize_batch_norm

FAMILIES = Path(__file__).parent / "families"
N_STEPS = 2
BLOCKS = tuple(f"blocks.{index}" for index in range(tiny_norm.N_BLOCKS))
RESNET_BLOCKS = ("groups.0.0", "groups.0.1", "groups.1.0", "groups.1.1", "groups.1.2")
PLAIN = Config(precision="fp64", micro_batch_size=2, n_micro_batches=2, blocks=BLOCKS)
ZERO_3 = {"zero_stage": 3, "zero_shard_degree": 2}
RESNET = {"blocks": RESNET_BLOCKS}


def plan(**fields):
    return dataclasses.replace(PLAIN, **fields)


def in_both_ways(cases):
    return {
        f"{name}, {way}": (model, dataclasses.replace(config, batch_norm=way))
        for name, (model, config) in cases.items()
        for way in ("local", "synchronized")
    }


TWO_RANKS = in_both_ways(
    {
        "ddp": ("tiny_norm", plan(dp=2)),
        "zero 1, three micro-batches": ("tiny_norm", plan(dp=2, zero_stage=1, zero_shard_degree=2, n_micro_batches=3)),
        "zero 3 with recompute": ("tiny_norm", plan(dp=2, recompute=BLOCKS[1:], **ZERO_3)),
        "pp 2 with recompute": ("tiny_norm", plan(pp=2, n_micro_batches=3, recompute=BLOCKS)),
        "the user's own checkpoint": ("own_checkpoint", plan(dp=2)),
        "nn.SyncBatchNorm": ("converted", plan(dp=2)),
        "resnet zero 3 with recompute": ("resnet", plan(dp=2, recompute=RESNET_BLOCKS, **ZERO_3, **RESNET)),
    }
)
# Each is a part of one above: without recomputation, without shards, or of another model.
MORE_ON_TWO_RANKS = in_both_ways(
    {
        "zero 3": ("tiny_norm", plan(dp=2, **ZERO_3)),
        "ddp with recompute": ("tiny_norm", plan(dp=2, recompute=BLOCKS)),
        "pp 2": ("tiny_norm", plan(pp=2, n_micro_batches=3)),
        "resnet ddp": ("resnet", plan(dp=2, **RESNET)),
    }
)
FOUR_RANKS = in_both_ways(
    {
        "hsdp 2 x 2": ("tiny_norm", plan(dp=4, **ZERO_3)),
        "pp 2 x zero 3": ("tiny_norm", plan(pp=2, dp=2, **ZERO_3, recompute=BLOCKS)),
    }
)


def converted():
    return nn.SyncBatchNorm.convert_sync_batchnorm(tiny_norm.build_model())


def model_file_of(name):
    if name == "tiny_norm":
        return tiny_norm
    if name == "own_checkpoint":
        return SimpleNamespace(**{**vars(tiny_norm), "build_model": lambda: tiny_norm.Classifier(own_checkpoint=True)})
    if name == "converted":
        return SimpleNamespace(**{**vars(tiny_norm), "build_model": converted})
    spec = importlib.util.spec_from_file_location(name, FAMILIES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(name, config, device_type):
    """Differences of each step, and the program's buffers after the last one."""
    model_file = model_file_of(name)
    generated = tiny_norm.parallel_model(config.n_stages) if config.pp > 1 else None
    mesh = build_rank_mesh(config, device_type)
    options = {"seed": 7, "learning_rate": 1e-2}
    model = ParallelModel(config, model_file, generated, mesh=mesh, **options)
    plain = PlainTraining(config, model_file, build_device=model.full_build_device, device=mesh.device, **options)
    steps = list(check_steps(model, plain, model_file, n_steps=N_STEPS, seed=3))
    assert plain.written_buffers
    buffers = {name: buffer.tolist() for name, buffer in model.full_buffers()}
    return [dataclasses.astuple(step.differences) for step in steps], buffers, steps[-1].loss


def train_all(cases, device_type="cpu"):
    return {name: train(model, config, device_type) for name, (model, config) in cases.items()}


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(train_all, 2, TWO_RANKS, timeout_s=200.0)


def assert_exact(found):
    for name, (steps, _, _) in found.items():
        assert len(steps) == N_STEPS, (name, steps)
        assert max(max(step) for step in steps) <= 1e-9, (name, steps)


def test_two_ranks_train_as_one_process_that_normalizes_in_the_same_way(two_ranks):
    for found in two_ranks:
        assert_exact(found)


@pytest.mark.nightly
def test_two_ranks_under_more_plans_train_as_one_process_that_normalizes_in_the_same_way():
    for found in run_ranks(train_all, 2, MORE_ON_TWO_RANKS, timeout_s=200.0):
        assert_exact(found)


@pytest.mark.nightly
def test_four_ranks_train_as_one_process_that_normalizes_in_the_same_way():
    for found in run_ranks(train_all, 4, FOUR_RANKS, timeout_s=200.0):
        assert_exact(found)


def test_running_statistics_are_equal_on_all_ranks_only_where_synchronized(two_ranks):
    for name in TWO_RANKS:
        if "pp 2" not in name:
            first, second = (found[name][1] for found in two_ranks)
            same = [first[key] == second[key] for key in first if key.endswith(("running_mean", "_var"))]
            assert same
            assert all(same) == ("synchronized" in name), name
            assert any(same) == ("synchronized" in name), name


def test_running_statistics_advance_once_per_micro_batch_also_under_recompute(two_ranks):
    for name, (model, config) in TWO_RANKS.items():
        if model == "own_checkpoint":
            continue  # recomputed by the user's own forward, they advance twice, as they do in one process
        for found in two_ranks:
            counts = [count for key, count in found[name][1].items() if key.endswith("num_batches_tracked")]
            assert counts == [N_STEPS * config.n_micro_batches] * len(counts), name
            assert counts


def test_the_two_ways_are_two_different_trainings(two_ranks):
    losses = [two_ranks[0][f"ddp, {way}"][2] for way in ("local", "synchronized")]
    assert abs(losses[0] - losses[1]) > 1e-4


def generated(name, *, way, **mesh):
    fields = {"dp": 2, "micro_batch_size": 2, "n_micro_batches": 2, **mesh}
    return {f"{name}_{way}": ("resnet", dataclasses.replace(make_plan("resnet", **fields), batch_norm=way))}


@pytest.mark.parametrize("which", ["by default", pytest.param("others", marks=pytest.mark.nightly)])
def test_generated_stages_and_shards_of_channels_normalize_as_one_process_does(tmp_path, which):
    zero_3_again = {"recompute": "full", "zero_stage": 3, "zero_shard_degree": 2}
    cases = {
        "by default": {
            **generated("pp2_zero3_recompute", way="synchronized", pp=2, **zero_3_again),
            **generated("tp2_recompute", way="local", tp=2, sharding="R", recompute="full"),
        },
        "others": {
            **generated("pp2", way="local", pp=2),
            **generated("tp2", way="synchronized", tp=2, sharding="R"),
        },
    }[which]
    rows = write_programs(tmp_path, cases)
    for differences in run_ranks(check_programs, 4, str(tmp_path), rows, N_STEPS, timeout_s=200.0):
        assert set(differences) == set(cases)
        for name, steps in differences.items():
            assert len(steps) == N_STEPS, name
            assert max(max(step) for step in steps) <= 1e-9, (name, steps)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_two_gpus_train_as_one_that_normalizes_in_the_same_way():
    for found in run_ranks(train_all, 2, TWO_RANKS | MORE_ON_TWO_RANKS, "cuda", backend="nccl", timeout_s=200.0):
        assert_exact(found)


SHAPES = {"vectors": (6, 4), "sequences": (6, 4, 5), "images": (6, 4, 3, 3)}


class Norm(nn.Module):
    """A module of the user's that calls the function by itself."""

    def forward(self, *args, **kwargs):
        return F.batch_norm(*args, **kwargs)


def synchronized_norm():
    norm = Norm()
    synchronize_batch_norm(norm, (), [dist.group.WORLD])
    return norm


def normalize(norm, x, arguments, sign):
    """Output, gradients of x, weight and bias, and running statistics, of a loss that differs between samples."""
    weight, bias, mean, variance = (tensor.clone() for tensor in arguments)
    x = x.clone().requires_grad_()
    y = norm(x, mean, variance, weight.requires_grad_(), bias.requires_grad_(), True, 0.3, 1e-3)
    (y.sin() * sign).sum().backward()
    return y.detach(), x.grad, weight.grad, bias.grad, mean, variance


def compare_with_joint_batch():
    """On one rank: differences from F.batch_norm over the samples of both, whose own gradients are summed."""
    rank, largest = dist.get_rank(), {}
    for name, shape in SHAPES.items():
        torch.manual_seed(0)
        x, sign = torch.randn(shape, dtype=torch.float64) * 3 + 1, torch.randn(shape, dtype=torch.float64)
        arguments = [torch.rand(4, dtype=torch.float64) + 0.5 for _ in range(4)]
        joint = normalize(Norm(), x, arguments, sign)
        own = slice(0, 2) if rank == 0 else slice(2, 6)  # uneven on purpose
        y, dx, d_weight, d_bias, *statistics = normalize(synchronized_norm(), x[own], arguments, sign[own])
        for gradient in (d_weight, d_bias):
            dist.all_reduce(gradient)
        expected = (joint[0][own], joint[1][own], *joint[2:])
        found = (y, dx, d_weight, d_bias, *statistics)
        largest[name] = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    return largest


def test_synchronized_batch_norm_equals_batch_norm_of_all_samples_forward_and_gradient():
    for largest in run_ranks(compare_with_joint_batch, 2):
        assert set(largest) == set(SHAPES)
        assert max(largest.values()) <= 1e-12


def normalize_one_value():
    norm = synchronized_norm()
    with pytest.raises(ValueError, match="more than one value per channel"):
        norm(torch.ones(1, 2), None, None, training=True)
    return norm(torch.ones(1, 2), torch.zeros(2), torch.ones(2), training=False, eps=3.0).tolist()


def test_one_value_per_channel_is_refused_and_evaluation_takes_the_running_statistics():
    assert run_ranks(normalize_one_value, 1) == [[[0.5, 0.5]]]


def test_config_refuses_an_unknown_way():
    with pytest.raises(ValueError, match="batch_norm: found 'global', expected one of local, synchronized"):
        Config(batch_norm="global")
