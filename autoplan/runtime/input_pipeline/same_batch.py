"""Ranks that share samples must be given the same: tensor-parallel ranks, and the stages of a pipeline.

A pipeline takes the inputs of its first rank and the targets of its last one, so its ranks are asked for equal targets,
and for equal inputs where there are no targets: augmented inputs may differ.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..config import Config
from ..mesh import RankMesh
from .batches import Batch, flatten_tensors

MOST_ELEMENTS = 4096  # of a tensor that are looked at, about


def check_same_batch(batch: Batch, *, config: Config, mesh: RankMesh) -> None:
    """Compare a batch with that of all ranks that share it; every rank must call it.

    Raises: ValueError, on every rank, that names the first two ranks whose batches differ.
    """
    if config.tp * config.pp == 1:
        return
    own = torch.stack([_digest(part, mesh.device) for part in batch])
    found = [torch.empty_like(own) for _ in range(config.n_ranks)]
    dist.all_gather(found, own)
    digests = torch.stack(found).tolist()
    has_targets = bool(flatten_tensors(batch[1]))
    for rank, (inputs, targets) in enumerate(digests):
        of_column = rank // config.tp % config.dp * config.tp  # the first rank of the first stage
        of_stage = rank - rank % config.tp
        is_same = targets == digests[of_column][1] if has_targets else inputs == digests[of_column][0]
        if not is_same or inputs != digests[of_stage][0]:
            raise ValueError(
                f"ranks {of_stage if is_same else of_column} and {rank} were given different batches, and share their"
                f" samples: the plan has dp {config.dp}, tp {config.tp}, pp {config.pp}, so {config.n_ranks} processes"
                f" take {config.dp} batches a step\n  fix: load by `model.mesh.dp_rank` of `model.config.dp`, not by"
                " process, or take `local_batch(batch, config=..., dp_rank=...)` of the global batch"
            )


def _digest(value: object, device: torch.device) -> torch.Tensor:
    """Two numbers that differ for different tensors, of some of their elements."""
    parts = [tensor.detach().flatten() for tensor in flatten_tensors(value)]
    taken = [part[:: max(1, len(part) // MOST_ELEMENTS)].to(device, torch.float64) for part in parts]
    if not taken:
        return torch.zeros(2, dtype=torch.float64, device=device)
    whole = torch.cat(taken).nan_to_num(nan=1.0, posinf=2.0, neginf=3.0)  # sums of infinities could not be compared
    places = torch.arange(1, len(whole) + 1, dtype=torch.float64, device=device)
    return torch.stack([whole.sum() + sum(map(len, parts)), (whole * places.sqrt()).sum()])
