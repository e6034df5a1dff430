"""Checkpoints: a run goes on under another plan, and on another number of ranks, as if it had never stopped."""

import random
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from distributed import tiny_gpt
from distributed.families import family_plan  # noqa: F401  adds the families to the models
from distributed.launch import run_ranks
from distributed.programs import make_plan, write_programs
from distributed.resumed import largest_difference
from distributed.tiny_parallel import parallel_model
from torch import nn

from autoplan.runtime import (
    Checkpoints,
    Config,
    LearningRate,
    ParallelModel,
    TrainingRun,
    add_checkpoint_options,
    build_rank_mesh,
    load_checkpoint,
    train_steps,
    training_data,
)
from autoplan.runtime.checkpoints.weight_files import export_model, load_initial_weights, read_weights

TOLERANCE = 1e-9
TENSOR_PARALLEL = Config(tp=2, micro_batch_size=2, precision="fp64")
_FSDP2 = {"dp": 2, "zero_stage": 3, "zero_shard_degree": 2}
PLANS = {
    "tp2_fsdp2": {"tp": 2, "sharding": "R", **_FSDP2, "micro_batch_size": 4},
    "fsdp4": {"dp": 4, "zero_stage": 3, "zero_shard_degree": 4, "micro_batch_size": 2},
    "pp2_dp2": {"pp": 2, "dp": 2, "micro_batch_size": 2, "n_micro_batches": 2},
    "one": {"micro_batch_size": 8},
    "tp2": {"tp": 2, "sharding": "R", "micro_batch_size": 8},
    "pp2_zero1": {"pp": 2, "micro_batch_size": 2, "n_micro_batches": 4},
    "tp4": {"tp": 4, "sharding": "R", "micro_batch_size": 8},
    "one_by_2": {"micro_batch_size": 2, "n_micro_batches": 4},
    "tp2_by_2": {"tp": 2, "sharding": "R", "micro_batch_size": 2, "n_micro_batches": 4},
    "hybrid": {"dp": 4, "zero_stage": 2, "zero_shard_degree": 2, "micro_batch_size": 2},
}


def differences(root, models, chain, n_steps_each=2):
    """Train each model along a chain of plans, a few steps under each."""
    parts = [
        write_programs(root, {f"{model}__{plan}": (model, make_plan(model, **PLANS[plan])) for model in models})
        for plan in chain
    ]
    return largest_difference(root, parts, n_steps_each=n_steps_each)


FOUR_PLANS = ["tp2_fsdp2", "fsdp4", "pp2_dp2", "one"]


@pytest.mark.parametrize(
    "chain", [["tp2", "pp2_zero1"], pytest.param(FOUR_PLANS, marks=pytest.mark.nightly)], ids=["two", "four"]
)
def test_a_run_under_several_plans_in_turn_trains_as_one_process(tmp_path, chain):
    # tied head and a vocabulary that 2 does not divide; fused QKV, in blocks
    found = differences(tmp_path, ["gpt_odd"], chain)
    assert max(found.values()) <= TOLERANCE, found


MATRIX = ["gpt", "gpt_odd", "llama", "mixture", "shared_layers", "two_tower"]


@pytest.mark.nightly
@pytest.mark.parametrize("model", MATRIX)
def test_every_plan_goes_on_from_every_other(tmp_path, model):
    # every ordered pair of four plans, and the others once. One step under each, as rounding grows with their number:
    # without any checkpoint, llama in other micro-batches is 1e-13 off after 20 steps and 3e-9 after 38. The last plan
    # comes twice, since a step shows in the loss of the next.
    chain = [
        "tp2_fsdp2", "fsdp4", "pp2_dp2", "one", "tp2_fsdp2", "pp2_dp2", "fsdp4", "tp2_fsdp2", "one", "pp2_dp2",
        "tp2_fsdp2", "fsdp4", "one", "fsdp4", "tp2", "pp2_zero1", "tp4", "hybrid", "one",
        "one",
    ]  # fmt: skip
    found = differences(tmp_path, [model], chain, n_steps_each=1)
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.nightly
def test_running_statistics_go_on_under_another_plan(tmp_path):
    # micro-batches of two samples on one data-parallel rank under each plan, so that statistics are the same
    found = differences(tmp_path, ["resnet"], ["pp2_zero1", "one_by_2", "tp2_by_2", "pp2_zero1"])
    assert max(found.values()) <= TOLERANCE, found


