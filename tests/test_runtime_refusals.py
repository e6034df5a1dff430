"""What the runtime refuses on every rank: losses not finite, small devices, wrong options, other models, full disks."""

import contextlib
import io
import math
import re
import resource
import subprocess
import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from distributed import tiny_gpt
from distributed.launch import run_ranks
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from autoplan.runtime import (
    CheckpointError,
    Checkpoints,
    Config,
    ParallelModel,
    TrainingRun,
    add_checkpoint_options,
    build_rank_mesh,
    load_checkpoint,
)
from autoplan.runtime.checkpoints.folder import newest_complete
from autoplan.runtime.checkpoints.planner import RankCheckpointError, _SummedFiles, write_pieces
from autoplan.runtime.planned_devices import DeviceMemoryError, check_device_memory
from autoplan.runtime.refusal import DataError, Refusal, said_once
from autoplan.runtime.stages.pieces import Piece
from autoplan.runtime.stages.zero import local_part
from autoplan.runtime.update.finite import NotFiniteError

FSDP = {"dp": 2, "zero_stage": 3, "zero_shard_degree": 2, "n_micro_batches": 2, "precision": "fp64"}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What each function below returned on two ranks, by its name: one launch for all."""
    return run_ranks(all_of_two_ranks, 2, str(tmp_path_factory.mktemp("two_ranks")))


def all_of_two_ranks(folder):
    return {
        "bad_steps": [bad_step(1, value, is_fused) for is_fused in (False, True) for value in (math.nan, math.inf)],
        "device_memory_error": device_memory_error(),
        "first_rank_refuses": first_rank_refuses(f"{folder}/nowhere"),
        "other_model": other_model(f"{folder}/other"),
        "damaged": damaged(f"{folder}/damaged"),
        "error_beside_a_save": error_beside_a_save(f"{folder}/error"),
        "save_out_of_time": save_out_of_time(f"{folder}/slow"),
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
        return str(error), error.code, all(map(torch.equal, trained_tensors(model), before))
    return "", 0, False


def trained_tensors(model):
    """Parameters and what the optimizer keeps of them, this rank's part."""
    states = [value for state in model.optimizer.state.values() for value in state.values()]
    return [local_part(tensor.detach()) for tensor in (*model.parameters(), *states)]


def test_a_loss_that_is_not_finite_changes_nothing_and_names_step_and_rank(two_ranks):
    for rank, found in enumerate(two_ranks):
        for word, (message, code, is_unchanged) in zip(("nan", "inf") * 2, found["bad_steps"], strict=True):
            assert is_unchanged
            assert code == (1 if rank else message)
            assert f"step 12: the loss is {word}" in message
            assert f"not finite on rank 1 (dp 1, tp 0, pp 0): loss {word}" in message
            assert "rank 0" not in message
            assert "fix: look at the data of this step; resume from the last checkpoint" in message


