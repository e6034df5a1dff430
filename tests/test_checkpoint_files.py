"""Checkpoints on disk: complete or passed over, old ones removed, pieces that make up the whole, and no code."""

import errno
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import threading
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from autoplan.runtime import CheckpointError, Shard, take_shard
from autoplan.runtime.checkpoints import state
from autoplan.runtime.checkpoints.folder import (
    MANIFEST,
    SCHEMA_VERSION,
    STATE,
    check_complete,
    check_undamaged,
    damaged_files,
    newest_complete,
    publish,
    read_state,
    remove_old,
    remove_unfinished,
    start_writing,
)
from autoplan.runtime.checkpoints.folder_lock import lock_folder, unlock_folder
from autoplan.runtime.checkpoints.planner import IndexReader, read_pieces, write_pieces
from autoplan.runtime.checkpoints.weight_files import export_checkpoint, new_safetensors, read_weights
from autoplan.runtime.stages.pieces import Piece, pieces_of, whole_tensors


def write(folder, step, **state):
    """A complete checkpoint of one tensor."""
    part = start_writing(folder, step)
    tensor = torch.arange(6.0).view(2, 3) + step
    checksums = write_pieces(part, pieces_of("model.weight", tensor, whole_shape=(2, 3)), group=None)
    sizes = {path.name: path.stat().st_size for path in part.iterdir()}
    return publish(part, state={"schema_version": SCHEMA_VERSION, **state}, sizes=sizes, checksums=checksums)


def steps(folder):
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------ which part of a tensor a rank holds


@given(
    extents=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dim=st.integers(0, 2),
    n_blocks=st.integers(1, 3),
    tp=st.integers(1, 4),
)
def test_pieces_of_all_tensor_parallel_ranks_make_up_the_whole_tensor(extents, dim, n_blocks, tp):
    dim %= len(extents)
    extents[dim] *= n_blocks
    whole = torch.rand(extents) + 1.0
    divides = extents[dim] % (n_blocks * tp) == 0
    if not divides and n_blocks > 1:
        return  # only one block is ever padded
    shard = Shard(dim, n_blocks, None if divides else extents[dim])
    found, n_found = torch.zeros(extents), 0
    for rank in range(tp):
        local = take_shard(whole, shard, rank, tp)
        for piece in pieces_of("w", local, whole_shape=tuple(extents), shard=shard, tp_rank=rank, tp_degree=tp):
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.tensor.shape, strict=True))
            found[box] += piece.tensor
            n_found += piece.tensor.numel()
    assert torch.equal(found, whole)
    assert n_found == whole.numel()  # no element twice


def test_pieces_are_views_so_that_loading_fills_the_parameter():
    parameter = torch.zeros(4, 2)
    shard = Shard(0, blocks=2)
    first, second = pieces_of("w", parameter, whole_shape=(8, 2), shard=shard, tp_rank=1, tp_degree=2)
    assert (first.offsets, second.offsets) == ((2, 0), (6, 0))  # blocks are rows 0-3 and 4-7; rank 1 has their ends
    second.tensor.fill_(1.0)
    assert parameter.sum(dim=1).tolist() == [0, 0, 2, 2]


def test_tied_weights_are_held_once_and_buffers_that_do_not_persist_are_not_held():
    model = torch.nn.Module()
    model.embedding, model.head = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False)
    model.head.weight = model.embedding.weight
    model.register_buffer("kept", torch.zeros(1))
    model.register_buffer("made_again", torch.zeros(1), persistent=False)
    found = whole_tensors(model)
    assert found.first_name == {
        "embedding.weight": "embedding.weight", "head.weight": "embedding.weight", "kept": "kept",
    }  # fmt: skip
    assert found.shapes == {"embedding.weight": (3, 2), "kept": (1,)}


# ------------------------------------------------------------------ complete, newest, removed


def test_newest_complete_checkpoint_is_found_and_damaged_ones_are_passed_over(tmp_path):
    for step in (10, 200, 1000):
        write(tmp_path, step)
    start_writing(tmp_path, 3000)  # never finished
    (tmp_path / "step-00001000" / "__0_0.distcp").write_bytes(b"cut short")
    (tmp_path / "step-00002000").mkdir()  # as if copied without its manifest
    (tmp_path / "notes").mkdir()
    found = newest_complete(tmp_path)
    assert found.path == tmp_path / "step-00000200"
    assert ["step-00002000: found no MANIFEST.json" in found.passed_over[0], len(found.passed_over)] == [True, 2]
    assert "__0_0.distcp: found 9 bytes, expected" in found.passed_over[1]


