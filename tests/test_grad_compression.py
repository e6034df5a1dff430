"""Compressed reductions of gradients: against reductions by hand, torch's own DDP with its hook, and in training."""

import contextlib
import io
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import tiny_gpt
from distributed.launch import run_program, run_ranks
from distributed.programs import graph_of, make_plan
from distributed.tiny_parallel import parallel_model
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import autoplan
from autoplan import cli
from autoplan.checks.options import check_options
from autoplan.checks.plan import check_plan
from autoplan.codegen import generate
from autoplan.cost.grad_compression import Compression, n_launches, narrow_reduction, power_sgd_reduction
from autoplan.errors import InputError, UsageError
from autoplan.hardware import NO_SHARDING, Device, load_hardware_profile
from autoplan.options import Options
from autoplan.parallel_plan import Mesh
from autoplan.rules import load_rules
from autoplan.runtime import (
    Checkpoints,
    Config,
    ParallelModel,
    build_rank_mesh,
    global_batch,
    load_checkpoint,
    local_batch,
)
from autoplan.runtime.building.construction import build_whole_model

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
    kept = sum(
        t.numel() for kind in (state.error_dict, state.p_memory_dict, state.q_memory_dict) for t in kind.values()
    )
    matrices = [(p.shape[0], p[0].numel()) for p in expected.values()]
    priced = power_sgd_reduction(matrices, item_bytes=8, rank=model.config.powersgd_rank, device=TOY)
    assert 8 * kept == priced.state_bytes
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


N_SAVED, N_MORE = 5, 3


def _resumed(folder):
    """Losses after a checkpoint: of the run that wrote it, of one that goes on, and of one in other blocks."""
    config = Config(dp=2, precision="fp64", micro_batch_size=2, blocks=BLOCKS, **POWER_SGD)
    mesh = build_rank_mesh(config, "cpu")

    def started(config, path=None):
        model = ParallelModel(config, tiny_gpt, mesh=mesh, learning_rate=1e-2)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            if path is not None:
                load_checkpoint(model, path)
        return model, said.getvalue()

    def losses(model, n_steps):
        return [model.step(_batch(tiny_gpt, config, model.n_steps)).item() for _ in range(n_steps)]

    first, _ = started(config)
    losses(first, N_SAVED)
    checkpoints = Checkpoints(first, folder)
    checkpoints.save()
    path = checkpoints.wait()
    checkpoints.close()
    (second, said), (third, of_other_blocks) = started(config, path), started(replace(config, blocks=()), path)
    return [losses(model, N_MORE) for model in (first, second, third)], said, of_other_blocks


def _said_by_one_rank(folder):
    model = ParallelModel(Config(precision="fp64"), tiny_gpt, mesh=build_rank_mesh(Config(), "cpu"))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        load_checkpoint(model, Path(folder, f"step-{N_SAVED:08d}"))
    return said.getvalue()


# ---------------------------------------------------------------- one launch for all that takes two ranks


