"""Where a search stands: the queue of meshes, what is known of each, and the time left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autoplan.cost.table import CostTable
from autoplan.options import Options
from autoplan.parallel_plan import Mesh
from autoplan.search.bounds import step_bound_s
from autoplan.search.meshes import Price, fixed
from autoplan.search.one_mesh import Judged, MeshProgram
from autoplan.search.paths.peak_moments import shape_of
from autoplan.search.result import Rejection
from autoplan.search.twins import recomputes_kept, twin_of
from autoplan.solver.linear_model import INFINITY

UNPRICED, PRICED, CUT, RELAXED, SOLVED = range(5)  # how far a mesh in the queue has been examined
MIN_FIRST_S = 0.25  # for what comes before the queue and for a sample of it, however short the time limit is
GOOD_ENOUGH = 1e-3  # share of the step time that is not worth a proof; the cost model is not that exact


@dataclass(slots=True)
class SearchState:
    """A search under way."""

    options: Options
    price: Price
    clock: Callable[[], float]
    started_s: float
    patience_s: float | None = None
    planless_share: float = 1.0  # of the time limit, while no plan is known
    kept_share: float = 0.0  # of the time limit, which what is done now must leave
    ready_s: float = 0.0  # when every mesh was in the queue
    meshes: list[Mesh] = field(default_factory=list)
    lists_all: bool = True  # whether these are all of the space
    answer_s: float = 0.0  # about what the answer takes to write: every mesh is named once more, as when enumerated
    queue: list[tuple[float, int, int]] = field(default_factory=list)  # (score bound, index of the mesh, examined)
    tables: dict[Mesh, CostTable] = field(default_factory=dict)
    programs: dict[int, MeshProgram] = field(default_factory=dict)
    plans: dict[int, Judged] = field(default_factory=dict)  # best plan found, per index
    bounds_s: dict[int, float] = field(default_factory=dict)  # proved bound of the meshes solved, per index
    rejections: dict[int, Rejection] = field(default_factory=dict)
    beyond_s: dict[int, float] = field(default_factory=dict)  # bound by arithmetic of the meshes beyond the space
    may_keep_attention: bool = False  # whether meshes have twins; see `twins`
    plain_enters: bool = False  # whether meshes without a CUDA graph enter where memory may lack; see `without_graph`
    twins: dict[int, int] = field(default_factory=dict)  # index of a mesh -> that of its twin, where it has entered
    mesh_of_twin: dict[int, int] = field(default_factory=dict)  # and the other way
    agreed_s: dict[int, float] = field(default_factory=dict)  # limit of the last `_agree_on_sizes`, per index
    stopped: str = ""
    first_plan_s: float | None = None  # when the first plan that fits was known
    ranked: list[int] | None = None  # `ranking`, while no plan has been added

    def keep(self, index: int, plan: Judged) -> None:
        """Remember the best plan found of a mesh; where it keeps no attention, that of a twin is its mesh's."""
        if index in self.mesh_of_twin and not recomputes_kept(self.table(self.meshes[index]), plan.stages):
            index = self.mesh_of_twin[index]
            known = self.plans.get(index)
            if known is not None and known.estimate.step_s <= plan.estimate.step_s:
                return
        self.plans[index] = plan
        self.ranked = None
        if self.first_plan_s is None:
            self.first_plan_s = self.clock() - self.started_s

    def keep_beyond(self, table: CostTable, plan: Judged) -> None:
        """Add a mesh that is not of the space, after those that are, with a plan of it."""
        index = len(self.meshes)
        self.meshes.append(table.mesh)
        self.beyond_s[index] = step_bound_s(table)
        self.keep(index, plan)

    def add_twin(self, index: int) -> int:
        """Let the twin of a mesh be one of the space."""
        twin = self.twins[index] = len(self.meshes)
        self.mesh_of_twin[twin] = index
        self.meshes.append(twin_of(self.meshes[index]))
        return twin

    def add_plain(self, index: int) -> int:
        """Let a mesh without its CUDA graph be one of the space."""
        self.meshes.append(replace(self.meshes[index], cuda_graph=False))
        return len(self.meshes) - 1

    def index_of(self, mesh: Mesh) -> int | None:
        """Where a mesh stands in the enumeration; most others have another dp, and are not compared any further."""
        return next((i for i, other in enumerate(self.meshes) if other.dp == mesh.dp and other == mesh), None)

    def remaining_s(self) -> float | None:
        """Time left to search; None when there is no limit."""
        limit_s = self._limit_s()
        return None if limit_s is None else limit_s - (self.clock() - self.started_s)

    def _limit_s(self) -> float | None:
        """When the search ends; see `search.search` for patience."""
        if self.options.time_limit_s is None:
            return None
        share = self.planless_share if self.first_plan_s is None else 1.0
        limit_s = share * self.options.time_limit_s * (1.0 - self.kept_share)
        if self.patience_s is None:
            return limit_s - self.answer_s
        if self.first_plan_s is None or self.ready_s == 0.0:
            return max(share * self.patience_s, self.ready_s + limit_s)
        return max(self.first_plan_s, self.ready_s) + limit_s

    def first_limit_s(self, share: float) -> float:
        """How long something may take that comes before the queue: a share of the time limit, or all patience."""
        limit_s = self.options.time_limit_s
        if limit_s is None:
            return INFINITY
        return max(MIN_FIRST_S, share * limit_s if self.patience_s is None else self.planless_share * self.patience_s)

    def sampling_s(self) -> float:
        """How long to look for a better plan where the time limit is over: with patience, for as long again."""
        limit_s = self.options.time_limit_s
        return MIN_FIRST_S if limit_s is None or self.patience_s is None else max(MIN_FIRST_S, limit_s)

    def is_late(self) -> bool:
        """Whether no time is left."""
        remaining_s = self.remaining_s()
        return remaining_s is not None and remaining_s <= 0.0

    def is_over(self) -> bool:
        """Whether no time is left, which is then what stopped the search."""
        is_late = self.is_late()
        if is_late:
            self.stopped = "time limit"
        return is_late

    def table(self, mesh: Mesh) -> CostTable:
        """The price of a mesh, asked for once."""
        table = self.tables.get(mesh)
        if table is None:
            table = self.tables[mesh] = self.price(mesh)
        return table

    def program(self, index: int, *, bound_s: float) -> MeshProgram:
        """The program of a mesh that cannot be faster than `bound_s`."""
        if index not in self.programs:
            mesh = self.meshes[index]
            self.programs[index] = MeshProgram.of(self.table(mesh), shape_of(mesh), recompute=self.recompute)
        program = self.programs[index]
        program.bound_s = max(program.bound_s, bound_s)
        return program

    def weight(self, mesh: Mesh) -> float:
        """What a second of this mesh scores: the price of a step is proportional to the devices used."""
        return float(mesh.n_devices) if self.options.objective == "cost" else 1.0

    def score(self, index: int) -> float:
        """The score of the best plan found of a mesh; lower is better."""
        return self.plans[index].estimate.step_s * self.weight(self.meshes[index])

    def ranking(self) -> list[int]:
        """The meshes with a plan, best first."""
        if self.ranked is None:
            self.ranked = sorted(self.plans, key=lambda index: (self.score(index), index))
        return self.ranked

    def score_to_beat(self, rank: int = 0) -> float:
        """The score of the plan at this place of the ranking; INFINITY when there are fewer."""
        ranking = self.ranking()
        return self.score(ranking[rank]) if rank < len(ranking) else INFINITY

    @property
    def gap(self) -> float:
        """How much faster a plan must be to be worth looking for."""
        return 0.0 if self.options.require_optimal else GOOD_ENOUGH

    @property
    def recompute(self) -> str | None:
        """What the user fixed."""
        return fixed(self.options, "recompute")
