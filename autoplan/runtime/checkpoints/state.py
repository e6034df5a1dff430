"""What of a `ParallelModel` goes into a checkpoint, and back out of it under any plan.

tensors, under the keys that `torch.distributed.checkpoint` gives the user's own model and optimizer:

    model.<name>                     parameters, frozen ones too, and persistent buffers
    optimizer.state.<name>.<entry>   the optimizer's state of one parameter, divided as the parameter is; of one
                                     without dims a vector of one element
    random.<rank>.<generator>        the random numbers of a rank; read again by the same mesh only
    compressed.<rank>.<stage>.<..>   what compressed reductions of a rank remember; read again under the same plan only

and a JSON object: numbers of the run, options of the optimizer by parameter, entries of its state that are not tensors.

Buffers are those of data-parallel rank 0: where BatchNorm is local, its running statistics become those of each rank.
Random numbers are torch's and those of Python's `random`; NumPy's are the user's to keep.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..parallel import ParallelModel
from ..stages.pieces import Piece, pieces_of
from ..stages.zero import local_part
from .planner import CheckpointError, RankCheckpointError

MODEL = "model."
OPTIMIZER = "optimizer.state."
_COMPRESSED = "compressed."
_COMPRESSION_FIELDS = (
    "pp", "dp", "tp", "zero_stage", "zero_shard_degree", "n_chunks", "schedule", "precision", "blocks", "head_group",
    "grad_compression", "powersgd_rank",
)  # fmt: skip
Values = dict[str, dict[str, Any]]  # entries of the optimizer's state that are not tensors, by parameter


# ------------------------------------------------------------------ tensors of the model


def named_parameters(model: ParallelModel) -> Iterator[tuple[str, str, nn.Parameter]]:
    """(first name in the user's model, name in the stage, parameter) of this rank; a tied weight comes per stage."""
    for stage in model.stages:
        for name, parameter in stage.named_parameters():
            yield model.whole.first_name[name], name, parameter


def updated_parameters(model: ParallelModel) -> Iterator[tuple[str, str, nn.Parameter]]:
    """The same of what the optimizer has of them."""
    updated = model.updated()
    for first_name, name, parameter in named_parameters(model):
        yield first_name, name, updated.get(parameter, parameter)


def parameter_pieces(model: ParallelModel) -> list[Piece]:
    """The boxes of all parameters that this rank holds."""
    return [
        piece
        for first_name, name, parameter in named_parameters(model)
        for piece in _divided_like(
            model, MODEL + first_name, name, parameter, whole_shape=model.whole.shapes[first_name]
        )
    ]


def buffer_pieces(model: ParallelModel) -> list[Piece]:
    """The persistent buffers of this rank, which are whole."""
    first_name = model.whole.first_name
    buffers = [pair for stage in model.stages for pair in stage.named_buffers() if pair[0] in first_name]
    return [
        piece
        for name, buffer in buffers
        for piece in pieces_of(MODEL + first_name[name], buffer, whole_shape=tuple(buffer.shape))
    ]


def _divided_like(
    model: ParallelModel, key: str, name: str, tensor: torch.Tensor, *, whole_shape: tuple[int, ...]
) -> list[Piece]:
    return pieces_of(
        key,
        tensor,
        whole_shape=whole_shape,
        shard=model.shards.get(name),
        tp_rank=model.mesh.tp_rank,
        tp_degree=model.config.tp,
    )


# ------------------------------------------------------------------ tensors of the optimizer


def optimizer_pieces(model: ParallelModel) -> tuple[list[Piece], Values]:
    """The boxes of the optimizer's state that this rank holds, and what of that state is not a tensor."""
    pieces: list[Piece] = []
    values: Values = {}
    for first_name, name, parameter in updated_parameters(model):
        for entry, value in model.optimizer.state.get(parameter, {}).items():
            if "." in entry:
                raise RankCheckpointError(
                    f"the optimizer's state of {name}: found entry {entry!r}, expected no dot in it"
                )
            key = f"{OPTIMIZER}{first_name}.{entry}"
            if not isinstance(value, torch.Tensor):
                values.setdefault(first_name, {})[entry] = value
            elif _is_shaped_like(value, parameter):
                pieces += _divided_like(model, key, name, value, whole_shape=_shape_of_state(model, first_name))
            elif value.numel() == 1 or _is_whole(model, name, parameter):
                pieces += pieces_of(key, value, whole_shape=tuple(value.shape))
            else:
                raise RankCheckpointError(_other_shape(first_name, entry, tuple(value.shape), tuple(parameter.shape)))
    return pieces, values


def optimizer_state_to_fill(
    model: ParallelModel, saved: Mapping[str, TensorStorageMetadata], values: Values
) -> tuple[dict[int, dict[str, Any]], list[Piece]]:
    """The optimizer's state of this rank as `load_state_dict` takes it, by number, and the boxes to read into it."""
    entries: dict[str, dict[str, TensorStorageMetadata]] = {}
    for key, tensor in saved.items():
        if key.startswith(OPTIMIZER):
            name, _, entry = key.removeprefix(OPTIMIZER).rpartition(".")
            entries.setdefault(name, {})[entry] = tensor
    numbers = {id(parameter): number for number, parameter in enumerate(_in_groups(model))}
    state: dict[int, dict[str, Any]] = {}
    pieces: list[Piece] = []
    for first_name, name, parameter in updated_parameters(model):
        if id(parameter) not in numbers or not (first_name in entries or first_name in values):
            continue
        own: dict[str, Any] = dict(values.get(first_name, {}))
        for entry, found in entries.get(first_name, {}).items():
            key = f"{OPTIMIZER}{first_name}.{entry}"
            whole_shape = _shape_of_state(model, first_name)
            if tuple(found.size) == whole_shape:
                own[entry] = torch.zeros_like(parameter, dtype=_dtype(found, parameter))
                pieces += _divided_like(model, key, name, own[entry], whole_shape=whole_shape)
            elif found.size.numel() == 1 or _is_whole(model, name, parameter):
                own[entry] = torch.zeros(found.size, dtype=found.properties.dtype)
                pieces += pieces_of(key, own[entry], whole_shape=tuple(found.size))
            else:
                raise RankCheckpointError(_other_shape(first_name, entry, tuple(found.size), tuple(parameter.shape)))
        state[numbers[id(parameter)]] = own
    return state, pieces


def load_optimizer_state(
    model: ParallelModel, state: Mapping[int, Mapping[str, Any]], groups: list[dict[str, Any]]
) -> None:
    """Load what `optimizer_state_to_fill` returned, after it was filled.

    Torch gives all of it but "step" the dtype of the parameter; here numbers keep theirs, such as NAdam's product.
    """
    model.optimizer.load_state_dict({"state": state, "param_groups": groups})
    for number, parameter in enumerate(_in_groups(model)):
        loaded = model.optimizer.state.get(parameter, {})
        for entry, value in state.get(number, {}).items():
            if isinstance(value, torch.Tensor) and entry != "step" and loaded[entry].dtype != value.dtype:
                loaded[entry] = value.to(loaded[entry].device)


def _in_groups(model: ParallelModel) -> Iterator[nn.Parameter]:
    for group in model.optimizer.param_groups:
        yield from group["params"]


def _shape_of_state(model: ParallelModel, first_name: str) -> tuple[int, ...]:
    """The whole shape of what has a number per element; the state of a parameter without dims is a vector."""
    return model.whole.shapes[first_name] or (1,)


def _is_shaped_like(value: torch.Tensor, parameter: nn.Parameter) -> bool:
    return value.shape == parameter.shape and local_part(value).shape == local_part(parameter).shape


def _is_whole(model: ParallelModel, name: str, parameter: nn.Parameter) -> bool:
    """Whether this rank holds all of a parameter."""
    whole_shape = model.whole.shapes[model.whole.first_name[name]]
    return tuple(local_part(parameter).shape) == whole_shape


def _dtype(saved: TensorStorageMetadata, parameter: nn.Parameter) -> torch.dtype:
    return parameter.dtype if saved.properties.dtype.is_floating_point else saved.properties.dtype


def _other_shape(name: str, entry: str, found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    return (
        f"the optimizer's state of {name}: {entry}: found shape {list(found)}, expected that of the parameter "
        f"{list(expected)} or one number\n  fix: use an optimizer whose state can be divided as its parameters are, or "
        "a plan that divides no parameter"
    )


# ------------------------------------------------------------------ options of the optimizer


def optimizer_options(model: ParallelModel) -> list[dict[str, Any]]:
    """Of each group of parameters of this rank: their first names, and the options that they share.

    What stands in for the parameters of a rank that trains none has no name.
    """
    first_names = {id(parameter): first_name for first_name, _, parameter in updated_parameters(model)}
    return [
        {
            "parameters": [first_names[id(parameter)] for parameter in group["params"] if id(parameter) in first_names],
            "options": {key: _as_json(key, value) for key, value in group.items() if key not in ("params", "names")},
        }
        for group in model.optimizer.param_groups
    ]


_OF_THE_MACHINE = ("fused", "foreach")  # options of how a step is computed, not of what


def restored_groups(model: ParallelModel, saved: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups of this rank's optimizer as `load_state_dict` takes them, with the options that were saved."""
    saved = list(saved)
    options_of = {name: group["options"] for group in saved for name in group["parameters"]}
    groups: list[dict[str, Any]] = []
    for number, (group, own) in enumerate(zip(model.optimizer.param_groups, optimizer_options(model), strict=True)):
        found = [options_of[name] for name in own["parameters"] if name in options_of]
        if not own["parameters"] and len(saved) == 1:
            found = [saved[0]["options"]]
        if any(options != found[0] for options in found):
            raise RankCheckpointError(
                f"the optimizer's group {number}: found parameters that were saved with different options, among them "
                f"{own['parameters'][0]}\n  fix: build the optimizer with the same groups as when it was saved"
            )
        kept = {key: value for key, value in group.items() if key != "params"}
        if found:
            saved_options = {key: value for key, value in found[0].items() if key not in _OF_THE_MACHINE}
            kept |= {key: _from_json(key, value, kept.get(key)) for key, value in saved_options.items()}
        start = sum(len(previous["params"]) for previous in groups)
        groups.append({**kept, "params": list(range(start, start + len(group["params"])))})
    return groups


def _as_json(key: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_as_json(key, item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"the optimizer's option {key}: found a {type(value).__name__}, expected a number or text")


def _from_json(key: str, value: Any, current: Any) -> Any:
    """A saved option in the form that the optimizer has it in now."""
    if current is not None and value is not None and isinstance(current, tuple | list) != isinstance(value, list):
        raise RankCheckpointError(
            f"the optimizer's option {key}: found {value}, expected something like {current}\n"
            "  fix: the optimizer that it was saved with, or --init-from for the weights alone"
        )
    if isinstance(current, torch.Tensor):
        return torch.full_like(current, value)
    return tuple(value) if isinstance(current, tuple) else value


# ------------------------------------------------------------------ compressed reductions


def compression_pieces(model: ParallelModel) -> list[Piece]:
    """What the reductions of this rank remember from step to step."""
    return [
        piece
        for index, compressed in enumerate(model.compressed)
        if compressed is not None
        for name, tensor in compressed.tensors().items()
        for piece in pieces_of(_compression_key(model.mesh.rank, index) + name, tensor, whole_shape=tuple(tensor.shape))
    ]


def compression_to_fill(
    model: ParallelModel, saved: Mapping[str, TensorStorageMetadata], plan: Mapping[str, Any]
) -> tuple[list[dict[str, torch.Tensor]], list[Piece]]:
    """What the reductions of each stage of this rank remembered, and the boxes to read into it.

    Nothing, when the checkpoint is of another plan.
    """
    found: list[dict[str, torch.Tensor]] = []
    pieces: list[Piece] = []
    if not all(_as_list(plan.get(field)) == _as_list(getattr(model.config, field)) for field in _COMPRESSION_FIELDS):
        return found, pieces
    if not all(_compression_key(rank, 0) + "steps" in saved for rank in range(model.config.n_ranks)):
        return found, pieces
    for index in range(len(model.compressed)):
        prefix, own = _compression_key(model.mesh.rank, index), dict[str, torch.Tensor]()
        for key, entry in saved.items():
            if key.startswith(prefix):
                name = key.removeprefix(prefix)
                own[name] = torch.zeros(entry.size, dtype=entry.properties.dtype, device=model.mesh.device)
                pieces += pieces_of(key, own[name], whole_shape=tuple(entry.size))
        found.append(own)
    return found, pieces


def has_compression(saved: Iterable[str]) -> bool:
    """Whether a checkpoint, by the keys of its tensors, holds what compressed reductions remember."""
    return any(key.startswith(_COMPRESSED) for key in saved)


def _compression_key(rank: int, stage: int) -> str:
    return f"{_COMPRESSED}{rank}.{stage}."


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# ------------------------------------------------------------------ random numbers


def random_pieces(model: ParallelModel) -> tuple[list[Piece], dict[str, torch.Tensor]]:
    """The state of each generator that this rank draws from, as boxes, and by generator."""
    version, words, gauss = random.getstate()
    assert version == 3 and len(words) == 625
    state = {"cpu": torch.get_rng_state(), "python": torch.tensor(words, dtype=torch.int64)}
    if model.mesh.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(model.mesh.device)
    prefix = f"random.{model.mesh.rank}."
    pieces = [
        piece for key, value in state.items() for piece in pieces_of(prefix + key, value, whole_shape=(value.numel(),))
    ]
    return pieces, state


def restore_random(model: ParallelModel, state: Mapping[str, torch.Tensor]) -> None:
    """Draw on where the saved rank had stopped."""
    torch.set_rng_state(state["cpu"])
    words = tuple(int(word) for word in state["python"].tolist())
    random.setstate((3, words, None))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], model.mesh.device)


def merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The union of what ranks know by name; those that know the same name know the same."""
    return {key: value for part in parts for key, value in part.items()}


def gathered(value: Any, group: ProcessGroup | None) -> list[Any]:
    """`value` of every rank of a group, in order; with None of this process alone."""
    if group is None:
        return [value]
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found