def _on_two_ranks(folder):
    differences = [_difference_from_hand(stage) for stage in (0, 1, 2, 3)]
    return differences, _differences_from_ddp(), _training(), _resumed(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def by_rank(folder):
    return run_ranks(_on_two_ranks, 2, str(folder))


def test_bf16_gradients_are_those_rounded_and_reduced_by_hand_under_every_zero_stage(by_rank):
    assert max(difference for of_stages, *_ in by_rank for difference in of_stages) <= 1e-9


def test_power_sgd_trains_as_torch_ddp_with_its_own_hook(by_rank):
    for _, rows, *_ in by_rank:
        assert max(of_ddp for of_ddp, _ in rows) <= 1e-9
        assert max(of_whole for _, of_whole in rows) > 1e-4  # what both do is another thing than the whole gradient


def test_a_training_with_power_sgd_converges_and_replicas_stay_equal(by_rank):
    for _, _, (losses, are_equal), _ in by_rank:
        assert are_equal and losses[-1] < 0.2 * losses[0]


def test_a_run_with_power_sgd_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(by_rank):
    for *_, ((undisturbed, resumed, in_other_blocks), said, _) in by_rank:
        assert resumed == undisturbed and said == ""
        assert in_other_blocks[0] == pytest.approx(undisturbed[0], abs=1e-9)  # the loss before the first reduction
        assert abs(in_other_blocks[-1] - undisturbed[-1]) > 1e-6  # which are whole


def test_under_another_plan_or_number_of_ranks_what_power_sgd_remembers_is_dropped_and_that_is_said(by_rank, folder):
    lines = [said for *_, (_, _, said) in by_rank] + run_ranks(_said_by_one_rank, 1, str(folder))
    assert ["is dropped, and their steps are counted from 0" in line for line in lines] == [True, False, True]


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


# ---------------------------------------------------------------- the price, by pencil

TOY = Device("toy", (("fp32", 1e12),), 10**12, 1e9, 1.0, 1.0, 0.0, 1.0, 0.0, NO_SHARDING)  # 1 GB/s, a second per kernel


def test_bf16_halves_what_is_sent_and_takes_two_casts():
    # 1,000 float32 elements over 4 shards: 6,000 bytes to round, 250 x 6 to widen, each at half the rate; 3 kernels
    found = narrow_reduction(1000, item_bytes=4, n_shards=4, device=TOY, mixed_fraction=0.5)
    assert found.wire_bytes == (2000,) and found.state_bytes == 0
    assert found.kernels_s == pytest.approx((6000 + 1500) / 0.5 / 1e9 + 3.0)
    assert found.reducing_bytes == 2000 + 500
    # whole on every rank: all are widened, and divided in bf16 (read and written)
    whole = narrow_reduction(1000, item_bytes=4, n_shards=1, device=TOY, mixed_fraction=0.5)
    assert whole.kernels_s == pytest.approx((12000 / 0.5 + 4000) / 1e9 + 3.0)
    assert whole.reducing_bytes == 2000


def test_power_sgd_sends_p_and_q_of_what_they_are_smaller_than():
    # 100 x 50 and rank 2: 300 numbers instead of 5,000; a bias of 100 and a matrix of 4 x 6 (40 against 24) are whole
    found = power_sgd_reduction([(100, 50), (100, 1), (4, 6)], item_bytes=4, rank=2, device=TOY)
    assert found.wire_bytes == (4 * 124, 4 * 200, 4 * 100)
    assert found.state_bytes == 4 * (5124 + 300)
    assert found.reducing_bytes == 4 * (2 * 5124 + 124)
    # 6 kernels, 3 products, twice Gram-Schmidt of two columns: 3 each, 4 between them
    launches = 6 + 3 + 2 * (3 * 2 + 4)
    assert n_launches([2]) == launches
    moved_bytes = 4 * (8 * 5124 + 6 * 124 + 3 * 5000)
    assert found.kernels_s == pytest.approx(moved_bytes / 1e9 + launches)


def test_compression_is_left_out_where_gradients_cannot_be_compressed():
    bf16, power_sgd = Compression("bf16"), Compression("powersgd", 2)
    sharded, hybrid = Mesh(dp=4, zero_stage=2, zero_shard_degree=4), Mesh(dp=4, zero_stage=2, zero_shard_degree=2)
    assert [bf16.under(mesh).name for mesh in (Mesh(), Mesh(dp=4), sharded, hybrid)] == ["none", "bf16", "bf16", "none"]
    found = [power_sgd.under(mesh).name for mesh in (Mesh(), Mesh(dp=4), sharded)]
    assert found == ["none", "powersgd", "none"]


# ---------------------------------------------------------------- plans


def test_a_plan_compresses_only_where_that_is_asked_for():
    graph_file = Path(__file__).parent.parent / "examples" / "mlp.py"
    asked = {"grad_compression": "powersgd", "powersgd_rank": "2", "dp": "8"}
    results = [
        autoplan.plan(graph_file, hw="dgx_a100_x8", global_batch=64, fix=tuple(fix.items()))
        for fix in ({"dp": "8"}, {"dp": "8", "grad_compression": "bf16"}, asked)
    ]
    plans = [result.best.plan for result in results]
    assert [plan.grad_compression for plan in plans] == ["none", "bf16", "powersgd"]
    assert (plans[2].powersgd_rank, plans[2].mesh.zero_stage) == (2, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"grad_compression": "int8"}, "grad_compression: found 'int8'\n  expected: one of none, bf16, powersgd"),
        ({"grad_compression": "powersgd"}, "powersgd_rank: found None\n  expected: 1 or more"),
        ({"grad_compression": "bf16", "powersgd_rank": 4}, "powersgd_rank: found 4"),
        ({"grad_compression": "powersgd", "powersgd_rank": 4, "precision": "fp16"}, "precision: found 'fp16'"),
    ],
)
def test_a_plan_that_was_edited_into_what_cannot_be_is_refused(fields, message):
    plan = make_plan("mlp", dp=2)
    with pytest.raises(InputError, match=message):
        check_plan(replace(plan, **fields), graph_of("mlp"), load_hardware_profile("dgx_a100_x8"))


def test_a_program_says_how_gradients_are_reduced_and_is_checked_without():
    plain = make_plan("mlp", dp=2)
    chosen = replace(plain, grad_compression="powersgd", powersgd_rank=2)
    text, other = (
        generate(graph_of("mlp"), plan, rules=load_rules(), header="", model_text="", overrides={}).files[0][1]
        for plan in (chosen, plain)
    )
    assert 'grad_compression="powersgd"' in text and "powersgd_rank=2" in text and "powersgd_start_step=100" in text
    assert "if arguments.check:  # one process" in text and "grad_compression" not in other


@pytest.mark.nightly
def test_an_emitted_program_trains_and_is_exact_when_it_is_checked(tmp_path):
    file, folder = Path(__file__).parent.parent / "examples" / "mlp.py", tmp_path / "program"
    fix = "dp=2,grad_compression=powersgd,powersgd_rank=2"
    options = ["--hw", "dgx_a100_x8/2", "--global-batch", "16", "--set", "width=64", "--fix", fix, "--out", str(folder)]
    assert cli.run(["plan", str(file), *options]) == 0
    script = folder / "train.py"
    script.write_text(script.read_text().replace("powersgd_start_step=100", "powersgd_start_step=2"))
    run_program(folder, 2, "--device", "cpu", "--steps", "5")
    run_program(folder, 2, "--device", "cpu", "--steps", "2", "--check", "--dtype", "float64")


@pytest.mark.parametrize(
    ("fix", "options", "message"),
    [
        ({"grad_compression": "bf8"}, {}, "expected: one of none, bf16, powersgd"),
        ({"grad_compression": "bf16", "dp": "1"}, {}, "one rank reduces nothing"),
        ({"grad_compression": "powersgd", "zero": "2"}, {}, "expected: zero=0"),
        ({"grad_compression": "powersgd"}, {"precision": "fp16"}, "gradients that overflow"),
        ({"grad_compression": "bf16", "powersgd_rank": "2"}, {}, "grad_compression=powersgd beside it"),
    ],
)
def test_options_that_do_not_go_together_are_refused(fix, options, message):
    with pytest.raises(UsageError, match=message):
        check_options(Options(fix=tuple(fix.items()), **options))


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
