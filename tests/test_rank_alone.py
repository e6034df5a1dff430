"""`train.py --alone`: one rank of a plan runs where the others do not exist, and holds what it would among them."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.distributed as dist
from distributed.launch import ends_of_program, run_ranks
from test_runtime_program import emit

from autoplan.runtime import Config
from autoplan.runtime.alone import host_backend, is_alone, join_alone, receive_zeros
from autoplan.runtime.process_group import from_first_rank
from autoplan.runtime.refusal import OptionError

TP_PP = {"tp": 2, "pp": 2, "micro_batch_size": 2, "n_micro_batches": 2, "precision": "fp32"}


@pytest.mark.parametrize(
    ("config", "has_parallel_model", "rank"),
    [(TP_PP, True, 1), (TP_PP, True, 3), ({"dp": 4, "zero_stage": 3, "zero_shard_degree": 4}, False, 2)],
)
def test_each_rank_runs_by_itself_and_writes_its_report(tmp_path, config, has_parallel_model, rank):
    emit(tmp_path, config={"blocks": ("blocks.0", "blocks.1"), **config}, has_parallel_model=has_parallel_model)
    options = ("--alone", str(rank), "--steps", "2", "--device", "cpu", "--repeat-batches", "1")
    ((code, printed),) = ends_of_program(tmp_path, 1, *options, "--out-json", "result.json")
    assert code == 0 and [line.split()[1] for line in printed.splitlines()] == ["0", "1"]
    report = json.loads((tmp_path / "result.json").read_text())
    assert len(report["peak_allocated_bytes_per_rank"]) == 4
    losses = [step["loss"] for step in report["steps"]]
    is_last_stage = rank >= 2 or not has_parallel_model
    assert all(map(math.isfinite, losses)) and all((loss > 0.0) == is_last_stage for loss in losses)


def test_a_rank_that_the_plan_does_not_have_is_refused(tmp_path):
    emit(tmp_path, config={"dp": 2}, has_parallel_model=False)
    ((told, printed),) = ends_of_program(tmp_path, 1, "--alone", "2", "--steps", "2", "--device", "cpu")
    assert "--alone: found 2; expected: 0 to 1, the ranks of the plan\n  fix: one of each" in str(told)
    assert str(told).endswith("enough: 0") and printed == ""


def test_so_is_a_plan_whose_ranks_compute_with_what_others_send():
    config = Config(dp=2, grad_compression="powersgd", powersgd_rank=2, powersgd_start_step=2)
    with pytest.raises(OptionError, match="found a plan with PowerSGD(.|\n)*--fix grad_compression=none"):
        join_alone(0, config=config)


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="found 2 processes; expected: one\n  fix: start it with python"):
        join_alone(0, config=Config(dp=2))
    assert not is_alone() and host_backend() == "gloo"


def test_the_others_of_a_rank_alone_are_it_itself():
    (found,) = run_ranks(_alone, 1, backend="")
    assert found == {"gathered": [1.0, 2.0] * 4, "first": "own", "backend": "fake", "received": [0.0, 0.0]}


def _alone():
    join_alone(2, config=Config(dp=4))
    gathered, received = torch.empty(8), torch.ones(2, requires_grad=True)
    dist.all_gather_into_tensor(gathered, torch.tensor([1.0, 2.0]))
    receive_zeros(received)
    first = from_first_rank(lambda: "own")
    return {
        "gathered": gathered.tolist(),
        "first": first,
        "backend": host_backend(),
        "received": received.detach().tolist(),
    }
