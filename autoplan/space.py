"""One problem as the search sees it: the space of meshes, a price for each, and the way back to a plan.

OpGraph + HardwareProfile + Options --> SearchSpace, price(mesh) -> CostTable, make_plan(mesh, stages) -> Plan
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from autoplan.chunked_loss import can_chunk
from autoplan.cost.boundaries import legal_cuts
from autoplan.cost.grad_compression import Compression
from autoplan.cost.layout_prices import sharding_figures, sharding_prices
from autoplan.cost.measured import execution_of
from autoplan.cost.price import Shardings, make_pricer
from autoplan.cost.table import CostTable
from autoplan.errors import InputError, UsageError
from autoplan.fix_checks import check_fixed
from autoplan.graph import OpGraph, gradient_values
from autoplan.hardware import HardwareProfile
from autoplan.options import (
    BATCH_NORMS,
    DEFAULT_POWERSGD_RANK,
    GRAD_COMPRESSIONS,
    LOSS_AVERAGES,
    LOSSES,
    MEMORY_FORMATS,
    Options,
)
from autoplan.parallel_plan import Execution, Mesh, Plan, SegmentSharding, StagePlan
from autoplan.profile.current_code import with_current_code
from autoplan.profile.segment_times import MeasuredProfile
from autoplan.registry import load_table
from autoplan.rules import OpRule, forward_flops, operand_names
from autoplan.search.meshes import SearchSpace, divisors, fixed, fixed_int
from autoplan.search.solve import minimize
from autoplan.tensor_parallel.layout_cache import Layouts, cached_layouts
from autoplan.tensor_parallel.sharding import shard_graph

Value = TypeVar("Value")

# Micro-batch sizes for which layouts are solved: starting a collective counts for small ones, bytes for large ones.
LAYOUT_SIZES = (1, 8)
# Parts of its price that communication has, one after the other until something is split: two ranks save half of the
# compute, four of them three quarters, while the launches of small collectives cost both the same.
PRICES_OF_COMMUNICATION = (1.0, 0.25, 0.0625, 0.0)
CHANNELS_LAST = MEMORY_FORMATS[1]
N_FACTORS = 2  # of a product; the backward pass of attention counts twice, too, by the convention of "model FLOPs"


@dataclass(frozen=True, slots=True)
class PricedSpace:
    """What `search` is called with, besides the options."""

    space: SearchSpace
    price: Callable[[Mesh], CostTable]
    make_plan: Callable[[Mesh, tuple[StagePlan, ...]], Plan]


def load_rules(files: Sequence[str] = ()) -> dict[str, OpRule]:
    """The rule of every operator, from the tables of `cost_models/` and of these files (`Options.rules`).

    Raises: InputError when two tables have the same operator, or an entry is no rule.
    """
    rules = load_table("autoplan.cost_models", "RULES", files)
    for target, rule in rules.items():
        if not isinstance(rule, OpRule):
            raise InputError.of(
                f"RULES[{target!r}]", found=type(rule).__name__, expected="an OpRule", fix='write OpRule("a b -> a b")'
            )
    return rules


def priced_space(
    graph: OpGraph,
    profile: HardwareProfile,
    options: Options,
    *,
    global_batch: int,
    n_devices: int | None = None,
    measured: MeasuredProfile | None = None,
) -> PricedSpace:
    """Solve the tensor-parallel programs of every degree, and offer everything to the search.

    With `n_devices` every plan uses exactly that many; otherwise the cluster's, or fewer where that is faster.
    """
    check_fixed(graph, options)
    rules = load_rules(options.rules)
    by_size = shardings_by_size(graph, profile, options, rules)
    measured = with_current_code(measured, graph, by_size.values(), precision=options.precision, rules=rules)
    keys: dict[int, list[str]] = {1: [""]}
    for degree, key in by_size[min(by_size)]:
        keys.setdefault(degree, []).append(key)
    space = SearchSpace(
        n_devices=n_devices or profile.n_devices,
        uses_all_devices=n_devices is not None,
        n_devices_per_host=profile.n_devices_per_host,
        global_batch=global_batch,
        kinds=tuple(segment.kind for segment in graph.segments),
        cuts=legal_cuts(graph),
        shardings=tuple((degree, tuple(names)) for degree, names in keys.items()),
        executions=executions(graph, options, measured),
        generated=_codes(options, measured),
    )
    pricers = {
        size: make_pricer(
            graph,
            profile=profile,
            precision=options.precision,
            shardings=shardings,
            rules=rules,
            measured=measured,
            loss=loss_choice(options),
            compression=compression_choice(options),
        )
        for size, shardings in by_size.items()
    }
    hardware, graph_hash = (profile.name, profile.n_hosts), graph.content_hash()
    make_plan = partial(_make_plan, graph, by_size, options, hardware, graph_hash, rules)
    return PricedSpace(space, lambda mesh: of_size(pricers, mesh)(mesh), make_plan)


def price_plan(
    graph: OpGraph,
    profile: HardwareProfile,
    plan: Plan,
    *,
    rule_files: Sequence[str] = (),
    measured: MeasuredProfile | None = None,
) -> CostTable:
    """The cost table of one given plan, with the tensor-parallel assignment that the plan carries."""
    way, degree, rules = plan.mesh.execution, plan.mesh.tp, load_rules(rule_files)
    shardings = {(degree, plan.mesh.sharding): plan.shardings}
    split = [shardings] if degree > 1 else []  # the whole model's were looked at where the profile was read
    measured = with_current_code(measured, graph, split, precision=plan.precision, rules=rules)
    if way.compile:
        _check_execution(graph, measured, Execution(compile=True), where="plan: mesh.compile", degree=degree)
    if way != Execution():
        _check_execution(graph, measured, way, where="plan: mesh.memory_format", degree=degree)
    pricer = make_pricer(
        graph,
        profile=profile,
        precision=plan.precision,
        shardings=shardings,
        rules=rules,
        measured=measured,
        loss=plan.loss,
        compression=Compression(plan.grad_compression, plan.powersgd_rank),
    )
    return pricer(plan.mesh)


def loss_choice(options: Options) -> str | None:
    """How the loss is computed, or None where the search may choose.

    It chooses as it does of what is recomputed; so recomputation of some blocks, when fixed, says nothing of the loss.
    """
    return fixed(options, "loss") or (LOSSES[0] if fixed(options, "recompute") == "selective" else None)


def compression_choice(options: Options) -> Compression:
    """How gradients are compressed, which only the user decides."""
    name = fixed(options, "grad_compression") or GRAD_COMPRESSIONS[0]
    rank = fixed_int(options, "powersgd_rank") or DEFAULT_POWERSGD_RANK
    return Compression(name, rank if name == "powersgd" else None)


def executions(graph: OpGraph, options: Options, measured: MeasuredProfile | None) -> tuple[Execution, ...]:
    """How modules may run: as is fixed, and else in every way that was measured.

    Raises: UsageError when a way is asked for that has no price.
    """
    compiles, memory_format, tp = fixed(options, "compile"), fixed(options, "memory_format"), fixed_int(options, "tp")
    if compiles == "on":
        _check_execution(graph, measured, Execution(compile=True), where="--fix compile=on", degree=tp)
    if memory_format == CHANNELS_LAST:
        wanted = Execution(memory_format=CHANNELS_LAST)
        _check_execution(graph, measured, wanted, where=f"--fix memory_format={CHANNELS_LAST}", degree=tp)
    found = [
        Execution(is_compiled, layout)
        for is_compiled in ((False, True) if compiles is None else (compiles == "on",))
        for layout in (MEMORY_FORMATS if memory_format is None else (memory_format,))
    ]
    return tuple(way for way in found if not why_unknown(graph, measured, way, degree=tp)) or tuple(found[:1])


def _codes(options: Options, measured: MeasuredProfile | None) -> tuple[bool, ...]:
    """Whether programs may be generated where the user's own classes would do: as is fixed, else if it may gain."""
    wanted = fixed(options, "generated")
    if wanted is not None:
        return (wanted == "on",)
    return (False, True) if measured is not None and measured.is_worth_generating else (False,)


