"""Which parameters a rank trains, under which names, and which of them other stages of the pipeline hold copies of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..config import Config
from ..mesh import RankMesh, group_over_pipeline_ranks
from ..stages.zero import local_part
from .gradients import NamedParameter, TiedWeight


def name_parameters(
    stages: Sequence[nn.Module], parallel_model: Any | None, *, config: Config, mesh: RankMesh
) -> tuple[list[NamedParameter], list[TiedWeight]]:
    """The trainable parameters of this rank, and those that are tied across stages; all ranks must call it."""
    sharded = {} if parallel_model is None else parallel_model.SHARDS
    partial = set() if parallel_model is None else set(parallel_model.PARTIAL_GRADIENTS)
    first_stage_of, tied = _find_ties(stages, parallel_model, config, mesh)
    named = []
    for index, stage in zip(config.stages_of(mesh.pp_rank), stages, strict=True):
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad:
                n_holders = mesh.n_replicas * (1 if name in sharded else config.tp)
                share = 1.0 / n_holders if first_stage_of.get(name, index) == index else 0.0
                is_replicated = config.tp > 1 and name not in sharded and name not in partial
                updated = _plain(parameter) if config.zero_shard_degree == 1 else parameter
                named.append(NamedParameter(name, parameter, updated, share, name in partial, is_replicated))
    return named, tied


def _plain(parameter: nn.Parameter) -> nn.Parameter:
    """The same, or what this rank holds of a distributed one; shares its memory."""
    is_distributed = isinstance(parameter, torch.distributed.tensor.DTensor)
    return nn.Parameter(local_part(parameter.detach())) if is_distributed else parameter


def _find_ties(
    stages: Sequence[nn.Module], parallel_model: Any | None, config: Config, mesh: RankMesh
) -> tuple[dict[str, int], list[TiedWeight]]:
    """For weights tied across stages: the first stage of each of their names, and this rank's copies."""
    groups = parallel_model.TIED if parallel_model is not None and config.n_stages > 1 else ()
    first_stage_of: dict[str, int] = {}
    tied = []
    names = _names_per_stage(parallel_model, mesh) if groups else []
    for group in groups:
        owners = [index for index, stage_names in enumerate(names) if stage_names.intersection(group)]
        if len(owners) < 2:
            continue
        first_stage_of.update(dict.fromkeys(group, owners[0]))
        pp_ranks = {config.rank_of_stage(index) for index in owners}
        process_group = group_over_pipeline_ranks(config, pp_ranks, device=mesh.device) if len(pp_ranks) > 1 else None
        copies = tuple(_copies_of(group, stages))
        if copies and copies[0].requires_grad:
            tied.append(TiedWeight(copies, process_group))
    return first_stage_of, tied


def _copies_of(names: Iterable[str], stages: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    for stage in stages:
        parameters = dict(stage.named_parameters(remove_duplicate=False))
        found = [parameters[name] for name in names if name in parameters]
        yield from found[:1]


def _names_per_stage(parallel_model: Any, mesh: RankMesh) -> list[set[str]]:
    """The parameter names of every stage of the pipeline, read from stages without memory."""
    names = []
    for stage_class in parallel_model.STAGES:
        with torch.device("meta"):
            stage = stage_class(mesh.tp_group)
        names.append({name for name, _ in stage.named_parameters(remove_duplicate=False)})
    return names
