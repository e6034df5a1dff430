"""Predicted against published: step times of others' runs, priced from the data sheet without any measured profile.

    python benchmarks/published.py table [RESULTS.jsonl]    per source: errors, rank correlation, intervals, worst rows
    python benchmarks/published.py fit                      fits `CONSTANTS` on some rows, and tries them on the others

The rows are in `data/`, each with its source. A row that leaves out what its time depends on, or ran what no plan says,
is counted with the reason. The programs of the others are priced as they were:

- Attention ran as plain operators (`models/megatron.py`), blocks of equal number lay on each stage.
- Full recomputation repeats the forward pass of each block, selective that of the operators of `CoreAttention` alone.
- Sequences come before samples, so parts of ranks lie one behind the other, and sums are taken in place: nothing is
  copied beside a collective.
- Gradients were added up inside the products that made them, and reduced at once after the last backward pass.
- What all ranks of tensor parallelism hold alike goes from stage to stage in parts, one by each of them, which are
  gathered there (arXiv:2104.04473, section 4.1).
- The vocabulary is padded to a multiple of 128 on each tensor-parallel rank, and logits are widened to float32 before a
  loss that is split over it.

The 1440 rows of one host are not independent: at one width, tensor-parallel degree and micro-batch they are linear in
the numbers of blocks and micro-batches to 1 %, so they hold 32 times of blocks, and as many of embedding and loss.
These scatter: at width 2048 on 4 ranks a block takes 2.99 ms with one sample and 2.75 with two.

Left out: that these losses were a dozen operators, and that split sequences were gathered again in backward.
"""

import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

from predictions import widened_losses
from published_rows import MODEL, Case, Program, Sizes, case_of, reason_against, rows

from autoplan.answers.answer import step_interval_s
from autoplan.api import trace_model
from autoplan.cost import segment_work
from autoplan.cost.collective_time import axis_group, collective_s, send_s
from autoplan.cost.local_segment import local_segment
from autoplan.cost.price import Pricer, make_pricer
from autoplan.cost.segment_work import timed
from autoplan.cost.table import CostTable
from autoplan.cost.work_context import work_contexts
from autoplan.cost.works import Shardings
from autoplan.graph import OpGraph
from autoplan.hardware import NO_SHARDING, HardwareProfile, load_hardware_profile
from autoplan.options import Options
from autoplan.parallel_plan import Plan, StagePlan
from autoplan.rules import load_rules
from autoplan.search.result import Candidate
from autoplan.simulator import replay
from autoplan.simulator.simulate import simulate
from autoplan.space.layouts import all_shardings
from autoplan.tensor_parallel.sharding import read_sharding

RULES = load_rules()
CORE = "attention.core"
N_WORST = 10

# What `fit` looks for: fields of the device, and the first step of the search for each. All other figures stay.
CONSTANTS = {"matmul_efficiency": 0.04, "launch_s": 1e-6}
FIT_HARDWARE = "dgx_a100_x8"
FIT_EVERY = 13  # rows of one host
FIT_LARGE = ("megatron-22B", "gpt3-175B")
N_HALVINGS = 4


@dataclass(frozen=True, slots=True)
class Prediction:
    """One case: its predicted step, where that is put with a chance of 90 %, and what it is made of."""

    case: Case
    step_s: float
    interval_s: tuple[float, float]
    parts_s: Mapping[str, float]

    @property
    def error(self) -> float:
        return self.step_s / self.case.measured_s - 1

    @property
    def is_inside(self) -> bool:
        return self.interval_s[0] <= self.case.measured_s <= self.interval_s[1]


# ------------------------------------------------------------------------------------------------------ prediction