class Samples:
    """A dataset of tokens that follow from their number."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        tokens = (torch.arange(tiny_gpt.SEQ + 1) * (index + 1)) % tiny_gpt.VOCABULARY
        return tokens[:-1], tokens[1:]


def two_groups(kind, **options):
    """A user's `build_optimizer`: matrices and the rest, with options of their own."""

    def build_optimizer(parameters):
        parameters = list(parameters)
        matrices, rest = ([p for p in parameters if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
        return kind([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}], lr=0.05, **options)

    return build_optimizer


# NAdam keeps numbers beside two tensors; Adafactor sums of rows and columns, of whole matrices only
OPTIMIZERS = {"nadam": two_groups(torch.optim.NAdam), "adafactor": torch.optim.Adafactor}
MORE_OPTIMIZERS = {
    "sgd": two_groups(torch.optim.SGD, momentum=0.9),
    "adagrad": two_groups(torch.optim.Adagrad),
    "rmsprop": two_groups(torch.optim.RMSprop, momentum=0.5, centered=True),
    "asgd": two_groups(torch.optim.ASGD),
    "adamax": two_groups(torch.optim.Adamax),
}


def train_with_dataset(optimizer, config, *options, n_steps, last=None, build_model=tiny_gpt.build_model):
    """On one rank: train up to `last` of `n_steps` steps with a dataset and a schedule; losses and learning rates."""
    parser = ArgumentParser()
    add_checkpoint_options(parser)
    model_file = SimpleNamespace(
        build_model=build_model, loss_fn=tiny_gpt.loss_fn, build_optimizer=optimizer, build_dataset=Samples
    )
    mesh = build_rank_mesh(config, "cpu")
    rates = LearningRate("cosine", n_steps, 2)
    model = ParallelModel(config, model_file, mesh=mesh, learning_rates=rates)
    data = training_data(model_file, config=config, dp_rank=mesh.dp_rank, device=mesh.device, seed=3)
    run = TrainingRun(model, parser.parse_args(options), data=data)
    found = []
    for record in train_steps(model, data, n_steps=last or n_steps):
        found.append((record.loss, record.learning_rate))
        run.ends_after(record.step)
    run.finish()
    return found


def undisturbed_and_resumed(folder, optimizers):
    """On one of two ranks, by optimizer: the same run in one go, and stopped after 7 steps under another plan."""
    zero3 = Config(dp=2, zero_stage=3, zero_shard_degree=2, n_micro_batches=2, precision="fp64")
    replicated = Config(dp=2, micro_batch_size=2, precision="fp64")
    found = {}
    for name in optimizers:
        optimizer = {**OPTIMIZERS, **MORE_OPTIMIZERS}[name]
        options = ("--checkpoint-dir", f"{folder}/{name}", "--checkpoint-every", "3")
        before = replicated if name == "adafactor" else zero3
        whole = train_with_dataset(optimizer, before, n_steps=10)
        first = train_with_dataset(optimizer, before, *options, n_steps=10, last=7)
        second = train_with_dataset(optimizer, replicated, *options, n_steps=10)
        found[name] = whole, first, second
    return found


@pytest.mark.parametrize(
    "optimizers", [OPTIMIZERS, pytest.param(MORE_OPTIMIZERS, marks=pytest.mark.nightly)], ids=["default", "more"]
)
def test_a_users_optimizer_its_schedule_and_the_place_in_the_dataset_go_on(tmp_path, optimizers):
    # 10 samples give two global batches of 4 in an epoch: the run stops in the middle of the fourth
    for found in run_ranks(undisturbed_and_resumed, 2, str(tmp_path), list(optimizers)):
        assert set(found) == set(optimizers)
        for whole, first, second in found.values():
            assert [len(part) for part in (whole, first, second)] == [10, 7, 3]
            pairs = zip(whole, first + second, strict=True)
            assert max(abs(a - b) for left, right in pairs for a, b in zip(left, right, strict=True)) <= TOLERANCE


class Dropped(nn.Module):
    """Draws from the generators of torch and of Python."""

    def __init__(self):
        super().__init__()
        self.gpt, self.dropout = tiny_gpt.build_model(), nn.Dropout(0.5)

    def forward(self, tokens):
        return self.dropout(self.gpt(tokens)) * random.random()


def undisturbed_and_resumed_with_dropout(folder):
    """On one of two ranks: the same run in one go, and stopped after 3 steps."""
    config = Config(dp=2, micro_batch_size=2, precision="fp64")
    options = ("--checkpoint-dir", folder, "--checkpoint-every", "3")

    def train(*options, last=None):
        random.seed(3)  # that of torch is seeded by the program
        optimizer = two_groups(torch.optim.NAdam)  # with a number in float32 beside tensors in float64
        return train_with_dataset(optimizer, config, *options, n_steps=5, last=last, build_model=Dropped)

    whole = train()
    return whole, train(*options, last=3) + train(*options)


def test_a_resumed_run_draws_what_an_undisturbed_one_does(tmp_path):
    for whole, resumed in run_ranks(undisturbed_and_resumed_with_dropout, 2, str(tmp_path)):
        assert resumed == whole  # to the last bit


def scheduled_rates(folder):
    """In one process: the learning rates of a run, and of one that `load_checkpoint` alone goes on after 3 steps."""
    config = Config(precision="fp64")
    mesh = build_rank_mesh(config, "cpu")

    def start():
        return ParallelModel(config, tiny_gpt, mesh=mesh, learning_rates=LearningRate("cosine", 6, 2))

    def rates_of(model, n_steps):
        found = []
        for _ in range(n_steps):
            found.append(model.learning_rate)
            model.step(tiny_gpt.make_batch(1))
        return found

    first = start()
    before = rates_of(first, 3)
    checkpoints = Checkpoints(first, folder)
    checkpoints.save()
    path = checkpoints.wait()
    checkpoints.close()
    second = start()
    load_checkpoint(second, path)
    return before + rates_of(first, 3), before + rates_of(second, 3)


def test_a_schedule_goes_on_from_a_checkpoint_that_is_loaded_without_more(tmp_path):
    ((whole, resumed),) = run_ranks(scheduled_rates, 1, str(tmp_path))
    assert len(set(whole)) == 4  # 1/2, 1, 1, and down: cos(pi/4), cos(pi/2) = 0 (a half again), cos(3 pi/4)
    assert resumed == whole


def initial_and_exported(folder):
    """On one of two tensor-parallel ranks: weights from a state_dict of the user's model, and written out again."""
    torch.manual_seed(11)
    expected = tiny_gpt.build_model().double().state_dict()
    file, weights = Path(folder, "given.pt"), Path(folder, "weights.safetensors")
    mesh = build_rank_mesh(TENSOR_PARALLEL, "cpu")
    if mesh.rank == 0:
        torch.save(expected, file)
    dist.barrier()
    model = ParallelModel(TENSOR_PARALLEL, tiny_gpt, parallel_model(2, 1), mesh=mesh)
    load_initial_weights(model, file)
    loaded = dict(model.full_parameters())
    export_model(model, weights)  # it is there on every rank
    written = read_weights(weights)
    del expected["head.weight"]  # tied to the embedding, which is written once
    return (
        all(torch.equal(value, expected[name]) for name, value in loaded.items()),
        written.keys() == expected.keys() and all(torch.equal(written[name], expected[name]) for name in expected),
        sorted(path.name for path in Path(folder).iterdir()),
    )


def test_weights_of_a_plain_state_dict_go_in_and_come_out_whole_under_tensor_parallelism(tmp_path):
    for is_loaded, is_written, files in run_ranks(initial_and_exported, 2, str(tmp_path)):
        assert is_loaded and is_written
        assert files == ["given.pt", "weights.safetensors"]
