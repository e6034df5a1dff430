"""What ends a run, and what is left of it: killed ranks, a kill while writing, SIGTERM, NaN, hangs, small devices."""

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from distributed import tiny_gpt
from distributed.launch import run_folder, run_ranks
from test_runtime_program import emit
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from autoplan.runtime import (
    CheckpointError,
    Checkpoints,
    Config,
    ParallelModel,
    PlainTraining,
    Run,
    add_checkpoint_options,
    build_rank_mesh,
    global_batch,
    hang_watch,
    load_checkpoint,
)
from autoplan.runtime.hang_watch import watch_for_hangs
from autoplan.runtime.mesh import DeviceMemoryError, check_device_memory
from autoplan.runtime.zero import local_part

TOLERANCE = 1e-9
FSDP = {"dp": 2, "zero_stage": 3, "zero_shard_degree": 2, "n_micro_batches": 2, "precision": "fp64"}
PIPELINE = {"pp": 2, "tp": 2, "micro_batch_size": 2, "n_micro_batches": 2, "precision": "fp64"}
RUN = ("--device", "cpu", "--lr", "1e-2", "--checkpoint-dir", "saved", "--checkpoint-every", "2")
# Once per place, when the model has been called so often, or a checkpoint is about to be completed.
BREAKING = """

import os
import pathlib
import signal
import time


def once(name):
    mark = pathlib.Path(__file__).with_name(name)
    is_first = not mark.exists()
    mark.touch()
    return is_first


def die(after="."):
    while not pathlib.Path(after).exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


n_calls = 0
whole_loss = loss_fn


def loss_fn(outputs, targets):
    global n_calls
    n_calls += 1
    {on_call}
    return whole_loss(outputs, targets)


from torch.distributed.checkpoint.filesystem import FileSystemWriter

whole_finish = FileSystemWriter.finish


def finish(self, **arguments):
    {on_write}
    return whole_finish(self, **arguments)


FileSystemWriter.finish = finish
"""


def break_model(folder, *, on_call="pass", on_write="pass"):
    with (folder / "model.py").open("a") as file:
        file.write(BREAKING.format(on_call=on_call, on_write=on_write))


def undisturbed(n_steps, **fields):
    """The losses of one process, by step."""
    config, cpu = Config(**fields), torch.device("cpu")
    plain = PlainTraining(config, tiny_gpt, build_device=cpu, device=cpu, learning_rate=1e-2)
    batch = {"batch_size": config.global_batch_size, "seed": 0}
    return [plain.step(global_batch(tiny_gpt.make_batch, step=step, **batch)) for step in range(n_steps)]


def printed_losses(text):
    """The loss of each step, as last printed; a step may be taken again."""
    found = {}
    for line in text.splitlines():
        if match := re.match(r"step +(\d+)  loss ([\d.]+)", line):
            found[int(match[1])] = float(match[2])
    return found


def assert_undisturbed(done, *, n_steps, **fields):
    """The run took all steps, and none knows of what happened in between; losses are printed with 6 digits."""
    assert done.returncode == 0, done.stderr
    losses = printed_losses(done.stdout)
    assert sorted(losses) == list(range(n_steps))
    expected = undisturbed(n_steps, **fields)
    assert max(abs(losses[step] - loss) for step, loss in enumerate(expected)) < 1e-6


@pytest.mark.slow
def test_a_run_whose_ranks_are_killed_at_a_step_and_while_writing_ends_as_if_undisturbed(tmp_path):
    emit(tmp_path, config=FSDP, has_parallel_model=False)
    # Two micro-batches a step: rank 1 dies in step 3. Rank 0 dies when the files of step 4 are written, but not its
    # index, nor its manifest.
    break_model(
        tmp_path,
        on_call='n_calls == 7 and os.environ["RANK"] == "1" and once("rank died") and die("saved/step-00000002")',
        on_write='str(self.path).endswith("00000004.part") and once("died while writing") and die()',
    )
    done = run_folder(tmp_path, 2, *RUN, "--steps", "6", n_restarts=3)
    assert (tmp_path / "rank died").exists() and (tmp_path / "died while writing").exists()
    assert_undisturbed(done, n_steps=6, **FSDP)
    # after each death from the last complete checkpoint, which is that of step 2
    assert re.findall(r"resumed from saved/step-(\d+)", done.stderr) == ["00000002"] * 2
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "step-00000002", "step-00000004", "step-00000006",
    ]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("call", range(1, 16, 3))
