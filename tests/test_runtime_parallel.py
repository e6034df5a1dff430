"""A model under every kind of plan trains as in one process: two AdamW steps in float64."""

import dataclasses
import os
import time

import pytest
import torch
import torch.distributed as dist
from distributed import tiny_gpt
from distributed.launch import run_ranks
from distributed.tiny_parallel import parallel_model

from autoplan.runtime import Config, ParallelModel, PlainTraining, build_rank_mesh, compare, global_batch, local_batch
from autoplan.runtime.building.construction import one_process_at_a_time

BLOCKS = tuple(f"blocks.{layer}" for layer in range(tiny_gpt.N_LAYERS))
PLAIN = Config(precision="fp64", micro_batch_size=2, n_micro_batches=3, blocks=BLOCKS)
TOLERANCE = 1e-9


def plan(**fields):
    return dataclasses.replace(PLAIN, **fields)


TWO_RANKS = {
    "zero 0": plan(dp=2),
    "zero 0, one micro-batch": plan(dp=2, n_micro_batches=1),
    "zero 1": plan(dp=2, zero_stage=1, zero_shard_degree=2),
    "zero 2": plan(dp=2, zero_stage=2, zero_shard_degree=2),
    "zero 3": plan(dp=2, zero_stage=3, zero_shard_degree=2),
    "zero 3 with recompute": plan(dp=2, zero_stage=3, zero_shard_degree=2, recompute=BLOCKS[1:]),
    "tp 2": plan(tp=2),
    "tp 2 with recompute": plan(tp=2, recompute=BLOCKS),
    "pp 2 gpipe": plan(pp=2, schedule="gpipe"),
    "pp 2 1f1b": plan(pp=2, schedule="1f1b"),
    "pp 2 1f1b with recompute": plan(pp=2, schedule="1f1b", recompute=BLOCKS[:3]),
    "pp 2 interleaved": plan(pp=2, n_chunks=2, schedule="interleaved", n_micro_batches=4),
    "pp 2 zero-bubble V": plan(pp=2, n_chunks=2, schedule="zero_bubble_v"),
    "pp 2 received ahead": plan(pp=2, schedule="interleaved", n_micro_batches=4),
}
LOWER_PRECISIONS = {
    "bf16, zero 2": plan(dp=2, zero_stage=2, zero_shard_degree=2, precision="bf16"),
    "bf16, tp 2": plan(tp=2, precision="bf16"),
    "bf16, pp 2": plan(pp=2, precision="bf16"),
    "bf16, pp 2 zero-bubble V": plan(pp=2, n_chunks=2, schedule="zero_bubble_v", precision="bf16"),
    "fp16, zero 3": plan(dp=2, zero_stage=3, zero_shard_degree=2, precision="fp16"),
    "fp32, pp 2": plan(pp=2, precision="fp32"),
}
FOUR_RANKS = {
    "hsdp 2 x 2, zero 1": plan(dp=4, zero_stage=1, zero_shard_degree=2),
    "hsdp 2 x 2, zero 3": plan(dp=4, zero_stage=3, zero_shard_degree=2),
    "tp 2 x zero 3": plan(tp=2, dp=2, zero_stage=3, zero_shard_degree=2),
    "pp 2 x zero 2": plan(pp=2, dp=2, zero_stage=2, zero_shard_degree=2),
    "pp 2 interleaved x zero 1 with recompute": plan(
        pp=2,
        n_chunks=2,
        dp=2,
        zero_stage=1,
        zero_shard_degree=2,
        schedule="interleaved",
        n_micro_batches=4,
        recompute=BLOCKS[1:],
    ),
    "pp 2 interleaved x zero 3": plan(
        pp=2, n_chunks=2, dp=2, zero_stage=3, zero_shard_degree=2, schedule="interleaved", n_micro_batches=4
    ),
    "pp 2 zero-bubble V x zero 2": plan(
        pp=2, n_chunks=2, dp=2, zero_stage=2, zero_shard_degree=2, schedule="zero_bubble_v", n_micro_batches=5
    ),
    "pp 2 zero-bubble V x tp 2": plan(pp=2, n_chunks=2, tp=2, schedule="zero_bubble_v"),
    "pp 4": plan(pp=4, n_micro_batches=5),
    "pp 4 received ahead": plan(pp=4, schedule="interleaved", n_micro_batches=8),
}
MORE_ON_FOUR_RANKS = {
    "hsdp 2 x 2, zero 2": plan(dp=4, zero_stage=2, zero_shard_degree=2),
    "pp 2 x zero 0": plan(pp=2, dp=2),
    "pp 2 x zero 1": plan(pp=2, dp=2, zero_stage=1, zero_shard_degree=2),
    "pp 2 gpipe x zero 1": plan(pp=2, dp=2, schedule="gpipe", zero_stage=1, zero_shard_degree=2),
    "pp 2 x zero 3": plan(pp=2, dp=2, zero_stage=3, zero_shard_degree=2),
    "pp 2 x tp 2": plan(pp=2, tp=2),
}
COMPILED_TP = {"compiled tp 2 with recompute": plan(tp=2, compile=True, recompute=BLOCKS)}
COMPILED = {
    "compiled zero 3 with recompute": plan(dp=2, zero_stage=3, zero_shard_degree=2, compile=True, recompute=BLOCKS[:2]),
    "compiled pp 2": plan(pp=2, compile=True),
}
EIGHT_RANKS = {
    "pp 2 x tp 2 x zero 3": plan(pp=2, tp=2, dp=2, zero_stage=3, zero_shard_degree=2, recompute=BLOCKS),
    "pp 2 interleaved x tp 2 x zero 2": plan(
        pp=2, n_chunks=2, tp=2, dp=2, zero_stage=2, zero_shard_degree=2, schedule="interleaved", n_micro_batches=4
    ),
    "pp 2 zero-bubble V x tp 2 x zero 1": plan(
        pp=2, n_chunks=2, tp=2, dp=2, zero_stage=1, zero_shard_degree=2, schedule="zero_bubble_v", n_micro_batches=4
    ),
}


