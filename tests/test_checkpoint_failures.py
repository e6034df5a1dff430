"""What ends a run, and what is left of it: killed ranks, a kill while writing, SIGTERM, hangs."""

import glob
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from argparse import ArgumentParser
from contextlib import redirect_stderr
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from distributed import tiny_gpt
from distributed.launch import run_folder, run_ranks
from test_runtime_program import emit

from autoplan.runtime import (
    Config,
    ParallelModel,
    PlainTraining,
    TrainingRun,
    add_checkpoint_options,
    build_rank_mesh,
    failure_watch,
    global_batch,
    hang_watch,
    job_store,
    join_process_group,
    process_group,
    resume,
)
from autoplan.runtime.checkpoints.planner import CheckpointError
from autoplan.runtime.hang_watch import watch_for_hangs

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
    assert sorted(path.name for path in (tmp_path / "saved").glob("step-*")) == [
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


def interrupted(n_steps=None):
    """On one of two ranks, of which the second gets a Ctrl-C in its second step: as `told_to_stop`, and its words."""
    config = Config(dp=2, precision="fp64")
    model = ParallelModel(config, tiny_gpt, mesh=build_rank_mesh(config, "cpu"))
    parser = ArgumentParser()
    add_checkpoint_options(parser)
    run = TrainingRun(model, parser.parse_args([]), n_steps=n_steps)
    ends = []
    for step in range(2):
        if step == 1 and model.mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        model.step(tiny_gpt.make_batch(1))
        ends.append(run.ends_after(step))
    with redirect_stderr(io.StringIO()) as said:
        code = run.finish()
    return ends, code, said.getvalue()


def test_a_ctrl_c_without_a_folder_ends_all_ranks_after_the_step_and_the_first_of_a_host_says_so():
    said = "interrupted after 2 steps; nothing was saved, as no --checkpoint-dir was given\n"
    assert run_ranks(interrupted, 2) == [([False, True], 130, said), ([False, True], 130, "")]


def test_a_ctrl_c_in_the_last_step_is_no_interruption():
    assert run_ranks(interrupted, 2, 3)[0][:2] == ([False, True], 130)
    assert run_ranks(interrupted, 2, 2) == [([False, False], 0, ""), ([False, False], 0, "")]


def told_to_stop(folder, number, is_told_twice=False):
    """In one process that is told so in its second step: whether it ends after each, its code, what it saved."""
    config = Config(precision="fp64")
    model = ParallelModel(config, tiny_gpt, mesh=build_rank_mesh(config, "cpu"))
    parser = ArgumentParser()
    add_checkpoint_options(parser)
    run = TrainingRun(model, parser.parse_args(["--checkpoint-dir", folder]))
    ends = []
    for step in range(2):
        if step == 1:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # by a scheduler, and by torchrun
            if is_told_twice:
                resume.SAME_SIGNAL_S = 0.0
                os.kill(os.getpid(), signal.SIGTERM)
        model.step(tiny_gpt.make_batch(1))
        ends.append(run.ends_after(step))
    return ends, run.finish(), glob.glob("step-*", root_dir=folder)


def runs_from_an_archive(folder):
    """In one process: the steps that runs started from, some of them restarted; why one was refused; what is saved."""
    config = Config(precision="fp64")
    mesh = build_rank_mesh(config, "cpu")
    parser = ArgumentParser()
    add_checkpoint_options(parser)

    def started_at(saves, *options, n_steps):
        model = ParallelModel(config, tiny_gpt, mesh=mesh)
        run = TrainingRun(model, parser.parse_args(["--checkpoint-dir", f"{folder}/{saves}", "--keep", "1", *options]))
        start = model.n_steps
        for step in range(start, n_steps):
            model.step(tiny_gpt.make_batch(1))
            run.ends_after(step)
        run.finish()
        return start

    archived = ("--resume", f"{folder}/archive/step-00000001")
    starts = [started_at("archive", n_steps=1), started_at("bad", n_steps=4)]
    starts += [started_at("good", *archived, n_steps=n_steps) for n_steps in (2, 3)]
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    starts += [started_at("good", *archived, n_steps=5), started_at("good", n_steps=5)]
    with pytest.raises(CheckpointError) as refused:
        started_at("bad", *archived, n_steps=2)
    without_origin(f"{folder}/good/step-00000005")
    starts += [started_at("good", n_steps=6)]
    return starts, str(refused.value), [glob.glob(f"{name}/step-*", root_dir=folder) for name in ("bad", "good")]


def without_origin(checkpoint):
    """Make it one of an earlier version."""
    state, manifest = (json.loads(Path(checkpoint, name).read_text()) for name in ("state.json", "MANIFEST.json"))
    del state["extra"]["resumed_from"]
    manifest["bytes"]["state.json"] = Path(checkpoint, "state.json").write_text(json.dumps(state))
    del manifest["crc32"]
    Path(checkpoint, "MANIFEST.json").write_text(json.dumps(manifest))


def test_a_run_that_began_at_a_given_checkpoint_goes_on_from_its_own_and_spares_those_of_another_run(tmp_path):
    ((starts, refused, saved),) = run_ranks(runs_from_an_archive, 1, str(tmp_path))
    assert starts == [0, 0, 1, 2, 3, 5, 5]
    archived, newest = tmp_path / "archive" / "step-00000001", tmp_path / "bad" / "step-00000004"
    said = (
        f"--resume {archived}: found {newest}, which is newer and was not saved by a run that --resume {archived} "
        "began; expected none after step 1\n  fix: "
    )
    assert refused.startswith(said)
    assert saved == [["bad/step-00000004"], ["good/step-00000006"]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_or_a_ctrl_c_ends_the_run_after_its_step_with_a_checkpoint_and_its_code(tmp_path, number):
    assert run_ranks(told_to_stop, 1, str(tmp_path), number) == [([False, True], 128 + number, ["step-00000002"])]


def test_a_second_ctrl_c_which_torchrun_passes_on_as_sigterm_ends_the_run_at_once(tmp_path):
    process = get_context("fork").Process(target=told_alone, args=(str(tmp_path),))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGTERM
    assert not list(tmp_path.glob("step-*"))


def told_alone(folder):
    join_process_group("cpu")
    told_to_stop(folder, signal.SIGINT, is_told_twice=True)


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
    (saved,) = (tmp_path / "saved").glob("step-*")
    assert saved.name == f"step-{int(match[1]):08d}"


def calls(file, function):
    """A function of that file which calls the other."""
    exec(compile("def call():\n    function()", file, "exec"), names := {"function": function})
    return names["call"]


def test_the_watch_for_hangs_keeps_nothing_of_what_it_has_looked_at(monkeypatch):
    monkeypatch.setattr(job_store, "TCPStore", lambda *args, **options: None)
    monkeypatch.setattr(job_store, "PrefixStore", lambda *args: None)
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


def test_the_watch_for_hangs_is_connected_before_its_thread_starts(monkeypatch):
    """A thread inside the constructor of a store cannot be stopped, and aborts a process that ends meanwhile."""
    connected_by = []
    monkeypatch.setattr(job_store, "TCPStore", lambda *args, **options: connected_by.append(threading.get_ident()))
    monkeypatch.setattr(job_store, "PrefixStore", lambda *args: None)
    monkeypatch.setattr(hang_watch, "whereabouts", lambda thread: None)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    watch_for_hangs(SimpleNamespace(config=Config(dp=2)), limit_s=0.1)
    [watch] = [thread for thread in threading.enumerate() if thread.name == "hang watch"]
    watch.join(10.0)
    assert connected_by == [threading.get_ident()]


def process_of_rank(rank, port, program, *args, **options):
    """`program` as one of two processes that a launcher starts, each the first of its host; an error ends it so."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    failure_watch.INTERVAL_S = failure_watch.OTHERS_FIRST_S = 0.2
    sys.excepthook = sys.__excepthook__  # not that of a process group which the test process is in
    process_group.start_process_group("cpu", Config(dp=2))
    try:
        program(*args, **options)
        process_group.stop_process_group()
        # A thread inside of a store when the interpreter ends aborts the process: "terminate called".
        assert {"failure watch", "hang watch"}.isdisjoint(thread.name for thread in threading.enumerate())
    except BaseException:
        sys.excepthook(*sys.exc_info())


def ends_of_two(program, *args, **options):
    """The exit codes of both ranks of `program`, which may take 30 s."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("fork")
    given = [(rank, port, program, *args) for rank in range(2)]
    ranks = [context.Process(target=process_of_rank, args=each, kwargs=options) for each in given]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=30)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    return codes


def build_where_one_fails(rank):
    def build_model():
        torch.distributed.barrier()  # both have joined
        if os.environ["RANK"] == str(rank):
            time.sleep(0.5)  # until both have left the barrier
            raise ValueError("no such weights")
        time.sleep(60)  # stands for what the end of another process does not end, as a collective of NCCL

    config = Config(dp=2)
    ParallelModel(config, SimpleNamespace(build_model=build_model), mesh=build_rank_mesh(config, "cpu"))


@pytest.mark.parametrize(
    ("rank", "why"),
    [(1, "rank 1 ended with an error"), (0, "the store of the job is gone: rank 0 or the launcher has ended")],
)
def test_a_rank_that_fails_as_it_builds_its_model_ends_the_others(rank, why, capfd):
    """Rank 0 holds the store, as where a job has several hosts."""
    assert ends_of_two(build_where_one_fails, rank) == [1, 1]
    error = capfd.readouterr().err
    assert f"[rank{rank}]: ValueError: no such weights" in error and f"[rank{1 - rank}]: " not in error
    assert error.count(f"{why}; the ranks of this host end, too\n") == 1


def test_ranks_that_end_well_are_watched_no_longer():
    model = SimpleNamespace(config=Config(dp=2), mesh=SimpleNamespace(rank=0), n_steps=0)
    assert ends_of_two(watch_for_hangs, model, limit_s=60.0) == [0, 0]


def test_ctrl_c_before_the_first_step_is_said_in_one_line_by_the_first_process_of_a_host(monkeypatch, capfd):
    monkeypatch.setattr(os, "_exit", lambda code: left.append(code))
    monkeypatch.setattr(signal, "signal", lambda *handler: None)
    left, hook = [], process_group._exit_at_once(lambda *error: pytest.fail("reported"))
    for local_rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        hook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert left == [130, 130]
    assert capfd.readouterr().err == "interrupted by Ctrl-C\n"


def test_the_watch_for_hangs_does_not_wait_for_a_store_whose_rank_has_ended(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        monkeypatch.setattr(job_store, "CONNECTION_S", 0.5)
        with pytest.raises(torch.distributed.DistError):
            watch_for_hangs(SimpleNamespace(config=Config(dp=2)), limit_s=600.0)


@pytest.mark.parametrize(
    ("of_file", "does"),
    [("train.py", "waits"), ("checkpoints/weight_files.py", "is busy"), ("checkpoints/checkpoint.py", "is busy")],
)
def test_a_rank_that_waits_for_files_of_others_is_given_the_time_they_take(of_file, does):
    lock = threading.Lock()
    torch_wait = calls(f"{torch.__path__[0]}/distributed/distributed_c10d.py", lock.acquire)
    runtime_wait = calls(str(Path(hang_watch.__file__).parent / of_file), torch_wait)
    thread = threading.Thread(target=runtime_wait, daemon=True)
    deadline_s, found = time.monotonic() + 5.0, None
    with lock:
        thread.start()
        while (found is None or of_file not in found[1]) and time.monotonic() < deadline_s:
            found = hang_watch.whereabouts(thread.ident)
    assert found[0] == does and of_file in found[1]


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