def why_unknown(graph: OpGraph, measured: MeasuredProfile | None, way: Execution, *, degree: int | None) -> str:
    """Why there is no price for modules that run so, at this degree or any; "" when there is one."""
    plain, kinds = Execution(), graph.first_of_kind()
    used = {execution_of(graph, kind, way) for kind in kinds}
    needed = used - {plain}
    name = "compiled" if way.compile else f"in {way.memory_format}"
    if way.memory_format not in {item.memory_format for item in used}:
        return "no segment that reads images, [sample, channel, height, width]"
    if needed and (measured is None or not needed <= measured.executions):
        return f"no segment that was measured {name}"
    failed = () if measured is None else (item for item in measured.failed if item.execution in needed)
    texts = dict.fromkeys(f"{item.segment} (tp {item.tp})" for item in failed if degree in (None, item.tp))
    action = "torch.compile failed on" if way.compile else f"measurements {name} that failed of"
    return f"{action} {', '.join(texts)}" if texts else ""


def _check_execution(
    graph: OpGraph, measured: MeasuredProfile | None, way: Execution, *, where: str, degree: int | None
) -> None:
    why = why_unknown(graph, measured, way, degree=degree)
    if why:
        option, plain = ("--compile", "compile") if way.compile else ("--memory-format", "memory_format")
        raise UsageError.of(
            where,
            found=why,
            expected="--profile FILE with segments that ran so, since what it gains cannot be computed",
            fix=f"run autoplan profile MODEL {option} both, or leave {plain} out",
        )


