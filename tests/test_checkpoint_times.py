"""The benchmark of checkpoints: what it makes of the lines of a program, and once run beside a real one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent
sys.path.insert(0, str(CHECKOUT / "benchmarks"))
from checkpoint_times import Seen, stall_of, table  # noqa: E402


def row(launch, ends, **fields):
    common = {"program": "gpt", "ranks": 2, "device": "cpu", "every": 3, "saves": 2, "warm_up": 1, "status": "ok"}
    times = {"step_end_s": ends, "start_to_first_step_s": ends[0], "write_s": [], "checkpoint_bytes": None}
    return common | times | fields | {"launch": launch}


PLAIN = row("plain", [9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0])
SAVING = row("saving", [8.0, 10.0, 11.0, 12.5, 13.5, 14.5, 16.5], write_s=[2.0, 4.0], checkpoint_bytes=3 * 10**9)


def test_stall_is_the_time_that_the_steps_after_warm_up_take_longer_per_checkpoint():
    # steps after the warm-up: 5 s without, 6.5 s with two checkpoints; the longest 2 s against 1 s
    assert stall_of(PLAIN, SAVING) == pytest.approx({"stall_s": 0.75, "share": 0.0075, "longest_s": 1.0})


def test_stall_of_a_launch_that_was_cut_short_is_that_of_the_steps_it_came_to():
    # three steps after the warm-up, one of them after the checkpoint of step 3: 3.5 s against 3
    cut = SAVING | {"step_end_s": SAVING["step_end_s"][:5], "status": "out of time"}
    assert stall_of(PLAIN, cut)["stall_s"] == pytest.approx(0.5)
    assert stall_of(PLAIN, cut | {"step_end_s": SAVING["step_end_s"][:3]}) is None


def test_the_table_has_what_was_measured_and_a_dash_for_the_rest(tmp_path):
    results = tmp_path / "results.jsonl"
    failed = row("resumed", [7.0]) | {"start_to_first_step_s": None, "status": "ended with code 1"}
    results.write_text("".join(json.dumps(line) + "\n" for line in (PLAIN, SAVING, failed)))
    line = " ".join(table(results).splitlines()[1].split())
    assert line == "gpt 2 1.000 s 1.300 s 0.750 s 0.75% 1.000 s 3.000 s 3.00 9.000 s -"


def test_steps_and_the_place_of_a_resume_are_read_from_what_the_program_prints():
    seen = Seen(started=1.0)
    for now, line in [(2.0, "resumed from saved/step-00000006: 6 steps were done\n"), (3.0, "step     6  loss 4.5\n")]:
        seen.take(now, line)
    seen.take(4.0, "Traceback\n")
    assert (seen.resumed, seen.step_ends, seen.last_lines) == (2.0, {6: 3.0}, ["Traceback"])


@pytest.mark.nightly
def test_a_program_is_timed_without_and_with_checkpoints_and_resumed(tmp_path):
    folder, results = tmp_path / "program", tmp_path / "results.jsonl"
    plan = ["plan", "examples/mlp.py", "--hw", "dgx_a100_x8/2", "--global-batch", "8", "--fix", "dp=2", "--out"]
    subprocess.run([sys.executable, "-m", "autoplan", *plan, str(folder)], cwd=CHECKOUT, check=True)
    command = ["run", str(folder), str(results), "--device", "cpu", "--every", "4", "--warm-up", "2"]
    subprocess.run([sys.executable, "benchmarks/checkpoint_times.py", *command], cwd=CHECKOUT, check=True)
    plain, saving, resumed = map(json.loads, results.read_text().splitlines())
    assert [len(launch["step_end_s"]) for launch in (plain, saving)] == [12, 12]
    assert (plain["write_s"], len(saving["write_s"]), resumed["first_step"]) == ([], 2, 8)
    assert saving["checkpoint_bytes"] > 0
    assert not (folder / "checkpoint_times").exists()
