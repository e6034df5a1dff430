"""Writing and reading pieces of whole tensors with `torch.distributed.checkpoint`.

It decides which rank writes a box that several hold, and which saved boxes overlap the wanted ones. Nothing that is
read can run code: tensors are read by torch's restricted loader, the index of the checkpoint by the one below, and
everything else is JSON.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from ..refusal import Refusal
from ..stages.pieces import Piece

N_THREADS = 4  # of a rank, that write or read

# What an index consists of, by the module that defines it; element types and sizes of torch are added in `find_class`.
_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}  # fmt: skip


class CheckpointError(Refusal):
    """A checkpoint cannot be written, or is not what this program can load."""


class RankCheckpointError(CheckpointError):
    """What one rank may meet alone: in its own part of the optimizer's state, or at a file."""

    may_be_of_one_rank = True


def write_pieces(folder: Path, pieces: Sequence[Piece], *, group: ProcessGroup | None) -> dict[str, int]:
    """Write all ranks' pieces into `folder`; every rank of `group` must call it, with None one process alone.

    Returns: the CRC-32 of what this rank wrote to each file, by name.

    Raises: CheckpointError on every rank when one fails; once there is a plan, the first one has removed the folder.
    """
    writer, planner = _WholeWriter(folder), _PieceWriter(pieces)
    try:
        with _failing_together(folder, group), _without_checksums():
            save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointError as error:
        if planner.n_bytes is None:
            raise
        shutil.rmtree(folder, ignore_errors=True)
        n_free = shutil.disk_usage(folder.parent).free
        raise CheckpointError(f"{error}\n  it takes {planner.n_bytes:,} bytes; {n_free:,} are free there") from error
    return writer.files.checksums()


def read_pieces(reader: IndexReader, pieces: Sequence[Piece], *, group: ProcessGroup | None) -> None:
    """Fill this rank's pieces from a checkpoint; every rank of `group` must call it, with None one process alone.

    Raises: CheckpointError on every rank when one fails; some pieces may be filled then.
    """
    with _failing_together(reader.folder, group):
        load({}, storage_reader=reader, planner=_PieceReader(pieces), process_group=group, no_dist=group is None)


@contextmanager
def _without_checksums() -> Iterator[None]:
    """Inside, torch writes none of its own: it reads none either, and they took nine tenths of the time."""
    had_checksums = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(had_checksums)