def flops_per_sample(graph: OpGraph, *, rule_files: Sequence[str] = ()) -> int:
    """Model FLOPs of one sample, forward and backward: products, convolutions, attention; nothing recomputed.

    The gradient of one factor of a product takes as much as the product; images and frozen weights have none. Under a
    causal mask half of attention counts.
    """
    rules, specs, gradients = load_rules(rule_files), graph.specs(), gradient_values(graph.ops, graph.parameters)
    total = 0
    for op in graph.ops:
        rule = rules.get(op.target)
        if rule is not None and rule.efficiency == "matmul":
            names = operand_names(op)
            factors = rule.saves[:N_FACTORS] if rule.is_product else ()
            n_without = sum(names[index] not in gradients for index in factors)
            operands = tuple(specs[name] for name in names)
            total += (1 + N_FACTORS - n_without) * forward_flops(rule, op, operands=operands, batch_size=1)
    return total


def ops_without_rule(graph: OpGraph, *, rule_files: Sequence[str] = ()) -> tuple[str, ...]:
    """Operators that are priced by their bytes and never split, because no rule knows them."""
    rules = load_rules(rule_files)
    return tuple(dict.fromkeys(op.target for op in graph.ops if op.target not in rules))


def shardings_by_size(
    graph: OpGraph, profile: HardwareProfile, options: Options, rules: Mapping[str, OpRule]
) -> dict[int, Shardings]:
    """Tensor-parallel assignments per micro-batch size that they are solved for; all have the same keys."""
    if graph.is_module_level:
        return {1: {}}
    wanted = fixed_int(options, "micro_batch")
    sizes = LAYOUT_SIZES if wanted is None else (wanted,)
    found = {size: all_shardings(graph, profile, options, rules, batch_size=size) for size in sizes}
    first = found[sizes[0]]
    return {size: {key: own.get(key, first[key]) for key in first} for size, own in found.items()}


def layout_size(micro_batch_size: int, sizes: Iterable[int] = LAYOUT_SIZES) -> int:
    """For which of these micro-batch sizes the layouts of another one are solved."""
    return max((size for size in sizes if size <= 2 * micro_batch_size), default=min(sizes))


def of_size(by_size: Mapping[int, Value], mesh: Mesh) -> Value:
    """The entry that is meant for the micro-batches of a mesh."""
    return by_size[layout_size(mesh.micro_batch_size, tuple(by_size))]


def all_shardings(
    graph: OpGraph, profile: HardwareProfile, options: Options, rules: Mapping[str, OpRule], *, batch_size: int
) -> Shardings:
    """The tensor-parallel assignments of every degree a host (or the user) allows; none that splits nothing.

    They are the best for micro-batches of `batch_size`. `rules` are those that `options` name; what was solved before
    is read from the user's cache. Where the degree that is fixed is slower than none, its assignments are the best ones
    under the highest price of communication, of `PRICES_OF_COMMUNICATION`, at which something is split.
    """
    wanted = fixed_int(options, "tp")
    degrees = divisors(profile.n_devices_per_host) if wanted is None else (wanted,)
    found: dict[tuple[int, str], tuple[SegmentSharding, ...]] = {}
    graph_hash = graph.content_hash()
    if wanted is not None:
        _check_degree(wanted, profile)
    for degree in degrees:
        if degree == 1 or degree > profile.n_devices:
            continue
        for part in PRICES_OF_COMMUNICATION[: 1 if wanted is None else None]:
            best = _layouts(graph, profile, options, rules, (degree, batch_size, part), graph_hash=graph_hash)
            split = {(degree, key): value for key, value in best.items() if _splits_something(value)}
            found.update(split)
            if split:
                break
    if wanted not in (None, 1) and not found:
        free = replace(options, fix=tuple(pair for pair in options.fix if pair[0] != "tp"))
        legal = sorted(
            {1, *(degree for degree, _ in all_shardings(graph, profile, free, rules, batch_size=batch_size))}
        )
        raise UsageError.of(
            f"--fix tp={wanted}",
            found=f"nothing in the model that can be split over {wanted} devices",
            expected=f"one of {', '.join(map(str, legal))}",
            fix="use one of these, or leave tp out",
        )
    return found


