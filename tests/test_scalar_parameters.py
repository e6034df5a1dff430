"""Parameters without dims (a temperature, a gain of each layer, one that all layers share) under every kind of plan."""

from pathlib import Path

import pytest
import torch
from distributed import scalars
from distributed.launch import run_ranks
from distributed.programs import check_programs, make_plan, write_programs
from distributed.resumed import largest_difference
from torch import nn

from autoplan.runtime import Config, ParallelModel, build_rank_mesh
from autoplan.runtime.checkpoints.weight_files import export_model, load_initial_weights, read_weights
from autoplan.runtime.stages.scalar_parameters import hold_as_vectors

TOLERANCE = 1e-9
_SHARDED = {"dp": 2, "zero_shard_degree": 2, "n_micro_batches": 2, "micro_batch_size": 2}
PLANS = {
    "ddp": {"dp": 2, "n_micro_batches": 2, "micro_batch_size": 2},
    **{f"zero{stage}": {**_SHARDED, "zero_stage": stage} for stage in (1, 2, 3)},
    # the first layer has the weight that the others read too, outside of its own pass
    "zero3_generated": {**_SHARDED, "zero_stage": 3, "generated": True},
    "tp2": {"tp": 2, "sharding": "R", "n_micro_batches": 2, "micro_batch_size": 3},
    "tp2_split": {"tp": 2, "sharding": "S(1)", "micro_batch_size": 3},
    "pp2": {"pp": 2, "n_micro_batches": 2, "micro_batch_size": 2},
}


def test_scalars_train_as_in_one_process_on_two_ranks(tmp_path):
    rows = write_programs(tmp_path, {name: ("scalars", make_plan("scalars", **mesh)) for name, mesh in PLANS.items()})
    for found in run_ranks(check_programs, 2, str(tmp_path), rows, timeout_s=200.0):
        assert set(found) == set(PLANS)
        for name, steps in found.items():
            assert max(max(step) for step in steps) <= TOLERANCE, (name, steps)


@pytest.mark.nightly
def test_scalars_train_as_in_one_process_with_everything_at_once(tmp_path):
    everything = {"pp": 2, "dp": 2, "tp": 2, "sharding": "R", "zero_stage": 3, "zero_shard_degree": 2}
    plan = make_plan("scalars", **everything, n_micro_batches=2, micro_batch_size=2, recompute="full")
    rows = write_programs(tmp_path, {"all": ("scalars", plan)})
    for found in run_ranks(check_programs, 8, str(tmp_path), rows, timeout_s=200.0):
        assert max(max(step) for step in found["all"]) <= TOLERANCE


def test_a_run_with_scalars_goes_on_under_another_plan(tmp_path):
    # 4 samples in each; a step shows in the loss of the next, so the last plan trains twice
    chain = {
        "zero3": {**_SHARDED, "zero_stage": 3, "n_micro_batches": 1},
        "tp2": {"tp": 2, "sharding": "R", "n_micro_batches": 2, "micro_batch_size": 2},
        "pp2": {"pp": 2, "n_micro_batches": 2, "micro_batch_size": 2},
    }
    parts = [
        write_programs(tmp_path, {f"scalars__{name}": ("scalars", make_plan("scalars", **mesh))})
        for name, mesh in chain.items()
    ]
    assert largest_difference(tmp_path, parts, n_steps_each=2)["scalars"] <= TOLERANCE


def _shapes_outside(folder):
    """On one of two ranks: the shapes of what a program gives and writes, and what it holds."""
    config = Config(dp=2, zero_stage=3, zero_shard_degree=2, precision="bf16")
    model = ParallelModel(config, scalars, mesh=build_rank_mesh(config, "cpu"))
    losses = [model.step(scalars.make_batch(1)).item() for _ in range(2)]
    file = Path(folder) / "weights.safetensors"
    export_model(model, file)
    torch.distributed.barrier()
    load_initial_weights(model, file)
    given = {**dict(model.full_parameters()), **{f"grad {name}": g for name, g in model.full_gradients()}}
    held = {name: p.shape for name, p in model.stages[0].named_parameters()}
    return (
        losses,
        {n: tuple(t.shape) for n, t in given.items()},
        held,
        {n: t.shape for n, t in read_weights(file).items()},
    )


def test_names_and_shapes_outside_are_those_of_the_users_model(tmp_path):
    expected = {name: parameter.shape for name, parameter in scalars.build_model().named_parameters()}
    for losses, given, held, written in run_ranks(_shapes_outside, 2, str(tmp_path)):
        assert all(loss == loss for loss in losses)
        assert written == expected
        trained = {name: tuple(shape) for name, shape in expected.items() if name != "shift"}
        assert given == {**trained, **{f"grad {name}": shape for name, shape in trained.items()}}
        assert held["temperature"] == (1,)


def test_whoever_reads_a_scalar_gets_one_and_its_gradient_reaches_the_vector():
    model = nn.Sequential(scalars.build_model(), nn.Linear(2, 2))
    towers = model[0]
    hold_as_vectors(model)
    assert towers.temperature.shape == () and isinstance(towers, scalars.Towers)
    assert towers.picture_layers[0]._parameters["slope"] is towers.word_layers[1]._parameters["slope"]
    assert type(towers.picture_layers[0]) is type(towers.word_layers[0])
    assert not towers._parameters["shift"].requires_grad
    (3.0 * towers.temperature).backward()
    assert dict(model.named_parameters())["0.temperature"].grad.tolist() == [3.0]


def _own_loop(hw):
    """On one of two ranks: the losses of `autoplan.parallelize` in an own loop, and those of one process."""
    import autoplan

    torch.manual_seed(0)
    plain = scalars.build_model().double()
    batches = [scalars.make_batch(4) for _ in range(3)]
    batches = [((picture.double(), words), targets) for (picture, words), targets in batches]
    torch.manual_seed(0)
    model = autoplan.parallelize(
        scalars.build_model().double(),
        scalars.make_batch(4),
        loss_fn=scalars.loss_fn,
        hw=hw,
        device_type="cpu",
        precision="fp64",
        global_batch=4,
        fix=(("dp", "2"), ("micro_batch", "2")),
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    found = []
    for inputs, targets in batches:
        own = slice(2 * torch.distributed.get_rank(), 2 * torch.distributed.get_rank() + 2)
        loss = model.step((tuple(t[own] for t in inputs), targets[own])).item()
        optimizer.zero_grad()
        halves = [slice(0, 2), slice(2, 4)]
        expected = sum(scalars.loss_fn(plain(*(t[h] for t in inputs)), targets[h]) for h in halves) / 2
        expected.backward()
        optimizer.step()
        found.append((loss, expected.item()))
    return found


@pytest.mark.nightly
def test_parallelize_takes_a_model_with_scalars():
    for found in run_ranks(_own_loop, 2, "dgx_a100_x8"):
        assert max(abs(loss - expected) for loss, expected in found) <= TOLERANCE
