"""Batches, recomputation and refusals that need one process only."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn

from autoplan.runtime.config import Config
from autoplan.runtime.input_pipeline.batches import (
    batch_slice,
    flatten_tensors,
    global_batch,
    local_batch,
    map_tensors,
    micro_batches,
    tensors_at,
)
from autoplan.runtime.input_pipeline.loading import synthetic_batches
from autoplan.runtime.input_pipeline.model_calls import loss_of
from autoplan.runtime.input_pipeline.reading import Position
from autoplan.runtime.planned_devices import DeviceCountError, WorldSizeError, check_device_count, check_world_size
from autoplan.runtime.stages.pipeline import Boundary, PerSample
from autoplan.runtime.stages.recompute import apply_recompute

CONFIG = Config(dp=2, micro_batch_size=2, n_micro_batches=3)


@dataclass(frozen=True)
class AsDataclass:
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


@dataclass
class Totals:
    total: torch.Tensor
    logits: torch.Tensor


class AsNamedTuple(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


def make_batch(batch_size):
    return {"x": torch.randn(batch_size, 4), "ids": torch.arange(batch_size)}, torch.randint(9, (batch_size,))


def test_a_seed_may_be_a_date_to_the_second():
    first, again, other = (
        global_batch(make_batch, batch_size=2, seed=seed, step=0)
        for seed in (20261123071826, 20261123071826, 20261123071827)
    )
    drawn, same, different = (inputs["x"] for inputs, _ in (first, again, other))
    assert torch.equal(drawn, same) and not torch.equal(drawn, different)


def test_local_batches_of_all_ranks_are_the_global_batch_in_order():
    batch = global_batch(make_batch, batch_size=CONFIG.global_batch_size, seed=3, step=5)
    # 2 dp ranks x 3 micro-batches x 2 samples = 12
    assert batch[0]["ids"].tolist() == list(range(12))
    start = Position(n_samples=5 * CONFIG.global_batch_size)
    parts = [
        next(synthetic_batches(make_batch, config=CONFIG, dp_rank=rank, seed=3, start=start))[0] for rank in (0, 1)
    ]
    assert torch.equal(torch.cat([inputs["x"] for inputs, _ in parts]), batch[0]["x"])
    assert torch.equal(torch.cat([targets for _, targets in parts]), batch[1])


def test_steps_draw_different_batches_and_leave_the_random_state():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first, second = (global_batch(make_batch, batch_size=2, seed=0, step=step) for step in (0, 1))
    assert torch.equal(torch.rand(3), expected)
    assert not torch.equal(first[0]["x"], second[0]["x"])


def test_micro_batches_of_a_wrong_batch_are_refused_with_both_numbers():
    batch = local_batch(make_batch(12), config=CONFIG, dp_rank=1)
    assert [inputs["ids"].tolist() for inputs, _ in micro_batches(batch, CONFIG, dp_rank=1)] == [
        [6, 7],
        [8, 9],
        [10, 11],
    ]
    with pytest.raises(ValueError, match=r"\[5\] samples .* 3 micro-batches x 2 samples = 6\n  fix: load that many"):
        micro_batches(make_batch(5), CONFIG, dp_rank=1)


def test_nested_values_keep_their_types():
    pair = namedtuple("pair", "a b")
    value = {"p": pair(torch.ones(1), 2), "l": [torch.ones(2), None]}
    doubled = map_tensors(lambda t: 2 * t, value)
    assert isinstance(doubled["p"], pair) and doubled["p"].b == 2 and doubled["l"][1] is None
    assert [t.tolist() for t in flatten_tensors(doubled)] == [[2.0], [2.0, 2.0]]


def test_what_a_tokenizer_returns_is_cut_as_a_dict_and_texts_are_cut_with_the_tensors():
    tokens = UserDict(ids=torch.arange(4), words=list("abcd"), names=["x", "y"])
    inputs, targets = batch_slice((tokens, (torch.arange(4), tuple("efgh"))), 1, 3)
    assert type(inputs) is dict and inputs.pop("ids").tolist() == [1, 2]
    assert inputs == {"words": ["b", "c"], "names": ["x", "y"]}  # names are not of samples
    assert targets[1] == ("f", "g")
    assert [tensor.tolist() for tensor in flatten_tensors(tokens)] == [[0, 1, 2, 3]]


def test_tensors_are_found_by_their_keys_whatever_the_order_and_others_are_refused():
    paths = (("x",), ("pair", 0), ("pair", 1))
    x, first, second = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)
    assert tensors_at({"pair": [first, second], "scale": 3.0, "x": x}, paths) == (x, first, second)
    assert tensors_at(x, ((0,),)) == tensors_at([x], ((),)) == (x,)
    assert tensors_at((UserDict(y=second, x=first), x), ((0, "x"), (0, "y"), (1,))) == (first, second, x)
    with pytest.raises(ValueError, match=r"found x, y, planned: x, pair\.0, pair\.1\n  fix: "):
        tensors_at({"x": x, "y": x}, paths)
    with pytest.raises(ValueError, match="found one tensor, planned: "):
        tensors_at(x, paths)


def test_loss_of_16_bit_outputs_is_computed_in_float32():
    seen = []
    loss_of(lambda outputs, targets: seen.append(outputs["logits"].dtype), {"logits": torch.ones(2).bfloat16()}, None)
    assert seen == [torch.float32]


def test_model_that_returns_its_loss_needs_no_loss_fn():
    loss = torch.ones(())
    logits = torch.ones(2)
    for outputs in (loss, (loss, None), {"loss": loss}, {"total": loss, "logits": logits}):
        assert loss_of(None, outputs, None) is loss
    for outputs in (AsDataclass(loss, logits), AsNamedTuple(loss, logits), Totals(loss, logits)):
        assert loss_of(None, outputs, None) is loss


def test_16_bit_fields_of_a_dataclass_reach_the_loss_in_float32():
    outputs = AsDataclass(logits=torch.ones(2).bfloat16())
    seen = loss_of(lambda given, targets: given, outputs, None)
    assert seen.logits.dtype == torch.float32 and seen.loss is None
    assert outputs.logits.dtype == torch.bfloat16


def test_recompute_runs_forward_twice_and_changes_no_name_or_gradient():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()))
    calls = []
    model[1][0].register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(8, 4)

    def gradients():
        calls.clear()
        torch.manual_seed(1)
        return torch.autograd.grad(model(x).square().sum(), list(model.parameters()))

    expected, names = gradients(), [name for name, _ in model.named_parameters()]
    assert len(calls) == 1
    apply_recompute(model, ["1", "not.in.this.stage"])
    found = gradients()
    assert len(calls) == 2
    assert names == [name for name, _ in model.named_parameters()] == list(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_boundary_scales_with_the_micro_batch_and_follows_the_precision():
    config = Config(micro_batch_size=3, precision="bf16")
    hidden = Boundary((PerSample(2), 5)).example(config)
    mask = Boundary((PerSample(1),), "bool", requires_grad=False).example(config)
    assert (hidden.shape, hidden.dtype, hidden.requires_grad) == ((6, 5), torch.bfloat16, True)
    assert (mask.shape, mask.dtype, mask.requires_grad) == ((3,), torch.bool, False)


def test_another_world_size_is_refused_with_both_numbers_once_per_host(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(WorldSizeError, match=r"planned: 2 processes \(pp 1 x dp 2 x tp 1\); found: 4"):
        check_world_size(CONFIG)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(WorldSizeError) as of_another_rank:
        check_world_size(CONFIG)
    assert of_another_rank.value.code == 1


def test_a_host_with_fewer_gpus_than_processes_is_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceCountError, match="found 2 GPUs on this host; expected: 4"):
        check_device_count()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    check_device_count()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"precision": "int8"}, "precision: found 'int8'"),
        ({"zero_stage": 4}, "zero_stage: found 4"),
        ({"dp": 4, "zero_stage": 1, "zero_shard_degree": 3}, "expected a divisor of dp = 4"),
        ({"dp": 4, "zero_shard_degree": 2}, "expected 1 because zero_stage is 0"),
    ],
)
def test_impossible_config_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Config(**fields)
