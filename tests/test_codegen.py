"""The generated program as text: golden, free of lint, and independent of the hash seed."""

import subprocess
import sys
from pathlib import Path

import pytest
from distributed.programs import graph_of, make_plan

from autoplan.codegen import config_values
from autoplan.codegen.parallel_model import parallel_model_text
from autoplan.space import load_rules

GOLDEN = Path(__file__).parent / "golden" / "programs"
PLANS = {
    "gpt_tp2_pp2": ("gpt", {"tp": 2, "pp": 2, "sharding": "R", "n_micro_batches": 2}),
    "llama_tp2_sequence": ("llama", {"tp": 2, "sharding": "S(1)"}),
    "mlp_pp2_interleaved": ("mlp", {"pp": 2, "schedule": "interleaved", "n_chunks": 2, "n_micro_batches": 2}),
}


def text_of(name):
    model, mesh = PLANS[name]
    return parallel_model_text(graph_of(model), make_plan(model, **mesh), rules=load_rules())


@pytest.mark.parametrize("name", PLANS)
def test_generated_model_is_the_golden_one(name):
    path = GOLDEN / f"{name}.py"
    text = text_of(name)
    if not path.exists():  # pragma: no cover - to renew a golden file, delete it and run the test twice
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        pytest.fail(f"{path} was written; look at it and run again")
    assert text == path.read_text()


@pytest.mark.parametrize("name", PLANS)
def test_generated_model_has_no_unused_import_and_no_undefined_name(name, tmp_path):
    path = tmp_path / "parallel_model.py"
    path.write_text(text_of(name))
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,E7,E9", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_block_is_one_class_however_often_it_repeats():
    text = text_of("gpt_tp2_pp2")
    assert text.count("class Block(nn.Module):") == 1
    assert "for block in self.blocks.values():" in text
    assert "aten" not in text


def test_every_collective_says_what_it_moves():
    lines = text_of("gpt_tp2_pp2").splitlines()
    for number, line in enumerate(lines):
        if " = all_reduce(" in line or " = copy_to_tp(" in line:
            assert lines[number - 1].strip().startswith("# ") and "bytes" in lines[number - 1]


def test_config_names_the_recomputed_modules_and_the_blocks():
    plan = make_plan("gpt", recompute="half")
    values = config_values(graph_of("gpt"), plan)
    assert values["recompute"] == ("blocks.0", "blocks.2")
    assert values["blocks"] == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
