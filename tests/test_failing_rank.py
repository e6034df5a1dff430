"""A rank that fails ends the whole job soon, and stderr says which rank it was and why."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from distributed.launch import run_folder, run_ranks
from test_runtime_program import emit

from autoplan.errors import MeasureError
from autoplan.files import write_folder
from autoplan.output.folder import report_files
from autoplan.output.verify import verify_folder

pytestmark = pytest.mark.slow

MOST_S = 60.0
RUN = ("--steps", "4", "--device", "cpu")
PIPELINE = {"pp": 2, "tp": 2, "n_micro_batches": 2}
RAISE = 'raise ValueError("the 5th micro-batch is bad")'
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
LEAVE = "os._exit(3)"
# The model's own code fails on one rank in the 5th micro-batch, when the second step (of two each) is done.
BREAKING = """

import os
import signal

n_calls = 0


def breaking(x):
    global n_calls
    n_calls += 1
    if n_calls == 5 and os.environ["RANK"] == "{rank}":
        {failure}
    return x
"""


def break_rank(file, *, rank, failure):
    """Let the model in `file` fail on `rank`."""
    text = file.read_text()
    broken = text.replace("F.cross_entropy(outputs", "F.cross_entropy(breaking(outputs)")
    broken = broken.replace("x, is_kept, ids, ones = tensors", "x, is_kept, ids, ones = breaking(tensors)")
    assert broken != text
    file.write_text(broken + BREAKING.format(rank=rank, failure=failure))


def assert_ends_soon(run):
    """Run it; what it returned, if it failed in time."""
    started_s = time.monotonic()
    done = run()
    assert time.monotonic() - started_s < MOST_S
    assert done.returncode != 0
    return done


@pytest.mark.nightly
def test_a_data_parallel_rank_that_raises_ends_the_job_with_its_traceback(tmp_path):
    emit(tmp_path, config={"dp": 2, "n_micro_batches": 2}, has_parallel_model=False)
    break_rank(tmp_path / "model.py", rank=1, failure=RAISE)
    done = assert_ends_soon(lambda: run_folder(tmp_path, 2, *RUN, timeout_s=2 * MOST_S))
    assert "[rank1]: ValueError: the 5th micro-batch is bad" in done.stderr
    assert "in breaking" in done.stderr
    # Rank 0 had told of the first step before the second could be done; its line of the second races the failure.
    assert [line.split()[1] for line in done.stdout.splitlines()] in (["0"], ["0", "1"])


@pytest.mark.nightly
def test_a_pipeline_rank_that_raises_ends_the_job_with_its_traceback(tmp_path):
    emit(tmp_path, config=PIPELINE, has_parallel_model=True)
    break_rank(tmp_path / "tiny_parallel.py", rank=3, failure=RAISE)
    done = assert_ends_soon(lambda: run_folder(tmp_path, 4, *RUN, timeout_s=2 * MOST_S))
    assert "[rank3]: ValueError: the 5th micro-batch is bad" in done.stderr
    assert not re.search(r"\[rank[012]\]: \w*Error", done.stderr)  # only the rank whose fault it is


@pytest.mark.parametrize(
    ("tp", "failure", "code"),
    [(1, KILL, -9), *(pytest.param(2, *how, marks=pytest.mark.nightly) for how in ((KILL, -9), (LEAVE, 3)))],
)
def test_a_pipeline_rank_that_dies_without_a_word_ends_the_job_and_is_named(tmp_path, tp, failure, code):
    emit(tmp_path, config={**PIPELINE, "tp": tp}, has_parallel_model=True)
    generated = tmp_path / "parallel_model.py"
    generated.write_text(generated.read_text().replace("tp_degree=2", f"tp_degree={tp}"))
    rank = tp  # the first of the second stage
    break_rank(tmp_path / "tiny_parallel.py", rank=rank, failure=failure)
    done = assert_ends_soon(lambda: run_folder(tmp_path, 2 * tp, *RUN, timeout_s=2 * MOST_S))
    cause = done.stderr[done.stderr.index("Root Cause") :]
    assert re.search(rf"rank      : {rank} \(local_rank: {rank}\)\n\s*exitcode  : {code} ", cause)


@pytest.mark.nightly
def test_verify_of_a_program_whose_rank_raises_ends_with_the_traceback(tmp_path, answer, capfd):
    scratch, folder = tmp_path / "scratch", tmp_path / "out"
    scratch.mkdir()
    emit(scratch, config={"dp": 2, "n_micro_batches": 2, "precision": "fp64"}, has_parallel_model=False)
    break_rank(scratch / "model.py", rank=1, failure=RAISE)
    program = {str(path.relative_to(scratch)): path.read_text() for path in scratch.rglob("*.py")}
    mesh = replace(answer.best.plan.mesh, dp=1, zero_stage=0, zero_shard_degree=1)  # of two processes, as the program
    best = replace(answer.best, plan=replace(answer.best.plan, mesh=mesh))
    answer = replace(answer, result=replace(answer.result, best=best))
    write_folder(folder, {**program, **report_files(answer)})
    started_s = time.monotonic()
    with pytest.raises(MeasureError, match="ended with exit code 1"):
        verify_folder(folder, n_steps=4, device="cpu")
    assert time.monotonic() - started_s < MOST_S
    error = capfd.readouterr().err
    assert "[rank1]: ValueError: the 5th micro-batch is bad" in error and "in breaking" in error


SCRIPT = """
import os
import torch
from torch import nn
from autoplan import parallelize

net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
batch = (torch.randn(2, 16), torch.randn(2, 16))
options = {"global_batch": 4, "precision": "fp32", "fix": (("dp", "2"),), "device_type": "cpu"}
model = parallelize(net, batch, hw="dgx_a100_x8", loss_fn=nn.functional.mse_loss, **options)
for step in range(4):
    if step == 2 and os.environ["RANK"] == "1":
        raise ValueError("step 2 is bad")
    model.step(batch)
"""


@pytest.mark.nightly
def test_a_script_around_parallelize_that_raises_on_one_rank_ends_with_its_traceback(tmp_path):
    Path(tmp_path, "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"]
    options = {"cwd": tmp_path, "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "timeout": 2 * MOST_S}
    done = assert_ends_soon(lambda: subprocess.run(command, capture_output=True, text=True, check=False, **options))
    assert "[rank1]: ValueError: step 2 is bad" in done.stderr


def _crashes_once(folder):
    if not (Path(folder) / "crashed").exists():
        (Path(folder) / "crashed").touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    return "done"


def test_a_launch_of_tests_in_which_torch_crashed_is_repeated(tmp_path, capsys):
    assert run_ranks(_crashes_once, 1, str(tmp_path), backend="", timeout_s=60.0) == ["done"]
    assert "_crashes_once: ranks [0] of 1 crashed, launched again" in capsys.readouterr().err