def test_no_checkpoint_is_found_in_an_empty_or_missing_folder(tmp_path):
    assert newest_complete(tmp_path).path is None
    assert newest_complete(tmp_path / "missing").path is None


def test_only_the_last_checkpoints_are_kept_and_only_checkpoints_are_removed(tmp_path):
    for step in range(5):
        write(tmp_path, step)
    (tmp_path / "step-notes").mkdir()
    remove_old(tmp_path / "step-00000004", keep=2)
    assert steps(tmp_path) == ["step-00000003", "step-00000004", "step-notes"]


def test_what_was_just_saved_is_kept_beside_checkpoints_of_more_steps(tmp_path):
    for step in (1, 2, 800, 900):
        write(tmp_path, step)
    remove_old(tmp_path / "step-00000002", keep=1)
    assert steps(tmp_path) == ["step-00000002", "step-00000800", "step-00000900"]


def test_what_a_killed_run_left_is_removed_and_complete_ones_stay(tmp_path):
    write(tmp_path, 1)
    start_writing(tmp_path, 2)
    (tmp_path / "step-00000000.old.part").mkdir()
    (tmp_path / "mine.part").mkdir()
    remove_unfinished(tmp_path)
    assert steps(tmp_path) == ["mine.part", "step-00000001"]


# Another process that holds the lock until its input ends; then it is killed, as a job may be.
HOLD = """
import fcntl, os, signal, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
file.write("process 7 on host")
file.flush()
print(flush=True)
sys.stdin.read()
os.kill(os.getpid(), signal.SIGKILL)
"""

TAKE = """
import fcntl, sys
try:
    fcntl.lockf(open(sys.argv[1], "r+"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit(1)
"""


def test_a_folder_is_of_one_job_at_a_time_and_free_once_that_is_killed(tmp_path, capsys):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / ".in-use")], **pipes) as other:
        other.stdout.readline()
        with pytest.raises(CheckpointError, match="another job saves there: process 7 on host\n  fix: choose"):
            lock_folder(tmp_path, wait_s=0.0)
        threading.Timer(0.2, other.stdin.close).start()
        lock = lock_folder(tmp_path, wait_s=60.0)
    assert "waits up to 60 s for another job" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="this process saves there already\n  fix: close"):
        lock_folder(tmp_path, wait_s=0.0)
    take = [sys.executable, "-c", TAKE, str(tmp_path / ".in-use")]
    assert subprocess.run(take).returncode == 1  # which that did not end
    unlock_folder(lock)
    assert subprocess.run(take).returncode == 0
    assert (tmp_path / ".in-use").read_text().startswith(f"process {os.getpid()} on ")
    unlock_folder(lock_folder(tmp_path))


