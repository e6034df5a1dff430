"""Copies for a checkpoint: whole, in memory that is kept, and taken before the next update."""

import time
from types import SimpleNamespace

import pytest
import torch
from distributed import tiny_gpt
from distributed.launch import run_ranks

from autoplan.runtime import Checkpoints, Config, ParallelModel, build_rank_mesh, load_checkpoint
from autoplan.runtime.checkpoints import host_copies
from autoplan.runtime.checkpoints.host_copies import HostCopies
from autoplan.runtime.stages.pieces import pieces_of

DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8)


def some_pieces(shift):
    """Of several dtypes, one a single number, one a view that is not contiguous."""
    whole = {str(dtype): (torch.arange(15).view(5, 3) + shift).to(dtype) for dtype in DTYPES}
    whole |= {"number": torch.tensor(3.0 + shift), "columns": torch.arange(40.0).view(4, 10)[:, 2:7] + shift}
    return [piece for key, tensor in whole.items() for piece in pieces_of(key, tensor, whole_shape=tuple(tensor.shape))]


def test_copies_equal_the_pieces_and_memory_is_kept_for_the_next_time(monkeypatch):
    monkeypatch.setattr(host_copies, "BLOCK_BYTES", 128)  # so that there are several blocks
    copies = HostCopies(torch.device("cpu"))
    places = []
    for shift in (0, 7):
        pieces = some_pieces(shift)
        found, event = copies.start(pieces[:4], pieces[4:])
        assert event is None
        by_key = {piece.key: piece for piece in found}
        assert by_key.keys() == {piece.key for piece in pieces}
        for piece in pieces:
            copy = by_key[piece.key]
            assert (copy.whole_shape, copy.offsets) == (piece.whole_shape, piece.offsets)
            assert torch.equal(copy.tensor, piece.tensor)
            assert copy.tensor.untyped_storage().nbytes() == copy.tensor.nbytes  # else all of it would be written
        places.append({key: piece.tensor.data_ptr() for key, piece in by_key.items()})
    assert places[0] == places[1]
    assert len(set(places[0].values())) == len(places[0])


def test_a_tensor_of_another_shape_gets_memory_of_its_own():
    copies = HostCopies(torch.device("cpu"))
    for size in (3, 1000):
        (copy,), _ = copies.start(pieces_of("state", torch.arange(size), whole_shape=(size,)), [])
        assert torch.equal(copy.tensor, torch.arange(size))


class Cuda:
    """What stands in for `torch.cuda` where there is none: it writes down what it is told."""

    def __init__(self, error):
        self.error, self.told = error, []

    def __getattr__(self, name):
        return lambda *arguments: self.told.append(name) or self

    def __enter__(self):
        self.told.append("enter")

    def __exit__(self, *_):
        self.told.append("exit")

    def cudaHostRegister(self, place, n_bytes, flags):
        self.told.append(f"lock {n_bytes}")
        return self.error

    def cudaHostUnregister(self, place):
        self.told.append("unlock")


@pytest.mark.parametrize("error", [0, 801])
def test_on_a_gpu_memory_is_locked_before_it_is_copied_to_beside_the_training(monkeypatch, capsys, error):
    cuda = Cuda(error)
    monkeypatch.setattr(host_copies.torch, "cuda", cuda)
    monkeypatch.setattr(host_copies, "BLOCK_BYTES", 128)
    copies = HostCopies(torch.device("cuda", 1))
    lasting = [piece for key in "ab" for piece in pieces_of(key, torch.ones(32), whole_shape=(32,))]  # 128 bytes each
    buffer = pieces_of("buffer", torch.ones(3), whole_shape=(3,))
    copies.reserve(lasting)
    n_locks = 1 if error else 2  # after a failure it is not tried again
    assert [what for what in cuda.told if "lock" in what] == ["lock 128"] * n_locks
    assert capsys.readouterr().err.count("CUDA error 801") == (error != 0)
    cuda.told.clear()
    found, event = copies.start(lasting, buffer)
    assert all(torch.equal(copy.tensor, piece.tensor) for copy, piece in zip(found, buffer + lasting, strict=True))
    assert event is cuda
    told = [what for what in cuda.told if what not in ("device", "enter", "exit", "cudart", "lock 64")]
    assert told == ["current_stream", "wait_stream", "stream", "record_event"]
    cuda.told.clear()
    copies.close()
    assert "synchronize" in cuda.told and "unlock" not in cuda.told[: cuda.told.index("synchronize")]
    assert cuda.told.count("unlock") == (0 if error else 3)


def saved_beside_a_step(folder):
    """On a GPU: seconds that `save` takes while copies wait; parameters before the next step, after it, and saved."""
    config = Config(micro_batch_size=2)
    model = ParallelModel(config, tiny_gpt, mesh=build_rank_mesh(config, "cuda"), learning_rate=1.0)
    batch = tiny_gpt.make_batch(2)
    model.step(batch)
    checkpoints = Checkpoints(model, folder)
    checkpoints.prepare()
    checkpoints.save()  # the first finds its memory
    checkpoints.wait()

    def parameters():
        return [tensor.cpu() for _, tensor in model.full_parameters()]

    before = parameters()
    with torch.cuda.stream(checkpoints._copies._stream):
        torch.cuda._sleep(2_000_000_000)  # about a second
    start_s = time.perf_counter()
    checkpoints.save()
    save_s = time.perf_counter() - start_s
    model.step(batch)
    after = parameters()
    load_checkpoint(model, checkpoints.wait())
    checkpoints.close()
    return save_s, before, after, parameters()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_next_step_begins_while_copies_are_made_and_updates_after_them(tmp_path):
    ((save_s, before, after, saved),) = run_ranks(saved_beside_a_step, 1, str(tmp_path), backend="nccl")
    assert save_s < 0.3
    assert not all(map(torch.equal, before, after))
    assert all(map(torch.equal, before, saved))


def test_the_next_update_waits_for_the_copies_of_all_saves_before_it(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_event=waited.append))
    model = SimpleNamespace(_copied=[], mesh=SimpleNamespace(device=None))
    for copied in ("of one folder", "of another", None):
        ParallelModel.hold_update(model, copied)
    for _ in range(2):
        ParallelModel.wait_for_copies(model)
    assert waited == ["of one folder", "of another"]
