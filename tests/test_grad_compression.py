"""Compressed reductions of gradients: against reductions by hand, torch's own DDP with its hook, and in training."""

import types

import pytest
import torch
import torch.distributed as dist
from distributed import tiny_gpt
from distributed.launch import run_ranks
from distributed.tiny_parallel import parallel_model
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from autoplan.runtime import Config, ParallelModel, build_rank_mesh, global_batch, local_batch
from autoplan.runtime.construction import build_whole_model

BLOCKS = tuple(f"blocks.{layer}" for layer in range(tiny_gpt.N_LAYERS))
N_MICRO_BATCHES, WIDTH, N_CLASSES = 3, 12, 5
CPU = torch.device("cpu")


# ---------------------------------------------------------------- a model file with one group of parameters


def build_model():
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, N_CLASSES, bias=False))


def make_batch(batch_size):
    return torch.randn(batch_size, WIDTH), torch.randint(N_CLASSES, (batch_size,))


def loss_fn(outputs, targets):
    return F.cross_entropy(outputs, targets)


MLP = types.SimpleNamespace(build_model=build_model, make_batch=make_batch, loss_fn=loss_fn)


def _batch(file, config, step):
    batch = global_batch(file.make_batch, batch_size=config.global_batch_size, seed=0, step=step)
    return local_batch(batch, config=config, dp_rank=dist.get_rank())


def _run(file, n_steps, **fields):
    config = Config(dp=2, **fields)
    model = ParallelModel(config, file, mesh=build_rank_mesh(config, "cpu"), learning_rate=1e-2)
    return model, [model.step(_batch(file, config, step)).item() for step in range(n_steps)]


# ---------------------------------------------------------------- bf16


def _narrow_mean(gradient):
    narrow = gradient.to(torch.bfloat16).div_(2)
    dist.all_reduce(narrow)
    return narrow.to(gradient.dtype)


def _difference_from_hand(zero_stage):
    """From gradients that are rounded and reduced by hand: once per step below stage 2, else per micro-batch."""
    fields = {"zero_stage": zero_stage, "zero_shard_degree": 2} if zero_stage else {}
    sizes = {"precision": "fp64", "micro_batch_size": 2, "n_micro_batches": N_MICRO_BATCHES, "blocks": BLOCKS}
    model, _ = _run(tiny_gpt, 1, grad_compression="bf16", **sizes, **fields)
    plain = build_whole_model(tiny_gpt.build_model, seed=0, dtype=torch.float64, device=CPU)
    inputs, targets = _batch(tiny_gpt, model.config, 0)
    parameters, found = dict(plain.named_parameters()), {}
    for index in range(N_MICRO_BATCHES):
        own = slice(2 * index, 2 * index + 2)
        loss = tiny_gpt.loss_fn(plain(inputs[own]), targets[own]) / N_MICRO_BATCHES
        for name, gradient in zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True):
            found[name] = found.get(name, 0.0) + (_narrow_mean(gradient) if zero_stage >= 2 else gradient)
    if zero_stage < 2:
        found = {name: _narrow_mean(gradient) for name, gradient in found.items()}
    gradients = dict(model.full_gradients())
    assert gradients.keys() == found.keys()
    return max((gradients[name] - expected).abs().max().item() for name, expected in found.items())


# ---------------------------------------------------------------- PowerSGD

POWER_SGD = {"grad_compression": "powersgd", "powersgd_rank": 2, "powersgd_start_step": 2}


def _with_ddp(n_steps, config):
    model = build_whole_model(MLP.build_model, seed=0, dtype=torch.float64, device=CPU)
    ddp = DistributedDataParallel(
        model, find_unused_parameters=True
    )  # which keeps the bucket in the order of the model
    # a group of its own: DDP's search for unused parameters sends something at the same time
    state = PowerSGDState(
        dist.new_group(), config.powersgd_rank, config.powersgd_start_step, orthogonalization_epsilon=1e-8
    )
    ddp.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    for step in range(n_steps):
        inputs, targets = _batch(MLP, config, step)
        optimizer.zero_grad()
        loss_fn(ddp(inputs.double()), targets).backward()
        optimizer.step()
    return dict(model.named_parameters()), state