def _layouts(
    graph: OpGraph,
    profile: HardwareProfile,
    options: Options,
    rules: Mapping[str, OpRule],
    case: tuple[int, int, float],
    *,
    graph_hash: str,
) -> Layouts:
    """What `shard_graph` finds now or in an earlier run for a degree, a micro-batch, and a price of communication."""
    degree, batch_size, part = case

    def solve_now() -> Layouts:
        prices = sharding_prices(
            graph,
            profile=profile,
            precision=options.precision,
            rules=rules,
            degree=degree,
            batch_size=batch_size,
            communication=part,
        )
        return shard_graph(graph, degree=degree, rules=rules, prices=prices, solve=partial(minimize, time_limit_s=None))

    figures = sharding_figures(profile, degree=degree)
    named = (graph_hash, options.precision, f"degree {degree}, micro-batch {batch_size}, price {part}", figures)
    return cached_layouts(named, options.rules, solve_now)


def _check_degree(degree: int, profile: HardwareProfile) -> None:
    """Refuse a degree that the cluster has no place for, and name the nearest that it has."""
    host = profile.n_devices_per_host
    multiples = tuple(host * k for k in range(2, profile.n_hosts + 1))
    legal = sorted((*divisors(host), *multiples), key=lambda other: (abs(other - degree), other))
    if degree not in legal:
        raise UsageError.of(
            f"--fix tp={degree}",
            found=f"{degree}, on {profile.n_hosts} x {host} devices",
            expected="a divisor or a multiple of the devices of a host",
            fix=f"use tp={' or tp='.join(map(str, sorted(legal[:2])))}",
        )


def _splits_something(assignments: tuple[SegmentSharding, ...]) -> bool:
    return any(layout.startswith("S") for assignment in assignments for _, layout in assignment.values)


def _make_plan(
    graph: OpGraph,
    by_size: Mapping[int, Shardings],
    options: Options,
    hardware: tuple[str, int],
    graph_hash: str,
    rules: Mapping[str, OpRule],
    mesh: Mesh,
    stages: tuple[StagePlan, ...],
) -> Plan:
    """The plan; only blocks are recomputed, and in place of the last segment its loss is chunked."""
    shardings = of_size(by_size, mesh).get((mesh.tp, mesh.sharding), ())
    last = len(graph.segments) - 1
    loss = loss_choice(options) or LOSSES[any(last in stage.recomputed for stage in stages)]
    if loss == "chunked" and not can_chunk(graph, mesh, shardings, rules=rules):
        loss = LOSSES[0]
    kept = tuple(
        StagePlan(s.start, s.stop, tuple(i for i in s.recomputed if graph.segments[i].is_block)) for s in stages
    )
    compression = compression_choice(options).under(mesh)
    return Plan(
        mesh=mesh,
        stages=kept,
        precision=options.precision,
        shardings=shardings,
        graph_hash=graph_hash,
        hardware=hardware[0],
        n_hosts=hardware[1],
        recompute=_recompute_name(graph, kept, n_copies=len(mesh.all_shares)),
        loss=loss,
        batch_norm=fixed(options, "batch_norm") or BATCH_NORMS[0],
        loss_average=fixed(options, "loss_average") or LOSS_AVERAGES[0],
        grad_compression=compression.name,
        powersgd_rank=compression.rank,
    )


def _recompute_name(graph: OpGraph, stages: tuple[StagePlan, ...], *, n_copies: int) -> str:
    """Of stages that have every block so many times."""
    n_recomputed = sum(len(stage.recomputed) for stage in stages)
    n_blocks = n_copies * sum(segment.is_block for segment in graph.segments)
    return "none" if n_recomputed == 0 else "full" if n_recomputed == n_blocks else "selective"
