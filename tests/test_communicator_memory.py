"""benchmarks/communicator_memory.py runs to its end on a CPU, with any number of processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "communicator_memory.py"
CONTEXT, PRODUCT = "context", "kernels of a product, forward and backward"


@pytest.mark.nightly
@pytest.mark.parametrize(("n_ranks", "n_more"), [(1, 0), (2, 2), (3, 2), (4, 3)])  # transfers, and groups of 2 in 4
def test_every_thing_leaves_a_row(n_ranks, n_more, tmp_path) -> None:
    out = tmp_path / "rows.jsonl"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks)]
    done = subprocess.run([*launch, PROGRAM, out], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["what"] for row in rows[:2]] == [CONTEXT, PRODUCT] and rows[0]["added_bytes"] > 0
    assert len(rows) == len({row["what"] for row in rows}) == 7 + n_more
    assert all(row["n_ranks"] == n_ranks and row["outside_bytes"] > 0 and row["device"] == "CPU" for row in rows)