@contextmanager
def _failing_together(folder: Path, group: ProcessGroup | None) -> Iterator[None]:
    """Inside, what fails on one rank is said on all of them."""
    if group is None:
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    try:
        yield
    except CheckpointException as error:
        causes = "\n".join(f"  rank {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items()))
        raise CheckpointError(f"{folder}: failed\n{causes}\n  fix: make room, or use another checkpoint") from error


class IndexReader(FileSystemReader):
    """Reads a checkpoint; its index is read once, and may hold nothing but the index."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self._index: Metadata | None = None

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """The index: every tensor's shape and saved boxes."""
        if self._index is None:
            path = self.folder / ".metadata"
            try:
                with path.open("rb") as file:
                    index = _IndexUnpickler(file).load()
                if isinstance(index, Metadata):
                    _check_index(index)
            except Exception as error:  # a damaged pickle raises whatever it happens to come to
                raise CheckpointError(
                    f"{path}: not a readable index: {error!r}\n  fix: use another checkpoint"
                ) from error
            if not isinstance(index, Metadata):
                raise CheckpointError(f"{path}: found {type(index).__name__}, expected the index of a checkpoint")
            self._index = index
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan wants, on several threads."""
        parts = [LoadPlan(plan.items[first::N_THREADS]) for first in range(N_THREADS)]
        with ThreadPoolExecutor(N_THREADS) as threads:
            list(threads.map(super().read_data, parts, [planner] * N_THREADS))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """The saved tensors by key."""
        found = self.read_metadata().state_dict_metadata
        return {key: entry for key, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


def _check_index(index: Metadata) -> None:
    """Raises: AttributeError or TypeError where a field that is read is missing or of another kind."""
    for entry in index.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            _ = math.prod(entry.size), entry.properties.dtype.itemsize, len(entry.chunks)


def _member(kind: Any, name: str) -> Any:
    """A member of an enum, which Python 3.11.0 to 3.11.3 writes as an attribute of it."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"it names {name} of {kind}, which no index holds")
    return kind[name]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":
            value = getattr(torch, name, None)
            if value is torch.Size or isinstance(value, torch.dtype | torch.layout):
                return value
        if name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index holds")


class _SummedFile(io.BufferedWriter):
    """A new file, and the CRC-32 of what is written to it from its beginning to its end.

    Once the disk is full it takes the rest without writing it, and keeps the error: torch's threads would print what
    follows from it, and go on.
    """

    def __init__(self, path: Path) -> None:
        self.checksum = 0
        self.error: OSError | None = None
        super().__init__(io.FileIO(path, "wb"))

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        self._keep_error(lambda: super(_SummedFile, self).write(data))
        return memoryview(data).nbytes

    def flush(self) -> None:
        self._keep_error(super().flush)

    def _keep_error(self, write: Callable[[], Any]) -> None:
        if self.error is None:
            try:
                write()
            except OSError as error:
                self.error = error


class _SummedFiles(FileSystem):
    """Files as torch writes them, with checksums of those that were written."""

    def __init__(self) -> None:
        self._written: dict[str, _SummedFile] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        with _SummedFile(Path(path)) as file:
            self._written[Path(path).name] = file
            yield file

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self._written[Path(new_path).name] = self._written.pop(Path(path).name)

    def check_written(self) -> None:
        """Raises: OSError when a file could not be written to its end."""
        for file in self._written.values():
            if file.error is not None:
                raise file.error

    def checksums(self) -> dict[str, int]:
        """CRC-32 by the name of the file."""
        return {name: file.checksum for name, file in self._written.items()}


class _WholeWriter(FileSystemWriter):
    """Fails where one of its threads does: torch goes on then, without the tensors of that thread."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, thread_count=N_THREADS)
        self.fs = self.files = _SummedFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        self.files.check_written()
        n_missing = len(plan.items) - len(written.wait())
        if n_missing:
            raise OSError(
                f"{n_missing} of {len(plan.items)} tensors were not written: a thread failed, as printed above"
            )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata=metadata, results=results)
        self.files.check_written()


class _PieceWriter(DefaultSavePlanner):
    """Offers every piece; `DefaultSavePlanner` lets one rank write what several offer, and misses none.

    Attributes:
        n_bytes: of what all ranks write; known to the rank that plans for all, None on others.
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {MetadataIndex(piece.key, piece.offsets): piece for piece in pieces}
        self.n_bytes: int | None = None

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, index = super().create_global_plan(all_plans)
        self.n_bytes = sum(_n_bytes(item) for plan in plans for item in plan.items)
        return plans, index

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(index, piece) for index, piece in self._pieces.items()])

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._pieces[write_item.index].tensor


def _n_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _write_item(index: MetadataIndex, piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape)
    properties = TensorProperties(dtype=piece.tensor.dtype)
    return WriteItem(
        index=index,
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(piece.whole_shape)),
    )


class _PieceReader(LoadPlanner):
    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = {MetadataIndex(piece.key, piece.offsets): piece for piece in pieces}
        self._saved: dict[str, Any] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._saved = dict(metadata.state_dict_metadata)

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for piece in self._pieces.values() for item in self._read_items(piece)])

    def _read_items(self, piece: Piece) -> list[ReadItem]:
        chunk = ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape)
        items = create_read_items_for_chunk_list(piece.key, self._saved[piece.key], [chunk])
        if sum(math.prod(item.lengths) for item in items) != piece.tensor.numel():
            raise CheckpointError(f"{piece.key}: the checkpoint does not hold all of it")
        return items

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("pieces are tensors")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        view = self._pieces[read_item.dest_index].tensor
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        return