def test_a_file_system_without_locks_is_used_nevertheless(tmp_path, monkeypatch, capsys):
    def lockf(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", lockf)
    unlock_folder(lock_folder(tmp_path))
    assert ".in-use: cannot be locked (No locks available): start no second job" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of a thread of torch
def test_what_has_no_room_is_removed_and_told_in_bytes(tmp_path):
    tensor, size = torch.zeros(1000, dtype=torch.float64), resource.getrlimit(resource.RLIMIT_FSIZE)
    piece = pieces_of("model.weight", tensor, whole_shape=(1000,))
    part = start_writing(tmp_path, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, size[1]))  # stands for a full disk
    try:
        with pytest.raises(CheckpointError, match=r"it takes 8,000 bytes; [\d,]+ are free there"):
            write_pieces(part, piece, group=None)
        with pytest.raises(OSError, match="File too large"):
            new_safetensors(tmp_path / "w.safetensors", {"weight": ((1000,), torch.float64)})
        part = start_writing(tmp_path, 2)
        with pytest.raises(OSError, match="File too large"):
            publish(part, state={"long": "x" * 8000}, sizes={}, checksums={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, size)
    assert steps(tmp_path) == ["w.safetensors"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    write(tmp_path, 1, word="old")
    path = write(tmp_path, 1, word="new")
    assert read_state(path)["word"] == "new"
    assert steps(tmp_path) == ["step-00000001"]


def flip_a_bit(file):
    body = bytearray(file.read_bytes())
    body[len(body) // 2] ^= 1
    file.write_bytes(body)


def test_one_changed_bit_in_any_file_is_found_and_an_older_checkpoint_named_not_taken(tmp_path):
    older, path = write(tmp_path, 1), write(tmp_path, 2)
    assert damaged_files(path, rank=0, n_ranks=1) == []
    names = [file.name for file in path.iterdir() if file.name != MANIFEST and file.stat().st_size]
    assert {".metadata", STATE, "__0_0.distcp"} <= set(names)
    for name in names:
        flip_a_bit(path / name)
    assert newest_complete(tmp_path).path == path
    found = [damaged_files(path, rank=rank, n_ranks=2) for rank in range(2)]
    assert (sorted(found[0]), found[1]) == (sorted(names), [])
    with pytest.raises(
        CheckpointError, match=f"damaged: .* in .metadata, .*\n  fix: remove {path}, and go on from {older}"
    ):
        check_undamaged(path, found[0])
    with pytest.raises(CheckpointError, match="fix: use another checkpoint"):
        check_undamaged(older, ["__0_0.distcp"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (STATE, None, "state.json: found no file, expected"),
        (MANIFEST, "[]", "found a list, expected a JSON object"),
        (MANIFEST, "{", "found no readable JSON"),
        (MANIFEST, '{"bytes": {"../../etc/passwd": 1, "state.json": 1}}', "passwd: found no file"),
        (MANIFEST, "[" * 100_000, "found no readable JSON"),
    ],
)
def test_damaged_manifest_or_state_is_refused_by_name(tmp_path, name, text, message):
    path = write(tmp_path, 1)
    (path / name).unlink()
    if text is not None:
        (path / name).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        check_complete(path)


def test_state_of_another_version_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="schema_version: found 7, expected 2"):
        read_state(write(tmp_path, 1, **{"schema_version": 7}))


# ------------------------------------------------------------------ nothing that is read can run


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def test_an_index_that_would_run_code_is_refused_and_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, 1)
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"it names \w+.system, which no index holds"):
        IndexReader(path).tensors()
    (path / ".metadata").write_bytes(pickle.dumps(OrderedDict(a=1)))
    with pytest.raises(CheckpointError, match="OrderedDict, which no index holds"):
        IndexReader(path).tensors()
    assert not (tmp_path / "evil").exists()


class Attribute:
    """Is read as `getattr(kind, name)`."""

    def __init__(self, kind, name):
        self.read = getattr, (kind, name)

    def __reduce__(self):
        return self.read


def test_an_index_of_an_early_python_3_11_is_read_and_attributes_of_other_things_are_not(tmp_path):
    path = write(tmp_path, 1)
    index = pickle.loads((path / ".metadata").read_bytes())
    before = IndexReader(path).tensors()
    for entry in index.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            state = entry.properties.__getstate__()
            formats = [Attribute(type(part), part.name) if isinstance(part, Enum) else part for part in state]
            entry.properties = Early(tuple(formats))
    (path / ".metadata").write_bytes(pickle.dumps(index))
    assert b"getattr" in (path / ".metadata").read_bytes() and IndexReader(path).tensors() == before
    (path / ".metadata").write_bytes(pickle.dumps(Attribute(torch.Size, "numel")))
    with pytest.raises(CheckpointError, match="it names numel of <class 'torch.Size'>, which no index holds"):
        IndexReader(path).tensors()


class Early:
    """Properties of a tensor, with this state."""

    def __init__(self, state):
        self.state = state

    def __reduce__(self):
        return TensorProperties, (), self.state


@pytest.mark.parametrize("body", [b"", b"\x80", b"no pickle at all"])
def test_a_damaged_index_is_refused(tmp_path, body):
    path = write(tmp_path, 1)
    (path / ".metadata").write_bytes(body)
    with pytest.raises(CheckpointError, match="not a readable index"):
        IndexReader(path).tensors()


def test_an_index_with_one_byte_changed_is_refused_in_words_or_read(tmp_path):
    path = write(tmp_path, 1)
    body = (path / ".metadata").read_bytes()
    n_refused = 0
    for place in range(0, len(body), 5):
        (path / ".metadata").write_bytes(body[:place] + b"\xff" + body[place + 1 :])
        try:
            IndexReader(path).tensors()
        except CheckpointError:
            n_refused += 1
    assert n_refused > len(body) // 20


