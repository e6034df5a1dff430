"""The hand-written programs that emitted ones are measured against, run beside one: they train the same model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent
BENCHMARKS = CHECKOUT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from hand_tuned import emit, table  # noqa: E402
from hand_tuned_space import Configuration, Space, Tried, needs_as_much_memory, next_try, parse_fixed  # noqa: E402

SPACE = Space(n_ranks=2, global_batch=64, has_tensor_parallel=True, is_convolutional=False)
HEAD = "name,file,set,global_batch,block,tensor_parallel\n"
LLAMA = "small,{file},n_layers=2 context=16 width=32 hidden=48 n_heads=4 vocabulary=64,8,Block,llama\n"
FULL_ON_RANK_1 = """
import os
import torch
from tiny_gpt import TinyGPT, loss_fn, make_batch

class TooBig(TinyGPT):
    def forward(self, tokens):
        if os.environ.get("RANK") == "1" and len(tokens) >= 2:
            raise torch.OutOfMemoryError("no room")
        return super().forward(tokens)

build_model = TooBig
"""
RAN = ("ok", "slow")  # slow is what is stopped after its warm-up of three steps
ON_CPU = ("--device", "cpu", "--precision", "fp32", "--fix", "compile_loss=off")
EAGER = (*ON_CPU, "compile=off")


def run(folder: Path, *options: str) -> list[dict]:
    """The rows of `hand_tuned.py run` of the model "small" in `cases.csv` of this folder."""
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT / "tests" / "distributed"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / "hand_tuned.py"), "run", "small", "rows.jsonl", "--cases", "cases.csv"]
    done = subprocess.run([*command, *options], cwd=folder, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


ALL = ("zero2", "ddp", "replicate", "zero1", "zero3", "tp2")


@pytest.mark.nightly
@pytest.mark.parametrize("strategies", [ALL[:1], ALL])
def test_hand_written_programs_have_the_losses_of_the_emitted_one(tmp_path: Path, strategies: tuple[str, ...]) -> None:
    (tmp_path / "cases.csv").write_text(HEAD + LLAMA.format(file=CHECKOUT / "examples" / "llama.py"))
    emit(tmp_path, cases=tmp_path / "cases.csv", profile=None, hw="h200_x4/2", rivals=0, only=[])
    emitted, *by_hand = run(tmp_path, "--programs", "small", *EAGER, "--tries", str(len(strategies)))
    assert tuple(row["baseline"] for row in by_hand) == strategies
    for row in by_hand:
        assert row["status"] in RAN, row
        assert row["losses"][:3] == pytest.approx(emitted["losses"][:3], rel=1e-5), row["baseline"]
    assert emitted["losses"][0] != pytest.approx(emitted["losses"][1], rel=1e-3)


@pytest.mark.nightly
def test_a_compiled_tensor_parallel_program_trains_its_embedding(tmp_path: Path) -> None:
    (tmp_path / "cases.csv").write_text(HEAD + LLAMA.format(file=CHECKOUT / "examples" / "llama.py"))
    run(tmp_path, *EAGER, "strategy=tp2", "--tries", "1")
    eager, compiled = run(tmp_path, *ON_CPU, "strategy=tp2", "compile=on", "--tries", "1")
    assert compiled["losses"][:3] == pytest.approx(eager["losses"][:3], rel=1e-5)


@pytest.mark.nightly
def test_a_model_compiled_as_one_trains_alike(tmp_path: Path) -> None:
    (tmp_path / "cases.csv").write_text(HEAD + LLAMA.format(file=CHECKOUT / "examples" / "llama.py"))
    run(tmp_path, *EAGER, "strategy=ddp", "--tries", "1")
    eager, whole = run(tmp_path, *ON_CPU, "strategy=ddp", "compile=on", "whole=on", "--tries", "1")
    assert whole["options"]["whole"] and not eager["options"]["whole"]
    assert whole["losses"][:3] == pytest.approx(eager["losses"][:3], rel=1e-5)


@pytest.mark.nightly
def test_taking_the_norm_of_the_gradients_changes_no_loss_and_is_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "cases.csv").write_text(HEAD + LLAMA.format(file=CHECKOUT / "examples" / "llama.py"))
    run(tmp_path, *EAGER, "strategy=zero2", "--tries", "1")
    plain, checked = run(tmp_path, *EAGER, "strategy=zero2", "gradient_norm=on", "--tries", "1")
    assert (plain["options"]["gradient_norm"], checked["options"]["gradient_norm"]) == (False, True)
    assert checked["losses"][:3] == pytest.approx(plain["losses"][:3], rel=1e-6)
    assert ["gradient norm" in line for line in table(tmp_path / "rows.jsonl").splitlines()[1:]] == [False, True]


@pytest.mark.nightly
def test_a_rank_that_is_out_of_memory_neither_stops_the_others_nor_the_next_program(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FULL_ON_RANK_1)
    (tmp_path / "cases.csv").write_text(HEAD + "small,model.py,,8,Block,\n")
    rows = run(tmp_path, *EAGER, "strategy=ddp", "--tries", "3")
    found = [(row["options"]["micro_batch"], row["options"]["recompute"], row["status"]) for row in rows]
    # four samples a rank: first a quarter of them, then the double, then, as no larger one can fit, recompute
    assert found == [(1, False, "ok"), (2, False, "oom"), (1, True, found[2][2])]
    assert found[2][2] in RAN
    assert rows[2]["losses"][:3] == pytest.approx(rows[0]["losses"][:3], rel=1e-5)


def test_first_comes_one_program_of_each_strategy() -> None:
    tried: list[Tried] = []
    for _ in range(6):
        tried.append(Tried(next_try(SPACE, tried), "ok", 1.0))
    # a quarter of a rank's samples: 32 / 4, or 64 / 4 where two ranks share a sample
    sizes = {item.configuration.strategy: item.configuration.micro_batch for item in tried}
    assert sizes == {"replicate": 8, "zero2": 8, "ddp": 8, "zero1": 8, "zero3": 8, "tp2": 16}


def test_then_come_the_neighbours_of_the_fastest_until_all_are_tried() -> None:
    space = Space(n_ranks=2, global_batch=8, has_tensor_parallel=False, is_convolutional=False)
    tried: list[Tried] = []
    while (configuration := next_try(space, tried)) is not None:
        is_fast = configuration.strategy == "ddp" and configuration.micro_batch == 1
        tried.append(Tried(configuration, "ok", 1.0 if is_fast else 2.0))
    assert len(tried) == 5 * 3 * 2**3 == len({item.configuration for item in tried})
    assert tried[5].configuration == Configuration("ddp", 2)


def test_what_needs_as_much_memory_as_what_did_not_fit_is_left_out() -> None:
    full = Configuration("zero1", 8)
    assert needs_as_much_memory(Configuration("zero1", 16), full)
    assert needs_as_much_memory(Configuration("zero1", 8, compile_loss=False), full)
    assert not needs_as_much_memory(Configuration("zero1", 16, recompute=True), full)
    assert not needs_as_much_memory(Configuration("zero1", 4), full)
    assert not needs_as_much_memory(Configuration("zero3", 8), full)


def test_code_that_failed_is_not_tried_on_other_sizes() -> None:
    tried = [Tried(Configuration("replicate", 8), "error")]
    while (configuration := next_try(SPACE, tried)) is not None:
        tried.append(Tried(configuration, "ok", 1.0))
    alike = [c for c in (item.configuration for item in tried) if c.strategy == "replicate" and c.compile]
    assert alike[0] == tried[0].configuration and not any(c.compile_loss for c in alike[1:])


def test_a_wrong_fix_is_refused() -> None:
    with pytest.raises(SystemExit, match="--fix: found 'compile=maybe'"):
        parse_fixed(["compile=maybe"])


def test_the_table_compares_the_best_by_hand_with_the_plan_that_was_chosen(tmp_path: Path) -> None:
    common = {"model": "m", "ranks": 2, "precision": "bf16", "peak_allocated_bytes": 2**31}
    by_hand = [("ddp", 1.2), ("zero2", 1.1), ("zero3", None)]
    rows = [{"baseline": name, "options": {"strategy": name, "micro_batch": 4}, "step_s": s} for name, s in by_hand]
    for name, step_s in (("plan_00", 1.0), ("plan_01", 0.8)):
        rows.append({"baseline": "autoplan", "options": {"folder": name}, "step_s": step_s, "predicted_step_s": 0.9})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(common | row) + "\n" for row in rows))
    line = table(tmp_path / "rows.jsonl").splitlines()[1]
    # 1.1 / 1.0 against the best by hand, 1.0 / 0.8 - 1 against its own best; 3 by hand and 2 of its own
    found = ["1.1000", "s", "2.0", "0.9000", "s", "1.0000", "s", "2.0", "1.100", "25.0%", "3+2"]
    assert line.split(maxsplit=13)[2:13] == found
    assert line.endswith("zero2 micro-batch 4 compile compile loss")
