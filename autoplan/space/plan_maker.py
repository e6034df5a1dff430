"""The way back from numbers: what the search chose, as a Plan of this model on this hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoplan.analysis.chunked_loss import can_chunk
from autoplan.analysis.kept_attention import recomputes_attention
from autoplan.cost.works import Shardings
from autoplan.graph import OpGraph
from autoplan.options import LOSS_AVERAGES, LOSSES, Options
from autoplan.parallel_plan import Mesh, Plan, StagePlan
from autoplan.rules import OpRule
from autoplan.search.meshes import fixed
from autoplan.space.choices import compression_choice, default_batch_norm, loss_choice
from autoplan.space.layouts import of_size


@dataclass(frozen=True, slots=True)
class PlanMaker:
    """All of a plan but its mesh and stages.

    Attributes:
        by_size: tensor-parallel assignments per micro-batch size that they are solved for.
        graph_hash: of `graph`, which takes a while.
        hardware: name of the hardware profile.
        attention: the kinds of segments whose attention recomputation may keep.
    """

    graph: OpGraph
    graph_hash: str
    by_size: Mapping[int, Shardings]
    rules: Mapping[str, OpRule]
    options: Options
    hardware: str
    n_hosts: int
    attention: frozenset[int] = frozenset()

    def plan(self, mesh: Mesh, stages: tuple[StagePlan, ...]) -> Plan:
        """The plan; only blocks are recomputed, and in place of the last segment its loss is chunked.

        One that recomputes no attention does not keep it.
        """
        graph, options = self.graph, self.options
        shardings = of_size(self.by_size, mesh).get((mesh.tp, mesh.sharding), ())
        last = len(graph.segments) - 1
        loss = loss_choice(options) or LOSSES[any(last in stage.recomputed for stage in stages)]
        if loss == "chunked" and not can_chunk(graph, mesh, shardings, rules=self.rules):
            loss = LOSSES[0]
        kept = tuple(
            StagePlan(s.start, s.stop, tuple(i for i in s.recomputed if graph.segments[i].is_block)) for s in stages
        )
        recomputed = [index for stage in kept for index in stage.recomputed]
        if mesh.keeps_attention and not recomputes_attention(graph, self.attention, recomputed):
            mesh = replace(mesh, keeps_attention=False)
        compression = compression_choice(options).under(mesh)
        return Plan(
            mesh=mesh,
            stages=kept,
            precision=options.precision,
            shardings=shardings,
            graph_hash=self.graph_hash,
            hardware=self.hardware,
            n_hosts=self.n_hosts,
            recompute=_recompute_name(graph, kept, n_copies=len(mesh.all_shares)),
            loss=loss,
            batch_norm=fixed(options, "batch_norm") or default_batch_norm(graph),
            loss_average=fixed(options, "loss_average") or LOSS_AVERAGES[0],
            grad_compression=compression.name,
            powersgd_rank=compression.rank,
        )


def _recompute_name(graph: OpGraph, stages: tuple[StagePlan, ...], *, n_copies: int) -> str:
    """Of stages that have every block so many times."""
    n_recomputed = sum(len(stage.recomputed) for stage in stages)
    n_blocks = n_copies * sum(segment.is_block for segment in graph.segments)
    return "none" if n_recomputed == 0 else "full" if n_recomputed == n_blocks else "selective"
