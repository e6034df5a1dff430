"""A plan in words, for tables and lines: all of it (`plan_rows`), its mesh, and its choices that are not plain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoplan.parallel_plan import Execution, Mesh, Plan
from autoplan.plain_text import count
from autoplan.schedules import receives_ahead

BREAKDOWN_LABELS = (
    ("compute_s", "compute"),
    ("recompute_s", "recompute"),
    ("exposed_tp_s", "exposed tp comm"),
    ("exposed_dp_s", "exposed dp comm"),
    ("exposed_pp_s", "exposed pp comm"),
    ("bubble_s", "bubble"),
    ("optimizer_s", "optimizer"),
    ("launch_s", "launch"),
    ("exposed_batch_copy_s", "exposed batch copy"),
)


@dataclass(frozen=True, slots=True)
class Lanes:
    """What the parts of an estimate are of: pipeline ranks, or groups of hosts that share a batch unequally.

    Attributes:
        word: of one, where there is little room; `name` of one otherwise, before its number; `plural` of several.
        places: where each is, in words; empty where that goes without saying.
    """

    word: str = "rank"
    name: str = "pipeline rank"
    plural: str = "pipeline ranks"
    places: Sequence[str] = ()

    def of(self, index: int) -> str:
        """`pipeline rank 3`; `group 1 (32 data-parallel ranks on v100_x8)`."""
        return f"{self.name} {index}" + (f" ({self.places[index]})" if self.places else "")


PIPELINE = Lanes()
COMPILED, EAGER, KEPT, CAPTURED, UNCAPTURED = "compiled", "eager", "attention kept", "CUDA graph", "no graph"


def lanes_of(plan: Plan) -> Lanes:
    """What the parts of the plan's estimate are of."""
    shares = plan.mesh.shares
    if not shares:
        return PIPELINE
    places = (f"{own.dp} data-parallel ranks on {at.hardware}" for own, at in zip(shares, plan.groups, strict=True))
    return Lanes("group", "group", "groups of hosts", tuple(places))


def choice_words(plan: Plan) -> tuple[str, ...]:
    """All of them, in a word or two each."""
    loss = ["chunked"] * (plan.loss == "chunked")
    gradients = [f"grads {_how(plan)}"] * (plan.grad_compression != "none")
    attention = [KEPT] * plan.mesh.keeps_attention
    return (*execution_words(plan.mesh), *attention, *loss, *gradients)


def words_beside(plan: Plan, chosen: Plan) -> tuple[str, ...]:
    """Those of a plan in a list where what is said of the chosen one holds for all others; see `said_of_all`."""
    said, found = said_of_all(chosen.mesh), choice_words(plan)
    lacking = (otherwise for word, otherwise in said.items() if word not in found)
    return (*(word for word in found if word not in said), *lacking)


def said_of_all(chosen: Mesh) -> dict[str, str]:
    """What a list says once of the chosen plan and all others, with the word for those of which it is not true."""
    return ({COMPILED: EAGER} if chosen.compile else {}) | ({CAPTURED: UNCAPTURED} if chosen.cuda_graph else {})


def choice_rows(plan: Plan) -> list[tuple[str, str]]:
    """Those that have a row of their own: (what, how)."""
    modules = [("modules", ", ".join(words))] if (words := execution_words(plan.mesh)) else []
    loss = [("loss", "chunked: in slices of its rows")] * (plan.loss == "chunked")
    gradients = [("gradients", f"reduced {_how(plan)}")] * (plan.grad_compression != "none")
    return [*modules, *loss, *gradients]


def _how(plan: Plan) -> str:
    if plan.grad_compression == "powersgd":
        return f"by PowerSGD of rank {plan.powersgd_rank}"
    return f"in {plan.grad_compression}"


def dp_text(mesh: Mesh) -> str:
    """The data-parallel ranks, of each share of the batch: `64+32`."""
    return "+".join(str(share.dp) for share in mesh.all_shares)


def micro_batches_text(mesh: Mesh, times: str = "x") -> str:
    """Size and number of micro-batches of a rank, in each share of the batch: `1x16+1x5`."""
    texts = [f"{share.micro_batch_size}{times}{share.n_micro_batches}" for share in mesh.all_shares]
    return ("+" if times == "x" else " + ").join(texts)


def mesh_values(mesh: Mesh) -> dict[str, object]:
    """The fields of a mesh as values of a table; shares of the batch as `64+32: 1x7+1x2`, or nothing."""
    values = {name: getattr(mesh, name) for name in Mesh.__dataclass_fields__}
    return {**values, "shares": f"{dp_text(mesh)}: {micro_batches_text(mesh)}" if mesh.shares else ""}


def execution_words(mesh: Mesh) -> tuple[str, ...]:
    """What is not plain about how modules run."""
    is_plain = mesh.memory_format == Execution().memory_format
    formats = [] if is_plain else [mesh.memory_format]
    graphs = [CAPTURED] * mesh.cuda_graph
    return (*([COMPILED] * mesh.compile), *formats, *(["generated"] * mesh.generated), *graphs)