def test_a_pipeline_whose_rank_is_killed_at_any_step_ends_as_if_undisturbed(tmp_path, call):
    emit(tmp_path, config=PIPELINE, has_parallel_model=True)
    text = (
        (tmp_path / "tiny_parallel.py")
        .read_text()
        .replace("x, is_kept, ids, ones = tensors", "x, is_kept, ids, ones = breaking(tensors)")
    )
    text += (
        "\n\nimport os, pathlib, signal\nn_calls = 0\n\n\ndef breaking(x):\n    global n_calls\n    n_calls += 1\n"
        f"    mark = pathlib.Path(__file__).with_name('died')\n    if n_calls == {call} and not mark.exists() and "
        "os.environ['RANK'] == '3':\n        mark.touch()\n        os.kill(os.getpid(), signal.SIGKILL)\n    return x\n"
    )
    (tmp_path / "tiny_parallel.py").write_text(text)
    done = run_folder(tmp_path, 4, *RUN, "--steps", "8", n_restarts=1)
    assert (tmp_path / "died").exists()
    assert_undisturbed(done, n_steps=8, **PIPELINE)


def start_alone(folder, *options):
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py", *RUN, *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment, **pipes)


@pytest.mark.nightly
def test_sigterm_finishes_the_step_saves_and_ends_with_143_and_the_same_command_goes_on(tmp_path):
    alone = {"n_micro_batches": 2, "precision": "fp64"}
    emit(tmp_path, config=alone, has_parallel_model=False)
    break_model(tmp_path, on_call='n_calls == 5 and once("told") and os.kill(os.getpid(), signal.SIGTERM)')
    first = start_alone(tmp_path, "--steps", "5", "--checkpoint-every", "100")
    stdout, stderr = first.communicate(timeout=60)
    assert first.returncode == 143, stderr
    assert sorted(printed_losses(stdout)) == [0, 1, 2]  # the 5th micro-batch belongs to step 2, which is finished
    assert "told to stop: saved after 3 steps" in stderr
    second = start_alone(tmp_path, "--steps", "5", "--export", "weights.safetensors")
    rest, stderr = second.communicate(timeout=60)
    assert second.returncode == 0, stderr
    assert sorted(printed_losses(rest)) == [3, 4]
    expected = undisturbed(5, **alone)
    found = printed_losses(stdout + rest)
    assert max(abs(found[step] - loss) for step, loss in enumerate(expected)) < 1e-6
    assert (tmp_path / "weights.safetensors").stat().st_size > 8 * 16 * 24


def told_to_stop(folder):
    """In one process that is sent SIGTERM in its second step: whether it ends after each, its code, what it saved."""
    config = Config(precision="fp64")
    model = ParallelModel(config, tiny_gpt, mesh=build_rank_mesh(config, "cpu"))
    parser = ArgumentParser()
    add_checkpoint_options(parser)
    run = Run(model, parser.parse_args(["--checkpoint-dir", folder]))
    ends = []
    for step in range(2):
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        model.step(tiny_gpt.make_batch(1))
        ends.append(run.ends_after(step))
    return ends, run.finish(), os.listdir(folder)


def test_sigterm_ends_the_run_after_its_step_with_a_checkpoint_and_143(tmp_path):
    assert run_ranks(told_to_stop, 1, str(tmp_path)) == [([False, True], 143, ["step-00000002"])]


