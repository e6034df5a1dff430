"""Which rank does what, and the process groups between ranks.

    rank = (pp_rank * dp + dp_rank) * tp + tp_rank,     dp_rank = replica * zero_shard_degree + shard

Ranks that differ only in `shard` share one sharded state; ranks that differ only in `replica` hold equal shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .alone import is_alone
from .config import Config
from .planned_devices import check_device_memory, check_world_size, free_bytes

# Most thread blocks of a send or receive where a rank receives ahead and computes while it waits. Each occupies a
# multiprocessor until the other rank is there, for half of an interleaved step. On 2 H200 a product beside a waiting
# receive took 17 % longer with NCCL's own 16 and 7 % with 4, which still carry 130 GB/s; an interleaved step of
# Llama-8B went from 3.11 to 2.97 s (2026-11-22). Under 1F1B and GPipe a rank only waits, and the limit took 1 to
# 9 % of a step (4 stages, 4 H100, 2026-11-27; benchmarks/results/predictions_h100_x4_2026-11-27_send_blocks.jsonl).
# The limit is of one group: where several receives wait, they occupy as many times that, which was not tried by itself.
SEND_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class RankMesh:
    """The place of a rank in the mesh.

    Attributes:
        tp_group, pp_group: None when the degree is 1.
        p2p_groups: what this rank sends to another pipeline rank through, or receives from one, by (from, to);
            see `Config.neighbours`. NCCL moves what goes through one group in the order of the calls. So through one
            for all neighbours, a result would wait for those of other ranks that were called before it and are late,
            and less would move at once. Both ways share one where torch's 1F1B sends and receives in one call, that
            is, unless ranks receive ahead.
        zero_mesh: the data-parallel ranks as (shard,) when one copy exists, otherwise as (replica, shard).
        n_replicas: data-parallel ranks that hold the same shard.
    """

    device: torch.device
    rank: int
    pp_rank: int
    dp_rank: int
    tp_rank: int
    n_replicas: int
    tp_group: ProcessGroup | None
    pp_group: ProcessGroup | None
    p2p_groups: dict[tuple[int, int], ProcessGroup]
    zero_mesh: DeviceMesh

    def axes_of_groups(self) -> dict[str, str]:
        """The axis ("dp", "tp" or "pp") of each process group of the mesh, by the name of the group."""
        data_parallel = (("dp", self.zero_mesh.get_group(axis)) for axis in range(self.zero_mesh.ndim))
        pipeline = (("pp", group) for group in (self.pp_group, *self.p2p_groups.values()))
        groups = (*data_parallel, ("tp", self.tp_group), *pipeline)
        return {group.group_name: axis for axis, group in groups if group is not None and group.size() > 1}


def build_rank_mesh(config: Config, device_type: str) -> RankMesh:
    """Create the process groups of the plan; every rank must call it.

    Raises: WorldSizeError when the number of processes is not the plan's; DeviceMemoryError when a GPU has less free
        memory than the plan needs.
    """
    check_world_size(config)
    replica_degree = config.dp // config.zero_shard_degree
    mesh = init_device_mesh(
        device_type,
        (config.pp, replica_degree, config.zero_shard_degree, config.tp),
        mesh_dim_names=("pp", "replica", "shard", "tp"),
    )
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, torch.cuda.current_device())
    pp_rank, replica, shard, tp_rank = (mesh.get_local_rank(axis) for axis in ("pp", "replica", "shard", "tp"))
    if config.device_bytes and device.type == "cuda":
        place = config.share_of(replica * config.zero_shard_degree + shard) if config.shares else pp_rank
        check_device_memory(config.device_bytes[place], free_bytes=free_bytes(device))
    return RankMesh(
        device=device,
        rank=dist.get_rank(),
        pp_rank=pp_rank,
        dp_rank=replica * config.zero_shard_degree + shard,
        tp_rank=tp_rank,
        n_replicas=replica_degree,
        tp_group=mesh["tp"].get_group() if config.tp > 1 else None,
        pp_group=mesh["pp"].get_group() if config.pp > 1 else None,
        p2p_groups=_p2p_groups(config, device),
        zero_mesh=mesh["shard"] if replica_degree == 1 else mesh["replica", "shard"],
    )


def _p2p_groups(config: Config, device: torch.device) -> dict[tuple[int, int], ProcessGroup]:
    """See `RankMesh`; every rank must call it."""
    found: dict[tuple[int, int], ProcessGroup | None] = {}
    is_few = config.receives_ahead and device.type == "cuda" and not is_alone()
    for source, target in config.neighbours():
        if not config.receives_ahead and (target, source) in found:
            found[source, target] = found[target, source]
            continue
        options = partial(few_send_blocks, device) if is_few else None
        found[source, target] = group_over_pipeline_ranks(config, (source, target), device=device, options=options)
    return {pair: group for pair, group in found.items() if group is not None}


def few_send_blocks(device: torch.device) -> Any:
    """How NCCL is to talk between ranks that receive ahead. torch writes into it: one for each group."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = SEND_BLOCKS
    options._timeout = _timeout(device)
    return options


def _timeout(device: torch.device) -> timedelta | None:
    """That of the group of all ranks; one that is made without any has its backend's default. A rank alone has none."""
    world: Any = dist.group.WORLD
    return None if is_alone() else world._get_backend(device).options._timeout


def group_over_pipeline_ranks(
    config: Config,
    pp_ranks: Iterable[int],
    *,
    device: torch.device,
    options: Callable[[], Any] | None = None,
) -> ProcessGroup | None:
    """The group of this rank and its peers (same dp and tp rank) on some pipeline ranks.

    Every rank must call it, in the same order; None on ranks outside of all such groups. `options` makes those of the
    backend.
    """
    chosen = sorted(pp_ranks)
    n_columns = config.dp * config.tp
    ranks = [[pp_rank * n_columns + column for pp_rank in chosen] for column in range(n_columns)]
    own_group: ProcessGroup | None = None
    own_rank = dist.get_rank()
    for members in ranks:
        group = dist.new_group(members, timeout=_timeout(device), pg_options=None if options is None else options())
        if own_rank in members:
            own_group = group
    return own_group
