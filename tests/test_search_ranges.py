"""Ranges of pieces: one of each kind stands for all, whatever is asked of it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from brute_force import OVERLAPS, random_toy
from distributed.programs import graph_of
from mixed_toys import layered

from autoplan.cost.table import CostTable
from autoplan.graph import crossings, invariant_values
from autoplan.parallel_plan import Mesh
from autoplan.search.one_stage.banded_path import bands_of
from autoplan.search.ranges import Ranges, Segments, backward_pass_s, forward_pass_s, left_s, reducing_pass_s
from autoplan.simulator.stage_pass import pass_work, replay_pass

N_RANDOM = 30


def _random_table(seed: int) -> CostTable:
    """A pipeline's table with runs of equal segments, and boundaries and ranks that are not all alike."""
    rng = random.Random(seed)
    mesh = Mesh(pp=2, n_micro_batches=4, dp=2, zero_stage=rng.choice((1, 3)), zero_shard_degree=2)
    table = random_toy(seed, n_segments=rng.randint(3, 12)).price(mesh)

    def some_dearer() -> tuple[float | None, ...]:
        return tuple(cut_s if cut_s is None or rng.random() < 0.8 else cut_s + 1.0 for cut_s in table.cut_s)

    table = replace(table, cut_s=some_dearer())
    return replace(table, rank_tables=(table, replace(table, cut_s=some_dearer()))) if rng.random() < 0.5 else table


@pytest.mark.parametrize("seed", range(N_RANDOM))
def test_every_range_has_the_figures_of_its_kind(seed: int) -> None:
    table = _random_table(seed)
    ranges, segments = Ranges.of(table, len(table.kinds)), Segments.of(table, None)
    saved, again = segments.saved_bytes, segments.alone_bytes
    figures = {
        "total": ranges.total(saved),
        "first": ranges.first(saved),
        "last": ranges.last(saved),
        "largest": ranges.largest_segment(saved),
        "moment": ranges.largest_moment(saved_bytes=saved, alone_bytes=again),
    }
    for stop in range(1, ranges.n_pieces + 1):
        for count in range(1, min(stop, ranges.width) + 1):
            kind = ranges.kind[stop, count - 1]
            own = slice(ranges.edges[stop - count], ranges.edges[stop])
            assert ranges.stop[kind] - ranges.start[kind] == count
            expected = {
                "total": saved[own].sum(),
                "first": saved[own][0],
                "last": saved[own][-1],
                "largest": saved[own].max(),
                "moment": (np.cumsum(saved[own]) + again[own]).max(),
            }
            assert {name: values[kind] for name, values in figures.items()} == pytest.approx(expected)
            for rank_table in (table, *table.rank_tables):
                for end, same in ((stop - count, ranges.start[kind]), (stop, ranges.stop[kind])):
                    cuts = [None, *(rank_table.cut_s[edge - 1] for edge in ranges.edges[1:-1]), None]
                    assert cuts[end] == cuts[same]


@pytest.mark.parametrize("seed", range(0, N_RANDOM, 4))
def test_passes_take_what_the_segments_of_the_range_alone_would(seed: int) -> None:
    table = _random_table(seed)
    ranges, segments = Ranges.of(table, len(table.kinds)), Segments.of(table, None)
    forward, backward = forward_pass_s(segments, ranges, gathers=True), backward_pass_s(table, segments, ranges)
    for stop in range(1, ranges.n_pieces + 1):
        for count in range(1, min(stop, ranges.width) + 1):
            first, last = int(ranges.edges[stop - count]), int(ranges.edges[stop])
            alone = replace(
                table,
                mesh=replace(table.mesh, pp=1),
                kinds=table.kinds[first:last],
                cut_s=table.cut_s[first : last - 1],
                message_bytes=(),
                rank_tables=(),
            )
            whole, own = Ranges.of(alone, 1), Segments.of(alone, None)
            kind = ranges.kind[stop, count - 1]
            assert forward_pass_s(own, whole, gathers=True)[0] == pytest.approx(forward[kind])
            assert backward_pass_s(alone, own, whole)[0] == pytest.approx(backward[kind])


@pytest.mark.parametrize("seed", range(N_RANDOM))
def test_no_pass_of_a_range_takes_or_leaves_more_than_when_it_is_replayed(seed: int) -> None:
    table = replace(_random_table(seed), overlap=OVERLAPS[seed % len(OVERLAPS)])
    table = replace(table, reduces_per_micro_batch=seed % 3 > 0 or table.gathers_per_micro_batch)
    ranges, segments = Ranges.of(table, len(table.kinds)), Segments.of(table, None)
    bounds_s = {
        ("F", False): forward_pass_s(segments, ranges, gathers=table.gathers_per_micro_batch),
        ("B", False): backward_pass_s(table, segments, ranges),
    }
    reduced = {"compute_s": segments.backward_s, "reduce_s": segments.last_reduce_s}
    if not table.gathers_per_micro_batch:
        bounds_s["B", True] = reducing_pass_s(table, ranges, **reduced)
    least_left_s = left_s(table, ranges, **reduced)
    for place, (start, stop) in enumerate(zip(ranges.edges[ranges.start], ranges.edges[ranges.stop], strict=True)):
        choices = [(table.kinds[segment], segments.is_again[segment]) for segment in range(start, stop)]
        for (kind, is_edge), bound_s in bounds_s.items():
            work = pass_work(table, choices, kind, is_edge=is_edge, is_first=True)
            times = replay_pass(work, overlap=table.overlap)
            assert bound_s[place] <= times.elapsed_s + 1e-9
            assert not is_edge or least_left_s[place] <= times.left_s + 1e-9


def test_a_run_of_many_equal_pieces_has_as_many_kinds_of_ranges_as_lengths() -> None:
    table = layered(1000, layer_s=1.0).price(Mesh(pp=2, n_micro_batches=4))
    ranges = Ranges.of(table, 1000)
    # of each length: one at the beginning of the model, one inside, one at the end; of 999 no longer one inside
    assert len(ranges.start) <= 3 * ranges.width
    assert ranges.kind.shape == (1001, 999)


@pytest.mark.parametrize("name", ["llama", "gpt", "mlp"])
def test_what_crosses_a_boundary_was_made_before_it_and_is_read_after_it(name: str) -> None:
    graph = graph_of(name)
    invariant = invariant_values(graph)
    for number, found in enumerate(crossings(graph, invariant=invariant)):
        read = {value for segment in graph.segments[number:] for value in segment.inputs}
        made = {op.name for op in graph.ops[: graph.segments[number].start]}
        made |= {item.name for item in graph.inputs if item.path[0] != "targets"}
        assert found == tuple(sorted(read & made - invariant))


@pytest.mark.parametrize("place", range(3))
def test_no_stage_lies_anywhere_where_one_of_them_fits_nothing(place: int) -> None:
    table = _random_table(0)
    ranges = Ranges.of(table, len(table.kinds))
    quick_s, slow_s = np.ones(len(ranges.start)), np.full(len(ranges.start), 9.0)
    stages = [(quick_s, slow_s if index == place else quick_s) for index in range(3)]
    assert ranges.n_pieces >= len(stages) and bands_of(ranges, stages, 2.0) == []
    assert len(bands_of(ranges, stages, 9.0)) == len(stages)