@pytest.mark.nightly
def test_sigterm_to_the_launcher_reaches_all_ranks_which_save_the_same_step(tmp_path):
    emit(tmp_path, config=FSDP, has_parallel_model=False)
    break_model(tmp_path, on_call="time.sleep(0.2)")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py", *RUN]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    options = ("--steps", "1000", "--checkpoint-every", "1000")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    launcher = subprocess.Popen([*command, *options], cwd=tmp_path, env=environment, **pipes)
    assert launcher.stdout is not None
    for line in launcher.stdout:
        if line.startswith("step     2"):
            launcher.send_signal(signal.SIGTERM)
            break
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode != 0
    match = re.search(r"told to stop: saved after (\d+) steps", stderr)
    assert match is not None, stderr
    (saved,) = (tmp_path / "saved").iterdir()
    assert saved.name == f"step-{int(match[1]):08d}"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What each function below returned on two ranks, by its name: one launch for all."""
    return run_ranks(all_of_two_ranks, 2, str(tmp_path_factory.mktemp("two_ranks")))


def all_of_two_ranks(folder):
    return {
        "bad_steps": [bad_step(1, value, is_fused) for is_fused in (False, True) for value in (math.nan, math.inf)],
        "device_memory_error": device_memory_error(),
        "other_model": other_model(f"{folder}/other"),
        "save_without_room": save_without_room(f"{folder}/full"),
    }


def bad_step(bad_rank, value, is_fused):
    """On one rank: what a step raises whose loss is not finite on `bad_rank`, and whether anything changed."""
    mesh, factors = build_rank_mesh(Config(**FSDP), "cpu"), iter([1.0, 1.0, value, value])  # of each micro-batch

    def build_optimizer(parameters):
        return torch.optim.AdamW(parameters, lr=1e-2, fused=is_fused)

    def loss_fn(outputs, targets):
        return tiny_gpt.loss_fn(outputs, targets) * (next(factors) if mesh.rank == bad_rank else 1.0)

    model_file = SimpleNamespace(build_model=tiny_gpt.build_model, loss_fn=loss_fn, build_optimizer=build_optimizer)
    model = ParallelModel(Config(**FSDP), model_file, mesh=mesh)
    model.n_steps = 11
    model.step(tiny_gpt.make_batch(model.config.global_batch_size // model.config.dp))
    before = [tensor.clone() for tensor in trained_tensors(model)]
    try:
        model.step(tiny_gpt.make_batch(model.config.global_batch_size // model.config.dp))
    except FloatingPointError as error:
        return str(error), all(map(torch.equal, trained_tensors(model), before))
    return "", False


def trained_tensors(model):
    """Parameters and what the optimizer keeps of them, this rank's part."""
    states = [value for state in model.optimizer.state.values() for value in state.values()]
    return [local_part(tensor.detach()) for tensor in (*model.parameters(), *states)]


def test_a_loss_that_is_not_finite_changes_nothing_and_names_step_and_rank(two_ranks):
    for found in two_ranks:
        for word, (message, is_unchanged) in zip(("nan", "inf") * 2, found["bad_steps"], strict=True):
            assert is_unchanged
            assert f"step 12: the loss is {word}" in message
            assert f"not finite on rank 1 (dp 1, tp 0, pp 0): loss {word}" in message
            assert "rank 0" not in message
            assert "fix: look at the data of this step; resume from the last checkpoint" in message


def test_the_watch_for_hangs_keeps_nothing_of_what_it_has_looked_at(monkeypatch):
    monkeypatch.setattr(hang_watch, "TCPStore", lambda *args, **options: None)
    monkeypatch.setattr(hang_watch, "PrefixStore", lambda *args: None)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    look, looked = hang_watch.whereabouts, threading.Event()

    def look_once(thread):
        found = None if looked.is_set() else look(thread)
        looked.set()
        return found

    monkeypatch.setattr(hang_watch, "whereabouts", look_once)

    def step():
        gradient = torch.zeros(1)
        assert looked.wait(10.0)
        return weakref.ref(gradient)

    model = SimpleNamespace(config=Config(dp=2), mesh=SimpleNamespace(rank=0), n_steps=0)
    watch_for_hangs(model, limit_s=5.0)  # looks every 0.5 s
    [watch] = [thread for thread in threading.enumerate() if thread.name == "hang watch"]
    assert step()() is None
    watch.join(10.0)
    assert not watch.is_alive()


@pytest.mark.nightly
def test_a_rank_that_hangs_is_named_with_the_line_where_it_is_and_the_job_ends(tmp_path):
    emit(tmp_path, config=FSDP, has_parallel_model=False)
    break_model(tmp_path, on_call='n_calls == 3 and os.environ["RANK"] == "1" and time.sleep(1000)')
    started_s = time.monotonic()
    done = run_folder(tmp_path, 2, "--device", "cpu", "--steps", "5", "--timeout", "8")
    assert time.monotonic() - started_s < 60
    assert done.returncode != 0
    assert "a collective did not end within 8 s: rank 1 did not come" in done.stderr
    assert re.search(r"rank 1: is busy for \d+ s at \S+model.py:\d+ in loss_fn, after 1 steps", done.stderr)
    assert re.search(r"rank 0: waits for \d+ s", done.stderr)