def largest_difference(config, max_grad_norm=None, device_type="cpu"):
    """Train two steps beside plain training; the largest difference of losses, norms, gradients and parameters."""
    generated = parallel_model(config.tp, config.n_stages) if config.tp * config.pp > 1 else None
    mesh = build_rank_mesh(config, device_type)
    options = {"seed": 7, "learning_rate": 1e-2, "max_grad_norm": max_grad_norm}
    model = ParallelModel(config, tiny_gpt, generated, mesh=mesh, **options)
    plain = PlainTraining(config, tiny_gpt, build_device=model.full_build_device, device=mesh.device, **options)
    worst = 0.0
    for step in range(2):
        batch = global_batch(tiny_gpt.make_batch, batch_size=config.global_batch_size, seed=7, step=step)
        loss = model.step(local_batch(batch, config=config, dp_rank=mesh.dp_rank)).item()
        worst = torch.inf if _keeps_graphs(model) else worst
        differences = compare(model, plain, loss=loss, plain_loss=plain.step(batch))
        if config.precision != "fp64":
            is_wrong = differences.exceeds(differences.tolerances(config, step=step, learning_rate=1e-2))
            worst = max(worst, torch.inf if is_wrong else 0.0)
        else:
            worst = max(worst, *dataclasses.astuple(differences), _norm_error(model, plain, max_grad_norm))
    return worst


def _keeps_graphs(model):
    """Whether a split backward pass left what was saved for it to the outputs that torch keeps until the next step."""
    stages = model._pipeline._schedule._stages if model.config.splits_backward else ()
    return any(output.grad_fn is not None for stage in stages for output in stage.output_chunks)