def unlike_words(mesh: Mesh, others: Sequence[Mesh]) -> tuple[str, ...]:
    """What no column says and tells a mesh from others: how many stages a rank has, and the layout between blocks."""
    alike = [
        other for other in others if replace(other, n_chunks=1, sharding="") == replace(mesh, n_chunks=1, sharding="")
    ]
    chunks = [count(mesh.n_chunks, "stage") + " a rank"] * any(other.n_chunks != mesh.n_chunks for other in alike)
    between = _BETWEEN.get(mesh.sharding, mesh.sharding)
    return (*chunks, *([between] * any(other.sharding != mesh.sharding for other in alike)))


_BETWEEN = {"R": "whole sequence", "S(0)": "split batch", "S(1)": "split sequence"}  # what lies between blocks


def zero_text(mesh: Mesh) -> str:
    """`ZeRO 2`, or `ZeRO 2 over 8` where shards are of some of the data-parallel ranks."""
    is_of_all = not mesh.zero_stage or mesh.zero_shard_degree == mesh.dp
    return f"ZeRO {mesh.zero_stage}" + ("" if is_of_all else f" over {mesh.zero_shard_degree}")


def describe_mesh(mesh: Mesh) -> str:
    """A mesh in one line: `dp 4, tp 2, pp 1, ZeRO 1, micro-batch 2 x 8`."""
    text = f"dp {dp_text(mesh)}, tp {mesh.tp}, pp {mesh.pp}, {zero_text(mesh)}"
    text += f", micro-batch {micro_batches_text(mesh, ' x ')}"
    if mesh.pp > 1:
        text += f", {mesh.schedule}"
        text += f", {count(mesh.n_chunks, 'stage')} a rank" if receives_ahead(mesh.schedule) else ""
    return ", ".join((text, *execution_words(mesh)))


def plan_rows(plan: Plan, splits: Sequence[str] = ()) -> list[tuple[str, str]]:
    """The decision as (name, value) pairs; `splits` are what tensor parallelism splits."""
    mesh = plan.mesh
    schedule = mesh.schedule if mesh.pp > 1 else "none (one stage)"
    if mesh.pp > 1 and receives_ahead(mesh.schedule):
        schedule += f", {count(mesh.n_chunks, 'stage')} a rank"
    zero = f"stage {mesh.zero_stage}"
    if mesh.zero_stage:
        zero += f" over {mesh.zero_shard_degree} ranks"
    return [
        ("data parallel", dp_text(mesh)),
        ("tensor parallel", str(mesh.tp)),
        *([("tensor-parallel split", "; ".join(splits))] if splits else []),
        ("pipeline parallel", str(mesh.pp)),
        ("ZeRO", zero),
        ("micro-batch", f"{micro_batches_text(mesh, ' samples x ')} per step"),
        ("global batch", f"{mesh.global_batch_size} samples"),
        ("schedule", schedule),
        ("recompute", _recomputed_segments(plan) or "none"),
        ("precision", plan.precision),
        *choice_rows(plan),
        *([(kind_of_ranks(plan), groups_text(plan))] if plan.groups else []),
    ]


def groups_text(plan: Plan) -> str:
    """Where the pipeline ranks are on a mixed cluster: `8 on dgx_a100_x8 (28 segments), 4 on v100_x8 (6 segments)`.

    Where data parallelism spans groups, the data-parallel ranks: `8 on dgx_a100_x8 (384 samples), ...`.
    """
    if len(plan.groups) == 1:
        return f"all on {plan.groups[0].hardware}"
    if plan.mesh.shares:
        pairs = zip(plan.mesh.shares, plan.groups, strict=True)
        return ", ".join(f"{own.dp} on {at.hardware} ({count(own.n_samples, 'sample')})" for own, at in pairs)
    texts, first = [], 0
    for own in plan.groups:
        stages = plan.stages[first : first + own.n_ranks]
        segments = count(stages[-1].stop - stages[0].start, "segment")
        texts.append(f"{own.n_ranks} on {own.hardware} ({segments})")
        first += own.n_ranks
    return ", ".join(texts)


def kind_of_ranks(plan: Plan) -> str:
    """What `groups_text` places on the groups of a mixed cluster."""
    return "data-parallel ranks" if plan.mesh.shares else "pipeline ranks"


def recompute_text(plan: Plan) -> str:
    """How much is recomputed: `no recompute`, or `selective recompute (12 of 30 segments)`; of each share `0 + 12`."""
    segments = _recomputed_segments(plan)
    return segments.replace(" ", " recompute ", 1) if segments else "no recompute"


def _recomputed_segments(plan: Plan) -> str:
    """`selective (12 of 30 segments, attention kept)`; nothing where nothing is recomputed."""
    counts = [len(stage.recomputed) for stage in plan.stages]
    if not any(counts):
        return ""
    n_recomputed = " + ".join(map(str, counts)) if plan.mesh.shares else str(sum(counts))
    kept = f", {KEPT}" if plan.mesh.keeps_attention else ""
    return f"{plan.recompute} ({n_recomputed} of {plan.stages[-1].stop} segments{kept})"