def device_memory_error():
    from torch import distributed

    try:
        check_device_memory(70 * 2**30, free_bytes=(80 - 40 * distributed.get_rank()) * 2**30)
    except DeviceMemoryError as error:
        return str(error)
    return ""


def test_too_little_device_memory_stops_every_rank_with_planned_and_found(two_ranks):
    first, second = (found["device_memory_error"] for found in two_ranks)
    assert first == second
    assert re.search(r"rank 1 on \S+: planned: 70.0 GiB; found: 40.0 GiB free", first)
    assert "rank 0" not in first


def refusals(folder):
    """In one process: what each of some options is refused with."""
    cases = {
        ("--checkpoint-dir", f"{folder}/file/saved"): "cannot be written: Not a directory",
        ("--checkpoint-dir", folder, "--keep", "0"): "keep: found 0, expected 1 or more",
        ("--checkpoint-every", "0"): "--checkpoint-every: found 0, expected 1 or more",
        ("--resume", f"{folder}/nowhere"): "/nowhere: found no complete checkpoint",
        (
            "--checkpoint-dir",
            f"{folder}/saved",
            "--resume",
            "none",
        ): "step-00000000, expected an empty --checkpoint-dir",
        ("--export", "weights.bin"): "weights.bin: found the ending '.bin', expected .safetensors",
        ("--init-from", "missing.safetensors"): "missing.safetensors: found no readable weights",
    }
    config = Config(precision="fp64")
    model = ParallelModel(config, tiny_gpt, mesh=build_rank_mesh(config, "cpu"))
    Path(folder, "file").touch()
    checkpoints = Checkpoints(model, Path(folder, "saved"))
    checkpoints.save()
    checkpoints.close()
    parser = ArgumentParser()
    add_checkpoint_options(parser)
    found = {}
    for options, expected in cases.items():
        try:
            Run(model, parser.parse_args(options))
        except CheckpointError as error:
            found[options] = (expected, str(error))
    return found, len(cases)


def test_options_that_cannot_be_followed_are_refused_with_what_was_found_and_expected(tmp_path):
    ((found, n_cases),) = run_ranks(refusals, 1, str(tmp_path))
    assert len(found) == n_cases
    for expected, message in found.values():
        assert expected in message


def other_model(folder):
    """On one rank: what loading a checkpoint of another model says, and whether the parameters stayed."""
    config = Config(dp=2, precision="fp64")
    mesh = build_rank_mesh(config, "cpu")
    model = ParallelModel(config, tiny_gpt, mesh=mesh)
    checkpoints = Checkpoints(model, folder)
    checkpoints.save()
    path = checkpoints.wait()
    wider = SimpleNamespace(build_model=lambda: torch.nn.Sequential(torch.nn.Linear(2, 3)), loss_fn=None)
    other = ParallelModel(config, wider, mesh=mesh)
    before = [parameter.full_tensor() for parameter in other.parameters()]
    try:
        load_checkpoint(other, path)
    except CheckpointError as error:
        same = all(torch.equal(p.full_tensor(), old) for p, old in zip(other.parameters(), before, strict=True))
        return str(error), same
    return "", False


def test_a_checkpoint_of_another_model_is_refused_by_name_and_changes_nothing(two_ranks):
    for message, is_unchanged in [found["other_model"] for found in two_ranks]:
        assert is_unchanged
        assert "step-00000000: is of another model" in message
        assert "0.weight: not in it" in message
        assert "and " in message and " more" in message


def save_without_room(folder):
    """On one rank: what is said of a save that fails on rank 1, and what is left."""
    config = Config(dp=2, precision="fp64")
    model = ParallelModel(config, tiny_gpt, mesh=build_rank_mesh(config, "cpu"))
    checkpoints = Checkpoints(model, folder)
    checkpoints.save()
    checkpoints.wait()
    model.n_steps = 7
    if model.mesh.rank == 1:
        FileSystemWriter.write_data = _no_room
    checkpoints.save()
    try:
        checkpoints.wait()
    except CheckpointError as error:
        return str(error), checkpoints.newest().name
    return "", ""


def _no_room(*_):
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_told_on_every_rank_and_the_checkpoint_before_stays(two_ranks):
    for message, newest in [found["save_without_room"] for found in two_ranks]:
        assert "a checkpoint could not be written; those before it are untouched" in message
        assert "rank 1: [Errno 28] No space left on device" in message
        assert newest == "step-00000000"