def test_what_one_rank_notes_of_its_batch_is_said_by_that_rank(monkeypatch):
    monkeypatch.setenv("RANK", "9")
    for local_rank, message in (("0", "step 3: the loss is nan\n"), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        error = NotFiniteError("step 3: the loss is nan")
        error.add_note("inputs: found 6 numbers")
        error.add_note("targets: found 1 numbers")
        assert error.code == f"{message}rank 9: inputs: found 6 numbers\nrank 9: targets: found 1 numbers"
        assert error.__notes__ == ["inputs: found 6 numbers", "targets: found 1 numbers"]


def device_memory_error():
    from torch import distributed

    try:
        check_device_memory(70 * 2**30, free_bytes=(80 - 40 * distributed.get_rank()) * 2**30)
    except DeviceMemoryError as error:
        return error.code
    return ""


def test_too_little_device_memory_stops_every_rank_and_the_first_says_what_is_planned_and_found(two_ranks):
    first, second = (found["device_memory_error"] for found in two_ranks)
    assert second == 1
    assert re.search(r"rank 1 on \S+: planned: 70.0 GiB; found: 40.0 GiB free", first)
    assert "rank 0" not in first


def test_a_checkpoint_error_is_said_once_a_host_unless_one_rank_may_be_alone_with_it(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    shared, own = CheckpointError("found none"), RankCheckpointError("found none")
    assert (shared.code, own.code, str(shared)) == (1, "found none", "found none")


@pytest.mark.parametrize(("error", "said_later"), [(DataError, "too few samples"), (CheckpointError, 1)])
def test_a_program_says_a_refusal_by_the_first_process_of_a_host_before_another_one_may(monkeypatch, error, said_later):
    waited_s = []
    monkeypatch.setattr("autoplan.runtime.refusal.time.sleep", waited_s.append)
    monkeypatch.setattr("autoplan.runtime.refusal.signal.signal", lambda *handler: None)

    @said_once
    def program():
        raise error("too few samples")

    for local_rank, waits_s, said in (("0", [], "too few samples"), ("1", [5.0], said_later)):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(Refusal) as end:
            program()
        assert (waited_s, end.value.code) == (waits_s, said)


def test_what_a_rank_notes_of_its_batch_is_said_without_waiting_for_the_first(monkeypatch):
    monkeypatch.setattr("autoplan.runtime.refusal.time.sleep", lambda _: pytest.fail("waited"))
    monkeypatch.setenv("LOCAL_RANK", "1")

    @said_once
    def program():
        error = NotFiniteError("the loss is nan")
        error.add_note("inputs: found 6 numbers")
        raise error

    with pytest.raises(NotFiniteError) as end:
        program()
    assert end.value.code.endswith(": inputs: found 6 numbers")


def test_two_processes_with_the_same_refusal_say_it_once(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import os, sys, time\n"
        "from autoplan.runtime import said_once\n"
        "from autoplan.runtime.refusal import DataError\n"
        "@said_once\n"
        "def main():\n"
        "    time.sleep(1.0 if os.environ['LOCAL_RANK'] == '0' else 0.0)  # later than the other\n"
        "    raise DataError('too few samples')\n"
        "main()\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ended = subprocess.run(launch, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("too few samples")) == (1, 1)


def refusals(folder):
    """In one process: what each of some options is refused with."""
    cases = {
        ("--checkpoint-dir", f"{folder}/file/saved"): "cannot be written: Not a directory",
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
    try:
        Checkpoints(model, folder, keep=0)
    except CheckpointError as error:
        found["keep"] = ("keep: found 0, expected 1 or more", str(error))
    for options, expected in cases.items():
        try:
            TrainingRun(model, parser.parse_args(options))
        except CheckpointError as error:
            found[options] = (expected, str(error))
    return found, 1 + len(cases)


def test_options_that_cannot_be_followed_are_refused_with_what_was_found_and_expected(tmp_path):
    ((found, n_cases),) = run_ranks(refusals, 1, str(tmp_path))
    assert len(found) == n_cases
    for expected, message in found.values():
        assert expected in message


def first_rank_refuses(folder):
    """On one rank: what ends it where the first one finds no checkpoint to go on from."""
    config = Config(dp=2, precision="fp64")
    parser = ArgumentParser()
    add_checkpoint_options(parser)
    try:
        TrainingRun(
            ParallelModel(config, tiny_gpt, mesh=build_rank_mesh(config, "cpu")),
            parser.parse_args(["--resume", folder]),
        )
    except CheckpointError as error:
        return str(error), error.code
    return "", 0


def test_what_the_first_rank_refuses_ends_the_others_without_a_word(two_ranks):
    (message, said), other = (found["first_rank_refuses"] for found in two_ranks)
    assert "nowhere: found no complete checkpoint" in message
    assert (said, other) == (message, (message, 1))


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


def damaged(folder):
    """On one rank: what loading says where a bit changed on the disk, and whether the parameters stayed."""
    config = Config(dp=2, precision="fp64")
    model = ParallelModel(config, tiny_gpt, mesh=build_rank_mesh(config, "cpu"))
    checkpoints = Checkpoints(model, folder)
    checkpoints.save()
    path = checkpoints.wait()
    if model.mesh.rank == 0:
        file = max(path.glob("__1_*"), key=lambda file: file.stat().st_size)
        body = bytearray(file.read_bytes())
        body[len(body) // 2] ^= 1
        file.write_bytes(body)
    held = [local_part(parameter.detach()).fill_(7.0) for parameter in model.parameters()]
    dist.barrier()
    try:
        load_checkpoint(model, path)
    except CheckpointError as error:
        return str(error), all((tensor == 7.0).all() for tensor in held)
    return "", False


def test_a_checkpoint_that_changed_on_the_disk_is_refused_on_every_rank_and_changes_nothing(two_ranks):
    for message, is_unchanged in [found["damaged"] for found in two_ranks]:
        assert is_unchanged
        assert re.search(r"step-00000000: damaged: other bytes than were written are in __1_\d.distcp\n", message)


def error_beside_a_save(folder):
    """On one rank: the checkpoint that was complete when an error left a run on all ranks, beside a slow save."""
    config = Config(dp=2, precision="fp64")
    model = ParallelModel(config, tiny_gpt, mesh=build_rank_mesh(config, "cpu"))
    parser = ArgumentParser()
    add_checkpoint_options(parser)
    run = TrainingRun(model, parser.parse_args(["--checkpoint-dir", folder, "--checkpoint-every", "1"]))
    with slow_saves(), contextlib.suppress(FloatingPointError), run:
        model.step(tiny_gpt.make_batch(1))
        run.ends_after(0)
        raise FloatingPointError
    return newest_complete(Path(folder)).path


@contextlib.contextmanager
def slow_saves():
    """Inside, a save takes half a second longer."""
    whole_finish = FileSystemWriter.finish

    def finish(writer, **arguments):
        time.sleep(0.5)
        whole_finish(writer, **arguments)

    FileSystemWriter.finish = finish
    try:
        yield
    finally:
        FileSystemWriter.finish = whole_finish


def test_an_error_ends_a_run_once_the_save_beside_it_is_complete(two_ranks):
    assert all(found["error_beside_a_save"].name == "step-00000001" for found in two_ranks)


def save_out_of_time(folder):
    """On one rank: what is said of a save that an error leaves no time."""
    config = Config(dp=2, precision="fp64")
    checkpoints = Checkpoints(ParallelModel(config, tiny_gpt, mesh=build_rank_mesh(config, "cpu")), folder)
    with slow_saves(), contextlib.redirect_stderr(io.StringIO()) as said:
        checkpoints.save()
        checkpoints.complete_within(0.0)
        checkpoints.close()
    return said.getvalue()


def test_a_save_that_is_not_complete_in_time_is_told_as_lost_and_why(two_ranks):
    assert all(found["save_out_of_time"].endswith("under way is lost: TimeoutError\n") for found in two_ranks)


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
        return str(error), [path.name for path in checkpoints.folder.glob("step-*")]
    return "", []


def test_a_file_on_a_full_disk_takes_what_it_is_given_and_is_found_out_later():
    files = _SummedFiles()
    with files.create_stream("/dev/full", "wb") as file:
        assert file.write(bytes(2**20)) == 2**20
    with pytest.raises(OSError, match="No space left on device"):
        files.check_written()


def test_what_a_full_disk_does_to_the_threads_that_write_is_not_printed(tmp_path, capfd):
    pieces = [Piece(f"p{i}", (10_000,), (0,), torch.zeros(10_000)) for i in range(8)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            write_pieces(tmp_path / "step.part", pieces, group=None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capfd.readouterr().err == ""


def _no_room(*_):
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_told_on_every_rank_and_the_checkpoint_before_stays(two_ranks):
    first, left = two_ranks[0]["save_without_room"]
    assert left == ["step-00000000"]
    assert re.search(r"  it takes [\d,]+ bytes; [\d,]+ are free there", first)
    for message, _ in [found["save_without_room"] for found in two_ranks]:
        assert "a checkpoint could not be written; those before it are untouched" in message
        assert "rank 1: [Errno 28] No space left on device" in message