def _norm_error(model, plain, max_grad_norm):
    """`grad_norm` is before clipping, the gradients of plain training are after it."""
    if max_grad_norm is not None:
        return 0.0 if model.grad_norm > max_grad_norm else torch.inf
    return abs(model.grad_norm - torch.nn.utils.get_total_norm([p.grad for p in plain.model.parameters()])).item()


def _train_all(configs, max_grad_norm, device_type):
    differences = {}
    for name, config in configs.items():
        torch.compiler.reset()
        differences[name] = largest_difference(config, max_grad_norm, device_type)
    return differences


def _assert_exact(configs, max_grad_norm=None, device_type="cpu"):
    n_ranks = next(iter(configs.values())).n_ranks
    backend = "gloo" if device_type == "cpu" else "nccl"
    results = run_ranks(_train_all, n_ranks, configs, max_grad_norm, device_type, backend=backend, timeout_s=240.0)
    first = results[0]
    assert results == [first] * len(results)
    assert {name: error for name, error in first.items() if not error <= TOLERANCE} == {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dp": 2, "zero_stage": 3, "zero_shard_degree": 2}, "zero_stage: found 3, expected 0, 1 or 2"),
        ({"recompute": BLOCKS[:1]}, "recompute: found .* expected none with schedule 'zero_bubble_v'"),
        ({"compile": True}, "compile: found True, expected none with schedule 'zero_bubble_v'"),
    ],
)
def test_a_split_backward_pass_refuses_what_it_does_not_go_with(fields, message):
    with pytest.raises(ValueError, match=message):
        plan(pp=2, n_chunks=2, schedule="zero_bubble_v", **fields)


def test_two_ranks_train_as_one_process_under_every_zero_stage_and_schedule():
    _assert_exact(TWO_RANKS)


@pytest.mark.nightly
@pytest.mark.parametrize("configs", [FOUR_RANKS, MORE_ON_FOUR_RANKS], ids=["default", "more"])
def test_four_ranks_train_as_one_process_under_hybrid_meshes(configs):
    _assert_exact(configs)


@pytest.mark.nightly
def test_clipping_on_a_three_axis_mesh_equals_clipping_in_one_process():
    # The norms are between 0.5 and 3, so a bound of 0.05 clips every step; `_norm_error` checks that it does.
    _assert_exact(EIGHT_RANKS, max_grad_norm=0.05)


@pytest.mark.nightly
def test_eight_ranks_train_as_one_process_with_all_axes_at_once():
    _assert_exact(EIGHT_RANKS)


def test_lower_precisions_train_as_one_float32_process_within_their_tolerance():
    _assert_exact(LOWER_PRECISIONS)


@pytest.mark.parametrize(
    "configs", [COMPILED, pytest.param(COMPILED_TP, marks=pytest.mark.nightly)], ids=["default", "tensor parallel"]
)
def test_compiled_plans_train_as_one_process(configs):
    _assert_exact(configs)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_two_gpus_train_as_one_over_nccl():
    _assert_exact(TWO_RANKS | LOWER_PRECISIONS | COMPILED_TP | COMPILED, device_type="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 GPUs")
def test_four_gpus_train_as_one_over_nccl():
    _assert_exact(FOUR_RANKS | MORE_ON_FOUR_RANKS, device_type="cuda")


def in_turns():
    """On one of three ranks, the last of which is alone on its host: when its turn began and ended."""
    rank = dist.get_rank()
    os.environ |= {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "1" if rank == 2 else "2"}
    with one_process_at_a_time(True, torch.device("cpu")):
        began_s = time.monotonic()
        time.sleep(0.05)
        ended_s = time.monotonic()
    total = torch.ones(1)
    dist.all_reduce(total)  # would meet another rank's barrier
    return began_s, ended_s, total.item()


def test_processes_take_turns_on_hosts_with_different_numbers_of_them():
    found = run_ranks(in_turns, 3, timeout_s=30.0)
    (_, first_ended_s, _), (second_began_s, _, _), _ = found
    assert first_ended_s <= second_began_s
    assert [total for *_, total in found] == [3.0, 3.0, 3.0]
