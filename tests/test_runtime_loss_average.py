"""Losses that leave targets out of their mean: averaged over micro-batches, or exactly over the global batch."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from distributed import tiny_norm
from distributed.launch import run_ranks
from torch.nn import functional as F

from autoplan.analysis.semantics import check_loss_average, ignored_target
from autoplan.errors import InputError
from autoplan.runtime import Config, ParallelModel, PlainTraining, build_rank_mesh, check_steps, global_batch
from autoplan.runtime.update.loss_average import total_count, weigh
from autoplan.tracing.model_source import load_model_file, model_source
from autoplan.tracing.trace import trace_model

FAMILIES = Path(__file__).parent / "families"
IGNORED = -100
N_STEPS = 2
PLAIN = Config(precision="fp64", micro_batch_size=2, n_micro_batches=2)
LAYERS = tuple(f"bert.encoder.layer.{layer}" for layer in range(4))
ZERO_3 = {"zero_stage": 3, "zero_shard_degree": 2, "blocks": LAYERS, "recompute": LAYERS}


def in_both_ways(cases):
    return {
        (name, ignored): (model, dataclasses.replace(config, ignored_target=ignored))
        for name, (model, config) in cases.items()
        for ignored in (None, IGNORED)
    }


CASES = in_both_ways(
    {
        "bert ddp": ("bert", dataclasses.replace(PLAIN, dp=2)),
        "bert zero 3": ("bert", dataclasses.replace(PLAIN, dp=2, **ZERO_3)),
        "pipeline": ("norm", dataclasses.replace(PLAIN, pp=2, n_micro_batches=4)),
    }
)


def with_uneven_targets(model_file):
    """The model file with sample i keeping only the first i + 1 of its targets; the first micro-batch keeps none."""

    def make_batch(batch_size):
        inputs, targets = model_file.make_batch(batch_size)
        targets = torch.randint(3, targets.shape)
        for sample in range(batch_size):
            targets[sample, sample + 1 if sample > 1 else 0 :] = IGNORED
        return inputs, targets

    return SimpleNamespace(build_model=model_file.build_model, make_batch=make_batch, loss_fn=model_file.loss_fn)


def norm_model_file():
    """Targets per point: the classifier's answer for all of them."""

    def loss_fn(outputs, targets):
        return F.cross_entropy(outputs.unsqueeze(2).expand(-1, -1, targets.shape[1]), targets, ignore_index=IGNORED)

    def make_batch(batch_size):
        return torch.randn(batch_size, tiny_norm.WIDTH, tiny_norm.POINTS), torch.zeros(batch_size, 8, dtype=torch.int64)

    return SimpleNamespace(build_model=tiny_norm.build_model, make_batch=make_batch, loss_fn=loss_fn)


def train(model_name, config):
    """Differences of each step from one process, and of the first one from one pass over the whole batch."""
    own = norm_model_file() if model_name == "norm" else load_model_file(FAMILIES / "bert_hf.py")
    model_file = with_uneven_targets(own)
    if config.ignored_target is None:  # the mean of no targets is not a number
        model_file.make_batch = without_empty_targets(model_file.make_batch)
    generated = tiny_norm.parallel_model(config.n_stages) if config.pp > 1 else None
    mesh = build_rank_mesh(config, "cpu")
    options = {"seed": 7, "learning_rate": 1e-3}
    model = ParallelModel(config, model_file, generated, mesh=mesh, **options)
    plain = PlainTraining(config, model_file, build_device=model.full_build_device, device=mesh.device, **options)
    whole = PlainTraining(
        Config(precision="fp64", micro_batch_size=config.global_batch_size),
        model_file,
        build_device=model.full_build_device,
        device=mesh.device,
        **options,
    )
    batch = global_batch(model_file.make_batch, batch_size=config.global_batch_size, seed=3, step=0)
    whole_loss = whole.step(batch)
    steps = list(check_steps(model, plain, model_file, n_steps=N_STEPS, seed=3))
    return [dataclasses.astuple(step.differences) for step in steps], abs(steps[0].loss - whole_loss)


def without_empty_targets(make_batch):
    def filled(batch_size):
        inputs, targets = make_batch(batch_size)
        targets[:2, 0] = 1
        return inputs, targets

    return filled


def train_all():
    return {name: train(model, config) for name, (model, config) in CASES.items()}


@pytest.fixture(scope="module")
def found():
    return run_ranks(train_all, 2, timeout_s=200.0)[0]


def test_both_averages_train_as_one_process_does(found):
    assert set(found) == set(CASES)
    for name, (steps, _) in found.items():
        assert len(steps) == N_STEPS, name
        assert max(max(step) for step in steps) <= 1e-9, (name, steps)


def test_only_the_exact_average_is_the_loss_of_one_pass_over_the_whole_batch(found):
    for (name, ignored), (_, difference) in found.items():
        if name != "pipeline":  # its BatchNorm sees other samples in one pass
            assert (difference <= 1e-9) == (ignored == IGNORED), (name, ignored, difference)
            assert difference <= 1e-9 or difference > 1e-4, (name, ignored, difference)


def test_weights_turn_the_mean_over_micro_batches_into_the_mean_over_targets():
    # 3 targets count of the first, 1 of the second: the mean is 2, the weights are 3/2 and 1/2; (3 a + b) / 4.
    batches = [torch.tensor([[1, 2], [0, 9]]), torch.tensor([[9, 9], [9, 1]])]
    losses = torch.tensor([5.0, 1.0])
    mean = total_count(batches, ignored=9) / 2
    weighted = [weigh(loss, targets, ignored=9, mean=mean) for loss, targets in zip(losses, batches, strict=True)]
    assert sum(weighted) / 2 == (3 * 5.0 + 1.0) / 4


def test_a_micro_batch_without_a_target_that_counts_adds_nothing_to_loss_and_gradient():
    logits = torch.randn(2, 3, requires_grad=True)
    targets = torch.tensor([IGNORED, IGNORED])
    loss = weigh(F.cross_entropy(logits, targets), targets, ignored=IGNORED, mean=torch.tensor(1.0))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad.abs().max() == 0.0


def test_targets_that_are_no_integers_are_refused():
    with pytest.raises(ValueError, match="one tensor of integers"):
        total_count([torch.randn(2)], ignored=0)


def family_graph(name):
    return trace_model(model_source(FAMILIES / f"{name}.py", {}))


def test_the_exact_average_is_offered_where_the_batch_holds_the_targets_of_one_mean():
    graph = family_graph("bert_hf")
    check_loss_average(graph, "global_batch")
    assert ignored_target(graph) == IGNORED


@pytest.mark.parametrize("name", ["unet", "two_tower"])
def test_the_exact_average_is_refused_for_another_loss(name):
    graph = family_graph(name)
    check_loss_average(graph, "micro_batch")
    with pytest.raises(InputError, match="loss_average=global_batch.*not one mean over the integer targets"):
        check_loss_average(graph, "global_batch")