@cache
def cluster(name: str, n_devices: int) -> HardwareProfile:
    """As many hosts as hold the devices; `fully_shard` was not there to take time of them."""
    hardware = load_hardware_profile(name, n_hosts=-(-n_devices // load_hardware_profile(name).n_devices))
    return replace(hardware, device=replace(hardware.device, sharding=NO_SHARDING))


@cache
def graph_of(sizes: Sizes, file: Path = MODEL) -> OpGraph:
    return trace_model(file, overrides=dict(sizes))


@cache
def shardings_of(sizes: Sizes, hardware: str, precision: str, tp: int) -> Shardings:
    """The tensor-parallel layouts that autoplan finds: those of Megatron-LM, with whole and with split sequences."""
    if tp == 1:
        return {}
    options = Options(precision=precision, fix=(("tp", str(tp)),))
    return all_shardings(graph_of(sizes), load_hardware_profile(hardware), options, RULES, batch_size=1)


def nothing_copied() -> AbstractContextManager[object]:
    """Inside, nothing is copied beside a collective, as where sequences come before samples."""
    return patch.object(segment_work, "copies_s", lambda *_, **__: 0.0)


def received_when_needed() -> AbstractContextManager[object]:
    """Inside, a rank calls a receive in front of the pass that needs it under any schedule, as Megatron-LM does."""
    return patch.object(replay, "receives_ahead", lambda schedule: False)


class Predictor:
    """Prices cases, on changed hardware if so wished; what cases share is computed once."""

    def __init__(self, change: Callable[[HardwareProfile], HardwareProfile] = lambda hardware: hardware) -> None:
        self._change = change
        self._pricer = cache(self._make_pricer)
        self._core_s = cache(self._find_core_s)

    def __call__(self, case: Case) -> Prediction:
        with nothing_copied(), widened_losses():
            table = self._sent_in_parts(case, self._table(case))
        stages = even_stages(table, recomputes=case.recompute != "none")
        with received_when_needed():
            estimate = simulate(table if case.overlaps else _reduced_at_the_end(table, stages), stages)
        plan = Plan(case.mesh, stages, precision=case.program.precision)
        interval_s = step_interval_s(Candidate(plan, estimate, bound_s=estimate.step_s))
        parts_s = {field.name: getattr(estimate.breakdown, field.name) for field in fields(estimate.breakdown)}
        return Prediction(case, estimate.step_s, interval_s, parts_s)

    def _table(self, case: Case) -> CostTable:
        alone = replace(case.mesh, n_micro_batches=1, schedule="gpipe", n_chunks=1)
        table = replace(self._pricer(case.program, case.mesh.n_devices)(alone), mesh=case.mesh)
        if case.recompute == "none":
            return table
        if case.recompute == "full":  # all of it, as torch's recomputation was not there to stop early
            again_s = [plain.forward_s + plain.launch_forward_s + plain.tp_forward_s for plain, _ in table.costs]
        else:
            kinds = range(len(table.costs))
            again_s = [self._core_s(case.program, kind, case.mesh.micro_batch_size) for kind in kinds]
        pairs = zip(table.costs, again_s, strict=True)
        return replace(table, costs=tuple((plain, replace(again, recompute_s=s)) for (plain, again), s in pairs))

    def _sent_in_parts(self, case: Case, table: CostTable) -> CostTable:
        """The table of a pipeline between whose stages no tensor-parallel rank sends what another one does."""
        mesh, program = case.mesh, case.program
        if mesh.pp == 1 or program.sharding != "R":
            return table
        hardware = self._change(cluster(program.hardware, mesh.n_devices))
        stages = axis_group(hardware, size=mesh.pp, stride=mesh.dp * mesh.tp)
        part = axis_group(hardware, size=mesh.tp, stride=1)

        def seconds(n_bytes: int) -> float:
            gathered_s = collective_s("all_gather", n_bytes, group=part, hardware=hardware)
            return send_s(n_bytes / mesh.tp, pair=stages, hardware=hardware) + gathered_s

        sizes = zip(table.cut_s, table.message_bytes, strict=True)
        cut_s = tuple(None if s is None else seconds(n_bytes) for s, n_bytes in sizes)
        return replace(table, cut_s=cut_s, sendrecv_s=())

    def _make_pricer(self, program: Program, n_devices: int) -> Pricer:
        return make_pricer(
            graph_of(program.sizes, program.file),
            hardware=self._change(cluster(program.hardware, n_devices)),
            precision=program.precision,
            shardings=shardings_of(program.sizes, program.hardware, program.precision, program.tp),
            rules=RULES,
            compression=program.compression,
        )

    def _find_core_s(self, program: Program, kind: int, micro_batch_size: int) -> float:
        """The forward pass of `CoreAttention` in one kind of segment; it communicates nothing."""
        graph = graph_of(program.sizes)
        hardware = self._change(cluster(program.hardware, program.tp))
        context = work_contexts(graph, hardware, program.precision, RULES)(program.tp)
        shardings = shardings_of(program.sizes, program.hardware, program.precision, program.tp)
        found = (own for own in shardings.get((program.tp, program.sharding), ()) if own.kind == kind)
        segment = graph.first_of_kind()[kind]
        layouts = read_sharding(graph, segment, next(found, None), degree=program.tp, rules=RULES, facts=context.facts)
        ops = (local for local in local_segment(context, segment, layouts).ops if CORE in local.op.module_path)
        return sum(timed(context, local, micro_batch_size).forward_s for local in ops)


def even_stages(table: CostTable, *, recomputes: bool) -> tuple[StagePlan, ...]:
    """Equal numbers of blocks; the embedding belongs to the first stage, head and loss to the last."""
    last, n_stages = len(table.kinds) - 1, table.mesh.n_stages
    edges = [0, *(1 + (last - 1) * i // n_stages for i in range(1, n_stages)), last + 1]
    return tuple(
        StagePlan(start, stop, tuple(i for i in range(start, stop) if recomputes and 0 < i < last))
        for start, stop in zip(edges, edges[1:], strict=False)
    )


def _reduced_at_the_end(table: CostTable, stages: tuple[StagePlan, ...]) -> CostTable:
    reduce_s = max(sum(table.cost_of(i, recomputed=False).reduce_s for i in range(s.start, s.stop)) for s in stages)
    costs = tuple(tuple(replace(cost, reduce_s=0.0) for cost in choices) for choices in table.costs)
    return replace(table, costs=costs, per_step_s=table.per_step_s + reduce_s)


# ----------------------------------------------------------------------------------------------------------- tables

HEAD = f"{'rows':>5} {'MAPE':>6} {'median':>6} {'worst':>7} {'bias':>7} {'rank':>6} {'inside':>6}"


def summary(found: list[Prediction]) -> str:
    """Mean and median absolute error, the worst, the mean error, rank correlation, share inside the interval."""
    errors = [p.error for p in found]
    absolute = [abs(error) for error in errors]
    inside = statistics.mean(p.is_inside for p in found)
    return (
        f"{len(found):5} {statistics.mean(absolute):6.1%} {statistics.median(absolute):6.1%}"
        f" {max(errors, key=abs):+7.1%} {statistics.mean(errors):+7.1%} {rank_correlation(found):6.3f} {inside:6.0%}"
    )


def rank_correlation(found: list[Prediction]) -> float:
    """Spearman's, of measured and predicted seconds; rows that are equally slow keep their order."""
    measured, predicted = (
        {i: rank for rank, i in enumerate(sorted(range(len(found)), key=key))}
        for key in (lambda i: found[i].case.measured_s, lambda i: found[i].step_s)
    )
    pairs = [(measured[i], predicted[i]) for i in range(len(found))]
    return statistics.correlation(*zip(*pairs, strict=True))


def described(found: Prediction) -> str:
    """A row with what its predicted time is made of."""
    case, mesh = found.case, found.case.mesh
    largest = sorted(found.parts_s.items(), key=lambda item: -item[1])[:3]
    made_of = ", ".join(f"{name.removesuffix('_s')} {part_s / found.step_s:.0%}" for name, part_s in largest)
    plan = f"dp {mesh.dp} tp {mesh.tp} pp {mesh.pp} batch {mesh.micro_batch_size} x {mesh.n_micro_batches}"
    return (
        f"{case.name:30} {case.model:13} {plan:32} {case.measured_s:8.3f} {found.step_s:8.3f} {found.error:+7.1%}"
        f"  {made_of}"
    )


def worst(found: Iterable[Prediction]) -> list[Prediction]:
    """The rows that are furthest off, one of each kind of block: all rows of a kind are off for the same reason."""
    of_kind: dict[object, Prediction] = {}
    for prediction in sorted(found, key=lambda p: -abs(p.error)):
        case = prediction.case
        block = dict(case.program.sizes) | {"n_layers": 0}
        of_kind.setdefault((*block.values(), case.mesh.tp, case.mesh.micro_batch_size, case.recompute), prediction)
    return list(of_kind.values())[:N_WORST]


def by_source(found: Iterable[Prediction]) -> dict[str, list[Prediction]]:
    groups: dict[str, list[Prediction]] = {}
    for prediction in found:
        groups.setdefault(prediction.case.source, []).append(prediction)
    return groups


def table(results: Path | None = None) -> None:
    all_rows = rows()
    reasons = Counter(reason_against(row) for row in all_rows)
    predict = Predictor()
    found = [predict(case_of(row)) for row in all_rows if reason_against(row) is None]
    for source, own in by_source(found).items():
        print(f"{source}\n{HEAD}\n{summary(own)}")
        for prediction in worst(own):
            print(described(prediction))
    print(f"not priced: {sum(count for reason, count in reasons.items() if reason)} rows")
    print("\n".join(f"{count:5} {reason}" for reason, count in reasons.most_common() if reason))
    if results is not None:
        results.write_text("".join(json.dumps(_result(prediction)) + "\n" for prediction in found))


def _result(found: Prediction) -> dict[str, object]:
    return {
        "id": found.case.name,
        "measured_step_s": found.case.measured_s,
        "predicted_step_s": round(found.step_s, 6),
        "predicted_step_s_interval": [round(bound_s, 6) for bound_s in found.interval_s],
    }


# -------------------------------------------------------------------------------------------------------------- fit


def is_gpt(case: Case) -> bool:
    return case.program.file == MODEL


def on_device(values: Mapping[str, float]) -> Predictor:
    """A predictor on devices with these figures."""
    return Predictor(lambda hardware: replace(hardware, device=replace(hardware.device, **values)))


def rms(found: Iterable[Prediction]) -> float:
    return math.sqrt(statistics.mean(math.log1p(prediction.error) ** 2 for prediction in found))


def fit() -> None:
    """The constants with the least rms error, the sources of the rows weighing alike; by halving steps."""
    cases = [case for case in (case_of(row) for row in rows() if reason_against(row) is None) if is_gpt(case)]
    one_host = [case for case in cases if case.mesh.n_devices <= load_hardware_profile(FIT_HARDWARE).n_devices]
    large = [case for case in cases if case.model in FIT_LARGE]
    used = ([case for case in one_host if case.model not in FIT_LARGE][::FIT_EVERY], large)

    def loss(values: Mapping[str, float]) -> float:
        predict = on_device(values)
        return sum(rms(map(predict, group)) for group in used)

    device = load_hardware_profile(FIT_HARDWARE).device
    best = {name: getattr(device, name) for name in CONSTANTS}
    least, steps = loss(best), dict(CONSTANTS)
    for _ in range(N_HALVINGS):
        tried = True
        while tried:
            tried = False
            for other in [{**best, n: best[n] + sign * step} for n, step in steps.items() for sign in (1, -1)]:
                error = loss(other)
                if error < least:
                    best, least, tried = other, error, True
        steps = {name: step / 2 for name, step in steps.items()}
    print(", ".join(f"{name}_fit = {value:.4g}" for name, value in best.items()), f"({FIT_HARDWARE})")
    names = {case.name for group in used for case in group}
    found = [on_device(best)(case) for case in cases]
    for title, is_used in (("fitted to", True), ("held out", False)):
        for source, own in by_source(p for p in found if (p.case.name in names) == is_used).items():
            print(f"{title}: {source}\n{HEAD}\n{summary(own)}")


if __name__ == "__main__":
    action, *paths = sys.argv[1:]
    {"table": table, "fit": fit}[action](*map(Path, paths))
