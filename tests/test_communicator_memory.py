"""The measurement of what communicators take, tried out with gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "communicator_memory.py"


@pytest.mark.nightly
def test_every_communicator_has_a_row_and_what_they_add_sums_to_what_is_used(tmp_path: Path) -> None:
    # two processes, so that one rank's figures and the largest of all differ little, and no group is smaller than all
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(BENCHMARK), "rows.jsonl"]
    done = subprocess.run(launch, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    names = [row["what"] for row in rows]
    assert len(set(names)) == len(names) and names[:2] == ["nothing", "context"]
    assert sum("group" in name for name in names) == 4
    assert all(row["n_ranks"] == 2 and row["added_bytes"] >= 0 for row in rows)  # the most that was resident only grows
    used = [row["outside_bytes"] for row in rows]
    assert used == sorted(used)
    # what was added by each, of the rank to which it added most, is at least what the largest rank grew by
    sums = accumulate(row["added_bytes"] for row in rows[1:])
    assert all(total >= now - used[0] for total, now in zip(sums, used[1:], strict=True))
