"""Price on a mixed cluster: one table per group of hosts, joined into one whose pipeline ranks differ.

    pipeline ranks    0    1    2  |  3    4        rank r of group g: figures of g's devices, links and memory
    group             0    0    0  |  1    1        its cuts: sent over g's network, the last rank's over `between`

In a pipeline a data- or tensor-parallel group never spans groups of hosts, so everything but three things is priced
inside of one group: what the pipeline sends from group to group (`_between_cuts`), the norm of the gradient, and tied
weights, which the first and the last stage sum (`_per_step_s`). At a boundary all dp x tp devices of a rank send at
once and share `between`; the slowest network on the way counts.

Where data parallelism spans groups (`Mesh.shares`), the table of each has its own mesh, with its own micro-batches.
Only the gradients, after they are reduced inside the groups, and their norm pass between them (`cost.between`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from autoplan.cost.between import Exchange, between_s
from autoplan.cost.boundaries import Cuts, make_boundary_sizer, tied_elements, tied_weight_bytes
from autoplan.cost.collective_time import Group, send_s
from autoplan.cost.grad_compression import NO_COMPRESSION, Compression
from autoplan.cost.price import GRADIENT_NORM_BYTES, make_pricer
from autoplan.cost.table import CostTable
from autoplan.cost.works import Shardings
from autoplan.graph import OpGraph
from autoplan.hardware import HardwareProfile
from autoplan.hardware.cluster import Cluster, GroupLink
from autoplan.parallel_plan import GroupRanks, Mesh
from autoplan.rules import OpRule

MixedPricer = Callable[[Mesh, tuple[GroupRanks, ...]], CostTable]
TWO_HOSTS = Group(2, 1)


def make_mixed_pricer(
    graph: OpGraph,
    *,
    cluster: Cluster,
    precision: str,
    shardings: Shardings,
    rules: Mapping[str, OpRule],
    loss: str | None = None,
    compression: Compression = NO_COMPRESSION,
    memory_margin: Callable[[tuple[str, ...]], float] = lambda sources: 0.0,
) -> MixedPricer:
    """A function that prices one mesh whose pipeline ranks, or shares of the batch, are on these groups, in order."""
    parts = [
        make_pricer(
            graph,
            hardware=group,
            precision=precision,
            shardings=shardings,
            rules=rules,
            loss=loss,
            compression=compression,
            memory_margin=memory_margin,
        )
        for group in cluster.groups
    ]
    sizes, tied = make_boundary_sizer(graph, precision), tied_elements(graph)

    @cache
    def between_cuts(tp: int, sharding: str, size: int, dp: int, first: int, second: int) -> Cuts:
        ends = (cluster.groups[first], cluster.groups[second])
        return _between_cuts(sizes(tp, sharding, size), cluster.between, ends, n_devices=dp * tp)

    @cache
    def share(index: int, mesh: Mesh, n_groups: int) -> CostTable:
        exchange = Exchange(cluster.between, n_groups, n_columns=mesh.zero_shard_degree * mesh.tp)
        return parts[index](mesh, exchange=exchange)

    def price(mesh: Mesh, groups: tuple[GroupRanks, ...]) -> CostTable:
        if mesh.shares:
            tables = [share(own.group, mesh.of_share(index), len(groups)) for index, own in enumerate(groups)]
            return shared(mesh, tables, per_step_s=_per_step_s(tables, cluster.between, 0, n_devices=1))
        tables = [parts[own.group](mesh, own.n_ranks) for own in groups]
        if len(groups) == 1:
            return tables[0]
        layout = mesh.tp, mesh.sharding, mesh.micro_batch_size, mesh.dp
        pairs = zip(groups, groups[1:], strict=False)
        cuts = [between_cuts(*layout, one.group, other.group) for one, other in pairs]
        tied_bytes = tied_weight_bytes(tied, mesh, precision)
        per_step_s = _per_step_s(tables, cluster.between, tied_bytes, n_devices=mesh.dp * mesh.tp)
        return joined(tables, [own.n_ranks for own in groups], cuts, per_step_s=per_step_s)

    return price


def joined(
    tables: Sequence[CostTable], n_ranks: Sequence[int], cuts: Sequence[Cuts], *, per_step_s: float
) -> CostTable:
    """One table of a pipeline over several groups; `cuts` are those from each group to the next."""
    tables = [replace(table, per_step_s=per_step_s) for table in tables]
    ranks: list[CostTable] = []
    for table, count, leaving in zip(tables, n_ranks, (*cuts, tables[-1].cut_s), strict=True):
        ranks += [table] * (count - 1) + [replace(table, cut_s=leaving, sendrecv_s=())]
    action_s, drift = min(table.action_s for table in tables), max(table.drift for table in tables)
    return replace(tables[0], rank_tables=tuple(ranks), action_s=action_s, drift=drift)


def shared(mesh: Mesh, tables: Sequence[CostTable], *, per_step_s: float) -> CostTable:
    """One table of a mesh whose shares of the batch have these tables."""
    tables = [replace(table, per_step_s=per_step_s) for table in tables]
    return replace(tables[0], mesh=mesh, rank_tables=tuple(tables))


def _between_cuts(
    sizes: tuple[int | None, ...], between: GroupLink, ends: tuple[HardwareProfile, ...], *, n_devices: int
) -> Cuts:
    """Seconds to send over each boundary from group to group, `n_devices` at once."""
    networks = [group for group in ends if group.n_hosts > 1]

    def seconds(n_bytes: int) -> float:
        own_s = [send_s(n_bytes, pair=TWO_HOSTS, hardware=group) for group in networks]
        return max([between_s(n_bytes, between, n_devices=n_devices), *own_s])

    known = {n_bytes: seconds(n_bytes) for n_bytes in set(sizes) if n_bytes is not None}
    return tuple(None if n_bytes is None else known[n_bytes] for n_bytes in sizes)


def _per_step_s(tables: Sequence[CostTable], between: GroupLink, tied_bytes: int, *, n_devices: int) -> float:
    """The gradient norm, summed inside the groups at once and then from group to group and back; and tied weights.

    Two ends that sum a tensor send it to each other, at once.
    """
    norm_s = 2 * (len(tables) - 1) * between_s(GRADIENT_NORM_BYTES, between, n_devices=1)
    tied_s = between_s(tied_bytes, between, n_devices=n_devices)
    return max(table.per_step_s for table in tables) + norm_s + tied_s
