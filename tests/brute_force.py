"""An oracle for the search: random toy models, and the best plan of a space by trying every plan.

It shares nothing with the search but the simulator, which judges both.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby, product

from autoplan.cost.table import CostTable, SegmentCost
from autoplan.options import Options
from autoplan.overlap import Overlap
from autoplan.parallel_plan import Estimate, Mesh, Plan, StagePlan
from autoplan.schedules import splits_backward
from autoplan.search import SearchSpace
from autoplan.search.meshes import list_meshes
from autoplan.search.twins import has_twin, spares_cheaply, twin_of
from autoplan.simulator.simulate import simulate

MIB = 2**20
# nothing; compute slowed more than communication, and less; both alike
OVERLAPS = (Overlap(0.0, 0.0), Overlap(0.7, 0.1), Overlap(0.2, 0.6), Overlap(0.4, 0.4))


@dataclass(frozen=True, slots=True)
class Toy:
    """A toy model on a toy cluster: a SearchSpace and what `price` needs.

    `kind_costs` are for one sample, without sharding. `comm_factor` scales everything that is communicated.
    `attention_share`: of the forward pass that recomputation spares where it keeps attention. `chunks_loss`: where the
    backward pass is split, the last kind has its second choice.
    """

    space: SearchSpace
    kind_costs: tuple[SegmentCost, ...]
    cut_s: float
    message_bytes: int
    overlap: Overlap
    memory_limit_bytes: int
    comm_factor: float = 1.0
    reserved_ratio: float = 1.0
    reduces_late: bool = False
    action_s: float = 0.0
    batch_copy_s: float = 0.0
    batch_bytes: int = 0
    memory_margin: float = 0.0
    attention_share: float = 0.0
    chunks_loss: bool = False
    overlap_of_shards: Overlap | None = None

    def price(self, mesh: Mesh) -> CostTable:
        """The cost table of a mesh: compute scales with the micro-batch and 1 / tp, state with 1 / shard degree."""
        pairs = tuple(
            tuple(self._cost(cost, mesh, again) for again in (False, True)[: 1 + self.has_choice(kind, mesh)])
            for kind, cost in enumerate(self.kind_costs)
        )
        is_zero3 = mesh.zero_stage == 3
        return CostTable(
            mesh=mesh,
            kinds=self.space.kinds,
            costs=pairs,
            cut_s=tuple(
                self.cut_s * self.comm_factor * mesh.micro_batch_size if ok else None for ok in self.space.cuts
            ),
            gathers_per_micro_batch=is_zero3,
            reduces_per_micro_batch=self._reduces_often(mesh),
            overlap=self.overlap if mesh.zero_shard_degree == 1 else self.overlap_of_shards or self.overlap,
            per_step_s=0.01,
            reserved_fixed_bytes=MIB,
            reserved_ratio=self.reserved_ratio,
            memory_limit_bytes=self.memory_limit_bytes,
            workspace_bytes=MIB // 2,
            message_bytes=tuple(self.message_bytes * mesh.micro_batch_size for _ in self.space.cuts)
            if mesh.pp > 1
            else (),
            action_s=self.action_s if mesh.pp > 1 else 0.0,
            batch_copy_s=self.batch_copy_s / mesh.dp,
            batch_bytes=self.batch_bytes // mesh.dp,
            memory_margin=self.memory_margin,
        )

    def has_choice(self, kind: int, mesh: Mesh) -> bool:
        """Whether segments of a kind may be recomputed, or what stands for that."""
        return not splits_backward(mesh.schedule) or (self.chunks_loss and kind == self.space.kinds[-1])

    def _reduces_often(self, mesh: Mesh) -> bool:
        return mesh.zero_stage >= 2 and not self.reduces_late

    def _cost(self, cost: SegmentCost, mesh: Mesh, again: bool) -> SegmentCost:
        size, tp, shard = mesh.micro_batch_size, mesh.tp, mesh.zero_shard_degree
        comm = self.comm_factor
        is_sharded = mesh.zero_stage > 0
        accumulates = mesh.n_micro_batches > 1 and not self._reduces_often(mesh)
        forward_s, backward_s = cost.forward_s * (0.3 + size) / tp, cost.backward_s * (0.3 + size) / tp
        tp_s = comm * cost.tp_forward_s * size * (tp > 1)
        keeps = again and mesh.keeps_attention and cost is not self.kind_costs[0]  # the first kind has no attention
        kept_bytes = cost.saved_bytes * size // tp // 4 * keeps
        return SegmentCost(
            forward_s=forward_s,
            backward_s=backward_s,
            recompute_s=(forward_s + tp_s) * (1.0 - self.attention_share * bool(kept_bytes)) if again else 0.0,
            launch_forward_s=cost.launch_forward_s,
            launch_backward_s=cost.launch_backward_s,
            tp_forward_s=tp_s,
            tp_backward_s=tp_s,
            gather_s=comm * cost.gather_s * is_sharded / tp,
            reduce_s=comm * cost.reduce_s * (mesh.dp > 1) / tp,
            optimizer_s=cost.optimizer_s / tp / shard,
            state_bytes=cost.state_bytes // tp // shard,
            gathered_bytes=cost.gathered_bytes // tp if is_sharded else 0,
            gradient_bytes=cost.gradient_bytes // tp // (1 if accumulates else shard),
            saved_bytes=cost.saved_bytes * size // tp // (8 if again else 1) + kept_bytes,
            working_bytes=cost.working_bytes * size // tp + (cost.saved_bytes * size // tp if again else 0),
            kept_bytes=kept_bytes,
            weight_backward_s=cost.weight_backward_s * (0.3 + size) / tp,
            pending_bytes=cost.pending_bytes * size // tp,
            reduced_bytes=cost.gradient_bytes // tp // shard,
            reducing_bytes=cost.reducing_bytes // tp,
            late_gradient_bytes=cost.late_gradient_bytes // tp,
            is_kept=cost.late_gradient_bytes > 0,
            replicas_s=0.6 * comm * cost.reduce_s * (shard < mesh.dp and self._reduces_often(mesh)) / tp,
        )


def random_toy(
    seed: int, *, n_segments: int = 5, n_devices: int = 4, global_batch: int = 4, tight: bool | None = None
) -> Toy:
    """A toy with random runs of kinds, random costs and a memory limit that is often short."""
    rng = random.Random(seed)
    n_kinds = rng.randint(1, 3)
    kinds: list[int] = []
    while len(kinds) < n_segments:
        kinds += [rng.randrange(n_kinds)] * rng.randint(1, 3)
    kind_costs = tuple(_random_cost(rng) for _ in range(n_kinds))
    state = sum(kind_costs[kind].state_bytes for kind in kinds[:n_segments])
    is_tight = rng.random() < 0.7 if tight is None else tight
    return Toy(
        space=SearchSpace(
            n_devices=n_devices,
            n_devices_per_host=2,
            global_batch=global_batch,
            kinds=tuple(kinds[:n_segments]),
            cuts=tuple(rng.random() < 0.8 for _ in range(n_segments - 1)),
            shardings=((1, ("",)), (2, ("a",))),
            max_chunks=2,
        ),
        kind_costs=kind_costs,
        cut_s=rng.choice([0.0, 0.02, 0.3]),
        message_bytes=rng.choice([0, 5 * MIB]),
        overlap=rng.choice(OVERLAPS[:3]),
        memory_limit_bytes=int(state * rng.uniform(0.3, 1.5)) if is_tight else state * 20,
        reserved_ratio=rng.choice([1.0, 1.07]),
        reduces_late=rng.random() < 0.5,
        action_s=rng.choice([0.0, 0.04, 0.5]),
        batch_copy_s=rng.choice([0.0, 5.0, 20.0]),
        batch_bytes=rng.choice([0, 5 * MIB]),
        overlap_of_shards=random.Random(seed).choice(OVERLAPS[:3]),
    )


def _random_cost(rng: random.Random) -> SegmentCost:
    forward_s, backward_s = rng.uniform(0.05, 1.0), rng.uniform(0.1, 2.0)
    return SegmentCost(
        forward_s=forward_s,
        backward_s=backward_s,
        recompute_s=0.0,
        launch_forward_s=rng.choice([0.0, 0.05]),
        launch_backward_s=rng.choice([0.0, 0.05]),
        tp_forward_s=rng.uniform(0.0, 0.2),
        tp_backward_s=0.0,
        gather_s=rng.choice([0.0, rng.uniform(0.05, 2.0)]),
        reduce_s=rng.choice([0.0, rng.uniform(0.05, 2.0)]),
        optimizer_s=rng.uniform(0.0, 0.2),
        state_bytes=rng.randint(20, 100) * MIB,
        gathered_bytes=rng.randint(5, 40) * MIB,
        gradient_bytes=rng.randint(5, 40) * MIB,
        saved_bytes=rng.randint(1, 60) * MIB,
        working_bytes=rng.randint(0, 40) * MIB,
        reducing_bytes=rng.choice([0, 5, 40]) * MIB,
        late_gradient_bytes=rng.choice([0, 0, 20]) * MIB,
        weight_backward_s=rng.uniform(0.0, 0.9) * backward_s,
        pending_bytes=rng.randint(0, 30) * MIB,
    )


def all_stages(toy: Toy, mesh: Mesh) -> Iterator[tuple[StagePlan, ...]]:
    """Every way to cut the model into the stages of a mesh, and in each to recompute the first segments of each group.

    With several stages per rank, and more than four in all, all stages have as many pieces as there are per stage, or
    one more; the first and the last may have fewer. Only what has the choice is recomputed.
    A group is what can be exchanged without any effect: the same place in equal neighbouring pieces.
    """
    space = toy.space
    legal = [index + 1 for index, ok in enumerate(space.cuts) if ok]
    groups = _groups(space)
    has_choice = [toy.has_choice(kind, mesh) for kind in space.kinds]
    n_before = [sum(space.cuts[:segment]) for segment in range(space.n_segments)]  # cuts before each segment
    for cuts in combinations(legal, mesh.n_stages - 1):
        edges = (0, *cuts, space.n_segments)
        sizes = [n_before[b - 1] - n_before[a] + 1 for a, b in zip(edges, edges[1:], strict=False)]
        few = sum(sizes) // mesh.n_stages
        if mesh.n_chunks > 1 and mesh.n_stages > 4 and not (max(sizes) <= few + 1 and min(sizes[1:-1]) >= few):
            continue
        pairs = list(zip(edges, edges[1:], strict=False))
        per_stage = [list(_choices([i for i in range(a, b) if has_choice[i]], groups)) for a, b in pairs]
        for chosen in product(*per_stage):
            yield tuple(StagePlan(a, b, recomputed) for (a, b), recomputed in zip(pairs, chosen, strict=True))


def _groups(space: SearchSpace) -> tuple[int, ...]:
    """The group of each segment."""
    edges = [0, *(index + 1 for index, ok in enumerate(space.cuts) if ok), space.n_segments]
    pieces = [tuple(range(a, b)) for a, b in zip(edges, edges[1:], strict=False)]
    group = [0] * space.n_segments
    n_groups = 0
    for _, run in groupby(pieces, key=lambda piece: tuple(space.kinds[segment] for segment in piece)):
        for piece in run:
            for place, segment in enumerate(piece):
                group[segment] = n_groups + place
        n_groups += space.n_segments
    return tuple(group)


def _choices(segments: Sequence[int], groups: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    members = [[s for s in segments if groups[s] == g] for g in sorted({groups[s] for s in segments})]
    for counts in product(*(range(len(member) + 1) for member in members)):
        yield tuple(sorted(s for member, count in zip(members, counts, strict=True) for s in member[:count]))


def best_by_trying(
    toy: Toy,
    options: Options,
    *,
    keep: Callable[[tuple[StagePlan, ...]], bool] = lambda stages: True,
    weight: Callable[[Mesh], float] = lambda mesh: 1.0,
) -> float | None:
    """The least weighted step time over all plans that fit; None when none does."""
    best: float | None = None
    for mesh in [mesh for own in list_meshes(toy.space, options)[0] for mesh in with_twin(toy, own)]:
        table = toy.price(mesh)
        for stages in all_stages(toy, mesh):
            estimate: Estimate = simulate(table, stages)
            if estimate.fits and keep(stages):
                score = estimate.step_s * weight(mesh)
                best = score if best is None else min(best, score)
    return best


def with_twin(toy: Toy, mesh: Mesh) -> Iterator[Mesh]:
    """The mesh, and the one of the space that keeps attention."""
    yield mesh
    may_keep = toy.space.may_keep_attention and has_twin(mesh)
    if may_keep and spares_cheaply(toy.price(mesh), toy.price(twin_of(mesh))):
        yield twin_of(mesh)


def make_plan(mesh: Mesh, stages: tuple[StagePlan, ...]) -> Plan:
    """A plan with nothing but mesh and stages."""
    return Plan(mesh=mesh, stages=stages)


def with_space(toy: Toy, **changes: object) -> Toy:
    """The toy with some fields of its space replaced."""
    return replace(toy, space=replace(toy.space, **changes))  # type: ignore[arg-type]


def random_plans(seed: int, *, count: int, **toy_options: object) -> Iterator[tuple[CostTable, tuple[StagePlan, ...]]]:
    """Random plans of random meshes of a random toy."""
    rng = random.Random(seed)
    toy: Toy = random_toy(seed, **toy_options)  # type: ignore[arg-type]
    toy = replace(toy, overlap=rng.choice(OVERLAPS))
    meshes = list_meshes(toy.space, Options(max_micro_batch_size=4))[0]
    for mesh in rng.sample(meshes, min(count, len(meshes))):
        table = toy.price(mesh)
        yield table, rng.choice(list(all_stages(toy, mesh)))


def plain_table(mesh: Mesh, *, cut_s: float = 0.25) -> CostTable:
    """Eight equal segments of 1 s forward and 2 s backward, 0.5 s of it for weights, and transfers; no more."""
    toy = random_toy(0)
    cost = replace(
        toy.kind_costs[0], forward_s=1.0, backward_s=2.0, launch_forward_s=0.0, launch_backward_s=0.0,
        tp_forward_s=0.0, gather_s=0.0, reduce_s=0.0, optimizer_s=0.0, weight_backward_s=0.5,
        reduced_bytes=0, reducing_bytes=0, late_gradient_bytes=0,
    )  # fmt: skip
    return replace(
        toy.price(mesh),
        kinds=(0,) * 8,
        costs=((cost, cost),),
        cut_s=(cut_s,) * 7,
        per_step_s=0.0,
        message_bytes=(),
        workspace_bytes=0,
    )
