"""The chunked loss as a choice of the plan: found where it can be, priced, searched, generated, and exact."""

from __future__ import annotations

import dataclasses

import pytest
from distributed.chunked import check_chunked_programs
from distributed.launch import run_ranks
from distributed.programs import graph_of, make_plan, write_programs

from autoplan import codegen
from autoplan.chunked_loss import can_chunk, chunked_head, why_whole
from autoplan.codegen import writer
from autoplan.space import load_rules

TOLERANCE = 1e-9
N_STEPS = 2
ZERO3 = {"dp": 2, "zero_stage": 3, "zero_shard_degree": 2}
ZERO_BUBBLE_V = {"schedule": "zero_bubble_v", "n_chunks": 2, "n_micro_batches": 4}


def chunked(model, **fields):
    plan = make_plan(model, **fields)
    assert can_chunk(graph_of(model), plan.mesh, plan.shardings, rules=load_rules())
    return model, dataclasses.replace(plan, loss="chunked")


def test_logits_that_are_converted_before_the_loss_stay_whole():
    plan = make_plan("gpt", tp=2, sharding="S(1)", micro_batch_size=3)
    strategies = {op.name: op for op in graph_of("gpt").ops}
    assert "('linear_16', 'S(1)')" in str(plan.shardings[-1].values) and strategies["linear_16"].module_path == "head"
    assert not can_chunk(graph_of("gpt"), plan.mesh, plan.shardings, rules=load_rules())


def assert_equal_to_one_process(tmp_path, monkeypatch, cases, *, n_ranks):
    """With slices of 5 rows, which divide nothing, and with logits that are never whole."""
    monkeypatch.setattr(codegen, "SLICE_ROWS", 5)
    monkeypatch.setattr(writer, "SLICE_ROWS", 5)
    rows = write_programs(tmp_path, cases)
    for differences in run_ranks(check_chunked_programs, n_ranks, str(tmp_path), rows, N_STEPS, timeout_s=400.0):
        assert set(differences) == set(cases)
        for name, steps in differences.items():
            assert max(max(step) for step in steps) <= TOLERANCE, (name, steps)


def test_chunked_losses_on_two_ranks_equal_one_process(tmp_path, monkeypatch):
    cases = {
        "ddp": chunked("gpt", dp=2, micro_batch_size=2, n_micro_batches=2),
        "zero3": chunked("llama", micro_batch_size=2, recompute="full", **ZERO3),
        "tied_bias": chunked("bert", n_micro_batches=2, **ZERO3),
        "tied_pp2": chunked("gpt", pp=2, micro_batch_size=2, n_micro_batches=4),
        "pp2_gpipe": chunked("llama", pp=2, n_micro_batches=2, schedule="gpipe"),
        "pp2_interleaved": chunked("gpt", pp=2, n_micro_batches=4, schedule="interleaved", n_chunks=2),
        "zero_bubble": chunked("llama", pp=2, **ZERO_BUBBLE_V),
        "tp2": chunked("llama", tp=2, sharding="R", n_micro_batches=2),
        "tp2_sequence": chunked("llama", tp=2, sharding="S(1)", micro_batch_size=3),
        "tp2_odd": chunked("llama_odd", tp=2, sharding="R", micro_batch_size=2),
    }
    assert_equal_to_one_process(tmp_path, monkeypatch, cases, n_ranks=2)


def test_chunked_losses_on_four_ranks_equal_one_process(tmp_path, monkeypatch):
    cases = {
        "tp2_zero3": chunked("gpt", tp=2, sharding="R", n_micro_batches=2, **ZERO3),
        "tp2_pp2": chunked("llama", tp=2, pp=2, sharding="R", n_micro_batches=3),
        "dp2_zero_bubble": chunked("gpt", pp=2, dp=2, zero_stage=1, zero_shard_degree=2, **ZERO_BUBBLE_V),
    }
    assert_equal_to_one_process(tmp_path, monkeypatch, cases, n_ranks=4)


def test_the_generated_product_is_deferred():
    _, plan = chunked("llama", tp=2, sharding="R")
    text = codegen.parallel_model_text(graph_of("llama"), plan, rules=load_rules())
    assert "deferred_linear(" in text and "slice_rows=2048)" in text
    assert "from runtime.chunked_loss import deferred_linear" in text


def test_the_head_is_found_with_all_up_to_the_loss():
    head = chunked_head(graph_of("gpt"))
    assert [op.target for op in head.ops] == [
        "aten.linear.default",
        "aten.flatten.using_ints",
        "aten.cross_entropy_loss.default",
    ]
    assert head.ops[0].module_path == "head"


@pytest.mark.parametrize("model", ["mlp", "unet", "data_dependent"])
def test_a_loss_of_something_else_stays_whole_and_says_why(model):
    assert chunked_head(graph_of(model)) is None
    assert why_whole(graph_of(model))
