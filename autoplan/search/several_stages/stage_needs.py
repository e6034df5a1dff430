"""Several stages per rank: the least that a stage of each size needs, wherever it begins.

How many pieces a stage may have is known (`plans.stage_sizes`), so it is known within a few pieces where it begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from autoplan.cost.table import CostTable
from autoplan.schedules import splits_backward
from autoplan.search.paths.rank_paths import SYMBOLS
from autoplan.search.paths.schedule_paths import (
    BACKWARD,
    CARRY,
    CUT,
    FIRST_FORWARD,
    FORWARD,
    INPUTS,
    LAST_BACKWARD,
    LAST_CARRY,
    LAST_WEIGHTS,
    WEIGHTS,
)
from autoplan.search.plans import piece_edges, stage_sizes
from autoplan.search.ranges import (
    Array,
    Ranges,
    Segments,
    backward_pass_s,
    carries,
    first_forward_s,
    forward_pass_s,
    left_s,
    reducing_pass_s,
)

NOT_AN_ACTION = (CARRY, LAST_CARRY, CUT)  # of the symbols of a path


@dataclass(frozen=True, slots=True)
class Needs:
    """The least that a stage needs, wherever it begins: each (stage, pieces); 0.0 for sizes that are not `possible`.

    Attributes:
        passes_s: (symbol, stage, pieces), in the order of `rank_paths.SYMBOLS`.
        plain_s: likewise, without what reductions add.
        reduce_s: all reductions of one micro-batch; replicas_s: by how much those of the last one take longer.
        left_s: what a backward pass leaves to be reduced, first_reduce_s: of that, what its last segment does. Likewise
            last_left_s and last_reduce_s: of the last pass of the step.
        alone_bytes: by the last segment while it runs; ending_bytes: by it or the one before, the larger of both, in a
            pass that makes gradients.
        late_bytes: at the end of a forward pass after such a one.
        n_spared: segments that spare memory when they are recomputed, and easy_bytes (see `Segments`), at the most.
    """

    possible: Array
    passes_s: Array
    plain_s: Array
    reduce_s: Array
    replicas_s: Array
    forward_s: Array
    left_s: Array
    first_reduce_s: Array
    last_left_s: Array
    last_reduce_s: Array
    optimizer_s: Array
    resident_bytes: Array
    gradient_bytes: Array
    saved_bytes: Array
    pending_bytes: Array
    alone_bytes: Array
    ending_bytes: Array
    late_bytes: Array
    n_spared: Array
    easy_bytes: Array

    @classmethod
    def of(cls, table: CostTable, segments: Segments) -> Needs:
        """What the stages of the mesh need."""
        n_pieces = len(piece_edges(table)) - 1
        sizes = stage_sizes(table.mesh, n_pieces=n_pieces)
        ranges = Ranges.of(table, max(own[-1] for own in sizes))
        owners, counts, _, _ = places_of(n_pieces, sizes)
        possible = np.zeros((table.mesh.n_stages, ranges.width + 1), dtype=bool)
        possible[owners, counts] = True
        passes, opening, plain, fields = _least(
            ranges,
            sizes,
            _passes_s(table, segments, ranges),
            {FIRST_FORWARD: first_forward_s(table, segments, ranges, is_first=True)},
            _plain_s(segments, ranges),
            _fields(table, segments, ranges),
        )
        passes_s = np.zeros((len(SYMBOLS), *possible.shape))
        _put(passes_s, passes, action_s=table.action_s)
        _put(passes_s[:, 0], {symbol: values[0] for symbol, values in opening.items()}, action_s=table.action_s)
        plain_s = passes_s.copy()
        _put(plain_s, plain, action_s=table.action_s)
        if splits_backward(table.mesh.schedule):  # the first stage does all in the pass for weights
            for found in (passes_s, plain_s):
                whole_s = plain_s[SYMBOLS.index(BACKWARD), 0]
                found[SYMBOLS.index(WEIGHTS), 0] = found[SYMBOLS.index(LAST_WEIGHTS), 0] = whole_s
                found[SYMBOLS.index(INPUTS), 0] = 0.0
            fields["left_s"][0], fields["last_left_s"][0] = fields["first_reduce_s"][0], fields["last_reduce_s"][0]
        if table.gathers_per_micro_batch:
            fields |= {"left_s": fields["first_reduce_s"], "last_left_s": fields["last_reduce_s"]}
        if not table.reduces_per_micro_batch:
            fields["left_s"] = np.zeros(fields["left_s"].shape)
        n_spared, easy_bytes = ranges.total(1.0 * (segments.spared_bytes > 0.0)), ranges.total(segments.easy_bytes)
        return cls(
            possible=possible,
            passes_s=passes_s,
            plain_s=plain_s,
            n_spared=per_stage(ranges, sizes, n_spared, largest=True),
            easy_bytes=per_stage(ranges, sizes, easy_bytes, largest=True),
            **fields,
        )


def _least(ranges: Ranges, sizes: tuple[range, ...], *groups: dict[str, Array]) -> list[dict[str, Array]]:
    """`per_stage` of each value, all at once."""
    together = [np.broadcast_to(values, ranges.start.shape) for group in groups for values in group.values()]
    found = iter(per_stage(ranges, sizes, np.stack(together)))
    return [{name: next(found) for name in group} for group in groups]


def _put(times_s: Array, passes: dict[str, Array], *, action_s: float) -> None:
    """Write the times of these passes into (symbol, ...)."""
    for symbol, values in passes.items():
        times_s[SYMBOLS.index(symbol)] = values + (0.0 if symbol in NOT_AN_ACTION else action_s)


def _fields(table: CostTable, segments: Segments, ranges: Ranges) -> dict[str, Array]:
    """Fields of `Needs` for each range as a stage."""
    splits = splits_backward(table.mesh.schedule)
    totals = (
        "reduce_s",
        "forward_s",
        "optimizer_s",
        "resident_bytes",
        "gradient_bytes",
        "saved_bytes",
        "pending_bytes",
    )
    found = {name: ranges.total(getattr(segments, name)) for name in totals}
    compute_s = segments.weights_s if splits else segments.backward_s
    return found | {
        "left_s": left_s(table, ranges, compute_s=compute_s, reduce_s=segments.reduce_s),
        "replicas_s": ranges.total(segments.last_reduce_s - segments.reduce_s),
        "first_reduce_s": ranges.first(segments.reduce_s),
        "last_left_s": left_s(table, ranges, compute_s=compute_s, reduce_s=segments.last_reduce_s),
        "last_reduce_s": ranges.first(segments.last_reduce_s),
        "alone_bytes": ranges.last(segments.least_alone_bytes),
        "late_bytes": ranges.total(segments.late_bytes),
        "ending_bytes": ranges.ending(segments.ending_bytes, alone=segments.least_alone_bytes),
    }


def per_stage(ranges: Ranges, sizes: tuple[range, ...], values: Array, *, largest: bool = False) -> Array:
    """(.., stage, pieces): the least value of a range, or the largest, over the places where the stage may begin.

    `values` are (.., range), see `ranges`.
    """
    owners, counts, stops, offsets = places_of(ranges.n_pieces, sizes)
    columns = np.repeat(counts, np.diff(offsets, append=len(stops))) - 1
    choose = np.maximum if largest else np.minimum
    found = np.zeros((*values.shape[:-1], len(sizes), ranges.width + 1))
    places = values[..., ranges.kind[stops, columns]]
    found[..., owners, counts] = choose.reduceat(places, offsets, axis=-1)
    return found


def _passes_s(table: CostTable, segments: Segments, ranges: Ranges) -> dict[str, Array]:
    """Per symbol of a path, its time for each range as a stage (of the first one: at the least)."""
    is_carried = carries(table, segments)
    cut_s = np.full(ranges.start.shape, min((s for s in table.cut_s if s is not None), default=0.0))
    found = {
        FIRST_FORWARD: first_forward_s(table, segments, ranges, is_first=False),
        FORWARD: forward_pass_s(segments, ranges, gathers=table.gathers_per_micro_batch),
        CARRY: ranges.first(segments.reduce_s) * is_carried,
        LAST_CARRY: ranges.first(segments.last_reduce_s) * is_carried,
        CUT: cut_s,
    }
    if not splits_backward(table.mesh.schedule):
        backward = backward_pass_s(table, segments, ranges)
        last = backward
        if not table.gathers_per_micro_batch:
            last = reducing_pass_s(table, ranges, compute_s=segments.backward_s, reduce_s=segments.last_reduce_s)
        return found | {BACKWARD: backward, LAST_BACKWARD: last}
    reducing = partial(reducing_pass_s, table, ranges, compute_s=segments.weights_s)
    last = reducing(reduce_s=segments.last_reduce_s)
    every = table.reduces_per_micro_batch
    weights = reducing(reduce_s=segments.reduce_s) if every else ranges.total(segments.weights_s)
    return found | {INPUTS: ranges.total(segments.inputs_s), WEIGHTS: weights, LAST_WEIGHTS: last}


def _plain_s(segments: Segments, ranges: Ranges) -> dict[str, Array]:
    """The passes that reduce, by their compute alone."""
    backward, weights = ranges.total(segments.backward_s), ranges.total(segments.weights_s)
    nothing = np.zeros(backward.shape)
    plain = {BACKWARD: backward, LAST_BACKWARD: backward, WEIGHTS: weights, LAST_WEIGHTS: weights}
    return plain | {CARRY: nothing, LAST_CARRY: nothing}


@lru_cache(maxsize=256)
def places_of(n_pieces: int, sizes: tuple[range, ...]) -> tuple[Array, Array, Array, Array]:
    """Where each stage may lie with each size: (stage, size) of each pair, all its stops, and where they begin."""
    owners: list[int] = []
    counts: list[int] = []
    stops: list[int] = []
    offsets: list[int] = []
    for stage, own in enumerate(sizes):
        before, after = sizes[:stage], sizes[stage + 1 :]
        for count in own:
            left = n_pieces - count
            fewest = max(sum(s[0] for s in before), left - sum(s[-1] for s in after))
            most = min(sum(s[-1] for s in before), left - sum(s[0] for s in after))
            if fewest <= most:
                owners.append(stage)
                counts.append(count)
                offsets.append(len(stops))
                stops += range(fewest + count, most + count + 1)
    return np.array(owners), np.array(counts), np.array(stops), np.array(offsets)