def test_a_tensor_file_that_would_run_code_is_refused_and_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, 1)
    reader = IndexReader(path)
    (entry,) = reader.read_metadata().storage_data.values()
    torch.save(Evil(), path / "evil.pt")
    body = (path / "evil.pt").read_bytes()
    entry.offset, entry.length = 0, len(body)
    (path / entry.relative_path).write_bytes(body)
    with pytest.raises(CheckpointError, match="rank 0: Weights only load failed"):
        read_pieces(reader, pieces_of("model.weight", torch.zeros(2, 3), whole_shape=(2, 3)), group=None)
    assert not (tmp_path / "evil").exists()


def test_a_state_dict_with_more_than_tensors_is_refused_and_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": torch.zeros(1), "evil": Evil()}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="weights.pt: found"):
        read_weights(tmp_path / "weights.pt")
    torch.save({"weight": torch.zeros(1), "step": 3}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="found a dict, expected a dict of tensors by name"):
        read_weights(tmp_path / "weights.pt")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "header",
    [
        {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 800]}},
        {"w": {"dtype": "F32", "shape": [200], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
        {"w": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}},
        {"w": {"shape": [2]}},
        {"w": 3},
    ],
)
def test_hostile_safetensors_are_refused(tmp_path, header):
    text = json.dumps(header).encode()
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 8)
    with pytest.raises(CheckpointError, match="found no readable weights"):
        read_weights(tmp_path / "w.safetensors")


@pytest.mark.parametrize("body", [b"", b"\xff" * 8, b"\xff" * 100, struct.pack("<Q", 4) + b"[[[["])
def test_files_that_are_no_safetensors_are_refused(tmp_path, body):
    (tmp_path / "w.safetensors").write_bytes(body)
    with pytest.raises(CheckpointError, match="found no readable weights"):
        read_weights(tmp_path / "w.safetensors")


# ------------------------------------------------------------------ files of weights


def test_safetensors_are_those_of_the_package_of_that_name(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {
        "a": torch.rand(3, 2), "half": torch.rand(5).bfloat16(), "n": torch.tensor(7), "none": torch.zeros(0, 4),
        "double": torch.rand(2, dtype=torch.float64), "flag": torch.tensor([True]),
    }  # fmt: skip
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    for name, place in new_safetensors(ours, {k: (tuple(t.shape), t.dtype) for k, t in tensors.items()}).items():
        place.copy_(tensors[name])
    safetensors.save_file(tensors, theirs)
    for found in (safetensors.load_file(ours), read_weights(theirs), read_weights(ours)):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_checkpoint_is_exported_whole_or_not_at_all(tmp_path):
    path = write(tmp_path, 5)
    export_checkpoint(path, tmp_path / "w.safetensors")
    found = read_weights(tmp_path / "w.safetensors")
    assert found["weight"].tolist() == [[5, 6, 7], [8, 9, 10]]
    (path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="__0_0.distcp"):
        export_checkpoint(path, tmp_path / "other.safetensors")
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["w.safetensors"]


def test_export_to_another_ending_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"found the ending '.bin', expected .safetensors"):
        export_checkpoint(write(tmp_path, 1), Path("w.bin"))


def test_a_tensor_of_which_a_part_is_missing_is_refused(tmp_path):
    part = start_writing(tmp_path, 1)
    half = [Piece("model.weight", (4, 3), (0, 0), torch.ones(2, 3))]
    write_pieces(part, half, group=None)  # one process alone is not checked while writing
    with pytest.raises(CheckpointError, match="rank 0: model.weight: the checkpoint does not hold all of it"):
        read_pieces(IndexReader(part), pieces_of("model.weight", torch.zeros(4, 3), whole_shape=(4, 3)), group=None)


def test_how_a_step_is_computed_is_left_as_this_machine_has_it(monkeypatch):
    monkeypatch.setattr(state, "optimizer_options", lambda model: [{"parameters": ["w"]}])
    group = {"params": [None], "lr": 1.0, "fused": True, "foreach": None}
    model = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[group]))
    saved = [{"parameters": ["w"], "options": {"lr": 0.5, "fused": None, "foreach": False}}]
    (restored,) = state.restored_groups(model, saved)
    assert restored == {"params": [0], "lr": 0.5, "fused": True, "foreach": None}