def _differences_from_ddp():
    sizes = {"precision": "fp64", "micro_batch_size": 4}
    model, _ = _run(MLP, 6, **POWER_SGD, **sizes)
    expected, state = _with_ddp(6, model.config)
    assert state.compression_stats()[0] > 1.5 and state.iter == 6  # it did compress
    exact, _ = _run(MLP, 6, **sizes)
    found, whole = dict(model.full_parameters()), dict(exact.full_parameters())
    pairs = [(found[name], other.detach(), whole[name]) for name, other in expected.items()]
    return [tuple((own - other).abs().max().item() for other in others) for own, *others in pairs]


def _training():
    sizes = {"precision": "bf16", "micro_batch_size": 2, "n_micro_batches": 2, "blocks": BLOCKS}
    config = Config(dp=2, **POWER_SGD, **sizes)
    model = ParallelModel(config, tiny_gpt, mesh=build_rank_mesh(config, "cpu"), learning_rate=1e-2)
    losses = [model.step(_batch(tiny_gpt, config, 0)).item() for _ in range(30)]
    weights = torch.cat([p.detach().flatten() for _, p in model.full_parameters()])
    others = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(others, weights)
    return losses, torch.equal(*others)


# ---------------------------------------------------------------- one launch for all that takes two ranks


def _on_two_ranks():
    return [_difference_from_hand(stage) for stage in (0, 1, 2, 3)], _differences_from_ddp(), _training()


@pytest.fixture(scope="module")
def by_rank():
    return run_ranks(_on_two_ranks, 2)


def test_bf16_gradients_are_those_rounded_and_reduced_by_hand_under_every_zero_stage(by_rank):
    assert max(difference for of_stages, _, _ in by_rank for difference in of_stages) <= 1e-9


def test_power_sgd_trains_as_torch_ddp_with_its_own_hook(by_rank):
    for _, rows, _ in by_rank:
        assert max(of_ddp for of_ddp, _ in rows) <= 1e-9
        assert max(of_whole for _, of_whole in rows) > 1e-4  # what both do is another thing than the whole gradient


def test_a_training_with_power_sgd_converges_and_replicas_stay_equal(by_rank):
    for _, _, (losses, are_equal) in by_rank:
        assert are_equal and losses[-1] < 0.2 * losses[0]


def _pipeline_on_four_ranks():
    config = Config(pp=2, dp=2, precision="fp32", micro_batch_size=2, n_micro_batches=2, **POWER_SGD)
    mesh = build_rank_mesh(config, "cpu")
    model = ParallelModel(config, tiny_gpt, parallel_model(1, 2), mesh=mesh, learning_rate=1e-2)
    batch = global_batch(tiny_gpt.make_batch, batch_size=config.global_batch_size, seed=0, step=0)
    own = local_batch(batch, config=config, dp_rank=mesh.dp_rank)
    return [model.step(own).item() for _ in range(30)]


@pytest.mark.nightly
def test_stages_of_a_pipeline_compress_by_themselves():
    for losses in run_ranks(_pipeline_on_four_ranks, 4):
        assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"grad_compression": "int8"}, "expected one of none, bf16, powersgd"),
        (
            {"grad_compression": "bf16", "zero_stage": 1, "zero_shard_degree": 2},
            "zero_shard_degree: found 2, expected 4",
        ),
        ({**POWER_SGD, "zero_stage": 1, "zero_shard_degree": 4}, "zero_stage: found 1, expected 0"),
        ({**POWER_SGD, "precision": "fp16"}, "precision: found fp16"),
        ({**POWER_SGD, "powersgd_rank": 0}, "powersgd_rank: found 0"),
        ({**POWER_SGD, "powersgd_start_step": 1}, "powersgd_start_step: found 1"),
    ],
)
def test_a_program_refuses_what_does_not_go_together(fields, message):
    with pytest.raises(ValueError, match=message):
        Config(dp=4, **fields)
