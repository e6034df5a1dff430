"""Tensor-parallel layouts of a problem: every degree that it may have, at the micro-batch sizes that are looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

from autoplan.cost.layout_prices import sharding_figures, sharding_prices
from autoplan.cost.works import Shardings
from autoplan.errors import UsageError
from autoplan.graph import WHOLE_OPTIMIZER, GraphFacts, OpGraph
from autoplan.hardware import HardwareProfile
from autoplan.options import Options
from autoplan.parallel_plan import Mesh, SegmentSharding
from autoplan.rules import OpRule
from autoplan.search.meshes import divisors, fixed_int, tensor_degrees
from autoplan.solver.solve import minimize
from autoplan.tensor_parallel.layout_cache import Layouts, cached_layouts
from autoplan.tensor_parallel.op_strategies import legal_strategies
from autoplan.tensor_parallel.sharding import shard_graph

Value = TypeVar("Value")

# Micro-batch sizes for which layouts are solved: starting a collective counts for small ones, bytes for large ones.
LAYOUT_SIZES = (1, 8)
# Parts of its price that communication has, one after the other until something is split: two ranks save half of the
# compute, four of them three quarters, while the launches of small collectives cost both the same.
PRICES_OF_COMMUNICATION = (1.0, 0.25, 0.0625, 0.0)
N_NEAR = 8  # degrees named in place of one that has no place
# Ways to split the operators of a block, in all, up to which its layouts are solved: the largest stage of ResNet-152
# has 1,846, a Mamba block of 32 tokens, which takes two minutes, 1,838, one of 64 tokens 3,310.
MOST_STRATEGIES = 2000
MANY_OPS = 300  # of a block that may have so many; fewer are not counted


def shardings_by_size(
    graph: OpGraph, hardware: HardwareProfile, options: Options, rules: Mapping[str, OpRule]
) -> dict[int, Shardings]:
    """Tensor-parallel assignments per micro-batch size that they are solved for; all have the same keys.

    Where no degree is fixed there are none for an optimizer of whole tensors, which would train something else, nor
    where they take minutes.
    """
    if graph.is_module_level or graph.has_own_gradients:
        return {1: {}}
    if fixed_int(options, "tp") is None and (WHOLE_OPTIMIZER in graph.dissolved or too_many_layouts(graph, rules)):
        return {1: {}}
    wanted = fixed_int(options, "micro_batch")
    sizes = LAYOUT_SIZES if wanted is None else (wanted,)
    found = {size: all_shardings(graph, hardware, options, rules, batch_size=size) for size in sizes}
    first = found[sizes[0]]
    return {size: {key: own.get(key, first[key]) for key in first} for size, own in found.items()}


def too_many_layouts(graph: OpGraph, rules: Mapping[str, OpRule]) -> int:
    """Of a block that would take minutes to solve, how many operators it has; 0 where there is none.

    Such blocks are loops over tokens. They are solved where a degree of tensor parallelism is fixed.
    """
    large = [ops for ops in map(graph.ops_of, graph.first_of_kind().values()) if len(ops) > MANY_OPS]
    if not large:
        return 0
    facts = GraphFacts.of(graph)
    legal = (legal_strategies(ops, facts.specs, facts.gradients, 2, rules) for ops in large)
    return next((len(found) for found in legal if sum(map(len, found.values())) > MOST_STRATEGIES), 0)


def layout_size(micro_batch_size: int, sizes: Iterable[int] = LAYOUT_SIZES) -> int:
    """For which of these micro-batch sizes the layouts of another one are solved."""
    return max((size for size in sizes if size <= 2 * micro_batch_size), default=min(sizes))


def of_size(by_size: Mapping[int, Value], mesh: Mesh) -> Value:
    """The entry that is meant for the micro-batches of a mesh."""
    return by_size[layout_size(mesh.micro_batch_size, tuple(by_size))]


def all_shardings(
    graph: OpGraph, hardware: HardwareProfile, options: Options, rules: Mapping[str, OpRule], *, batch_size: int
) -> Shardings:
    """The tensor-parallel assignments of every degree a host, its links (or the user) allow; none that splits nothing.

    They are the best for micro-batches of `batch_size`. `rules` are those that `options` name; what was solved before
    is read from the user's cache. Where the degree that is fixed is slower than none, its assignments are the best ones
    under the highest price of communication, of `PRICES_OF_COMMUNICATION`, at which something is split.

    Raises: UsageError for a degree that is fixed and has no place, or nothing to split.
    """
    wanted = fixed_int(options, "tp")
    host, on_links = hardware.n_devices_per_host, hardware.n_devices_joined
    degrees = tensor_degrees(n_devices_per_host=host, n_on_links=on_links) if wanted is None else (wanted,)
    found: dict[tuple[int, str], tuple[SegmentSharding, ...]] = {}
    graph_hash = graph.content_hash()
    if wanted is not None:
        check_tensor_degree(wanted, hardware)
    for degree in degrees:
        if degree == 1 or degree > hardware.n_devices:
            continue
        for part in PRICES_OF_COMMUNICATION[: 1 if wanted is None else None]:
            best = _layouts(graph, hardware, options, rules, (degree, batch_size, part), graph_hash=graph_hash)
            split = {(degree, key): value for key, value in best.items() if _splits_something(value)}
            found.update(split)
            if split:
                break
    if wanted not in (None, 1) and not found:
        free = replace(options, fix=tuple(pair for pair in options.fix if pair[0] != "tp"))
        legal = sorted(
            {1, *(degree for degree, _ in all_shardings(graph, hardware, free, rules, batch_size=batch_size))}
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
    hardware: HardwareProfile,
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
            hardware=hardware,
            precision=options.precision,
            rules=rules,
            degree=degree,
            batch_size=batch_size,
            communication=part,
        )
        return shard_graph(graph, degree=degree, rules=rules, prices=prices, solve=partial(minimize, time_limit_s=None))

    figures = sharding_figures(hardware, degree=degree)
    named = (graph_hash, options.precision, f"degree {degree}, micro-batch {batch_size}, price {part}", figures)
    return cached_layouts(named, options.rules, solve_now)


def check_tensor_degree(degree: int, hardware: HardwareProfile) -> None:
    """Refuse a degree that the cluster has no place for, and name the nearest that it has."""
    host = hardware.n_devices_per_host
    multiples = tuple(host * k for k in range(2, hardware.n_hosts + 1))
    legal = sorted((*divisors(host), *multiples), key=lambda other: (abs(other - degree), other))
    if degree not in legal:
        raise UsageError.of(
            f"--fix tp={degree}",
            found=f"{degree}, on {hardware.n_hosts} x {host} devices",
            expected="a divisor or a multiple of the devices of a host",
            fix=f"use tp of {', '.join(map(str, sorted(legal[:N_NEAR])))}",
        )


def _splits_something(assignments: tuple[SegmentSharding, ...]) -> bool:
    return any(layout.startswith("S") for assignment in assignments for _, layout in assignment.values)
