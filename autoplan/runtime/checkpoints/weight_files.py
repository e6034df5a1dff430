"""Weights alone, whole and under the user's own names: files that other programs read and write.

    --export    ranks --pieces--> FILE.part/ --one process, straight into the file--> FILE.safetensors
    --init-from FILE, mapped into memory --each rank copies its own boxes--> parameters

A file is safetensors: 8 bytes with the length of the header, the header in JSON, the tensors one after the other; or,
for reading, a state_dict that `torch.load(weights_only=True)` accepts. Neither can run code.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..parallel import ParallelModel
from ..process_group import from_first_rank
from ..stages.pieces import pieces_of
from .checkpoint import check_shapes, passing_host_group
from .planner import CheckpointError, IndexReader, read_pieces, write_pieces
from .state import MODEL, buffer_pieces, parameter_pieces

SAFETENSORS = ".safetensors"
MAX_HEADER_BYTES = 100 * 2**20
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def export_model(model: ParallelModel, file: Path) -> None:
    """Write the whole model's weights; every rank must call it, and see the folder of the file.

    They leave it together once the file is there: for that one process writes for long, longer than a step may take.
    """
    check_export_name(file)
    part = file.with_name(file.name + ".part")
    pieces = parameter_pieces(model)
    if model.mesh.dp_rank == model.mesh.tp_rank == 0:
        pieces += buffer_pieces(model)
    with passing_host_group(model.config) as group:
        write_pieces(part, pieces, group=group)
        from_first_rank(lambda: _joined(part, file), group=group, failure=CheckpointError)


def _joined(part: Path, file: Path) -> None:
    try:
        export_checkpoint(part, file)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def check_export_name(file: Path) -> None:
    """Refuse a file that would not be safetensors, before time is spent.

    Raises: CheckpointError.
    """
    if file.suffix != SAFETENSORS:
        raise CheckpointError(f"{file}: found the ending {file.suffix!r}, expected {SAFETENSORS}\n  fix: rename it")


def export_checkpoint(folder: Path, file: Path) -> None:
    """Write the weights of a checkpoint as one file, which appears complete or not at all."""
    check_export_name(file)
    reader = IndexReader(folder)
    saved = {key.removeprefix(MODEL): e for key, e in reader.tensors().items() if key.startswith(MODEL)}
    shapes = {name: (tuple(entry.size), entry.properties.dtype) for name, entry in saved.items()}
    scratch = file.with_name(f".{file.name}.part")
    try:
        tensors = new_safetensors(scratch, shapes)
        pieces = [
            piece
            for name, tensor in tensors.items()
            for piece in pieces_of(MODEL + name, tensor, whole_shape=tuple(tensor.shape))
        ]
        read_pieces(reader, pieces, group=None)
        del tensors, pieces
        with scratch.open("rb") as written:
            os.fsync(written.fileno())
        scratch.replace(file)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be written: {error.strerror or error}") from error
    finally:
        scratch.unlink(missing_ok=True)


def load_initial_weights(model: ParallelModel, file: Path) -> None:
    """Fill the model's parameters and buffers from a file of whole tensors; every rank must call it.

    Raises: CheckpointError when the file is not readable, or is of another model.
    """
    found = read_weights(file)
    first_name = model.whole.first_name
    unknown = [name for name in found if name not in first_name]
    whole = {first_name.get(name, name): tensor for name, tensor in found.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
    check_shapes(model.whole.shapes, {**shapes, **{name: shapes[name] for name in unknown}}, where=str(file))
    with torch.no_grad():
        for piece in parameter_pieces(model) + buffer_pieces(model):
            source = whole[piece.key.removeprefix(MODEL)]
            for dim, (offset, length) in enumerate(zip(piece.offsets, piece.tensor.shape, strict=True)):
                source = source.narrow(dim, offset, length)
            piece.tensor.copy_(source)


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file by name, mapped into memory rather than read.

    Raises: CheckpointError when it is neither safetensors nor a state_dict of tensors.
    """
    try:
        if file.suffix == SAFETENSORS:
            return _read_safetensors(file)
        state: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError) as error:
        raise CheckpointError(f"{file}: found no readable weights: {error}\n  fix: give another file") from error
    except Exception as error:  # UnpicklingError, which is not exported
        raise CheckpointError(
            f"{file}: found more than tensors: {error}\n  fix: save model.state_dict() alone"
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise CheckpointError(f"{file}: found a {type(state).__name__}, expected a dict of tensors by name")
    return dict(state)


def new_safetensors(file: Path, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
    """Make a file of zeros for tensors of given shapes; what is written into the tensors goes into the file.

    Raises: OSError when there is no room for it.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    largest_first = sorted(shapes.items(), key=lambda item: -item[1][1].itemsize)  # so that each is aligned
    for name, (shape, dtype) in largest_first:
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as new:
        new.write(len(text).to_bytes(8, "little") + text)
        new.flush()
        os.posix_fallocate(new.fileno(), 0, 8 + len(text) + end)  # a full disk kills who writes into mapped memory
    return _mapped(file, header, 8 + len(text), is_shared=True)


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    n_bytes = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > min(MAX_HEADER_BYTES, n_bytes - 8):
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(opened.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            n_expected = torch.Size(entry["shape"]).numel() * _DTYPES[entry["dtype"]].itemsize
            if (
                not 0 <= start <= end <= n_bytes - 8 - length
                or end - start != n_expected
                or min(entry["shape"], default=0) < 0
            ):
                raise ValueError(f"{name}: data_offsets {start} to {end}")
    return _mapped(file, header, 8 + length, is_shared=False)


def _mapped(file: Path, header: Mapping[str, Any], first: int, *, is_shared: bool) -> dict[str, torch.Tensor]:
    """The tensors that a header describes, in the memory of the file; `first` is where they begin."""
    n_bytes = file.stat().st_size
    memory = torch.from_file(str(file), shared=is_shared, size=n_bytes, dtype=torch.uint8)
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = (first + offset for offset in entry["data_offsets"])
            part = memory[start:end]
            dtype = _DTYPES[entry["dtype"]]
            aligned = part if start % dtype.itemsize == 0 else part.clone()
            tensors[name] = aligned.view(dtype).view(entry["shape"])
    return tensors
