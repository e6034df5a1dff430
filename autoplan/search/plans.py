"""The plans of one mesh: where a model may be cut, what is alike in it, and every way to share it out.

The segments between two legal cuts form a *piece*; equal neighbouring pieces form a *run* (the layers of a transformer
are one run). Which pieces of a run a stage recomputes hardly matters, so a plan says how many: the first ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise, product

from autoplan.cost.table import CostTable
from autoplan.parallel_plan import Mesh, StagePlan

MAX_FREE_STAGES, MAX_FREE_PIECES = 4, 200  # several stages per rank may have any size up to these numbers


@dataclass(frozen=True, slots=True)
class Run:
    """`length` equal pieces, one after the other, each of the segments `piece` (their kinds).

    Attributes:
        start: its first segment.
        inner_cut_s: time of a transfer over each boundary between two of its pieces.
        end_cut_s: over the boundary after it; 0 after the last run.
    """

    start: int
    piece: tuple[int, ...]
    length: int
    inner_cut_s: float
    end_cut_s: float


def piece_edges(table: CostTable) -> tuple[int, ...]:
    """The first segment of each piece, and the number of segments."""
    return _piece_edges(table.cut_s)


@lru_cache(maxsize=64)
def _piece_edges(cut_s: tuple[float | None, ...]) -> tuple[int, ...]:
    return (0, *(index + 1 for index, own_s in enumerate(cut_s) if own_s is not None), len(cut_s) + 1)


def runs_of(table: CostTable) -> tuple[Run, ...]:
    """The segments of the table as runs of equal pieces."""
    pieces = [(start, table.kinds[start:stop]) for start, stop in pairwise(piece_edges(table))]
    runs: list[Run] = []
    for start, piece in pieces:
        end_s = _cut_s(table, start + len(piece))
        last = runs[-1] if runs else None
        if last is not None and last.piece == piece and _continues(last):
            runs[-1] = Run(last.start, piece, last.length + 1, last.end_cut_s, end_s)
        else:
            runs.append(Run(start, piece, 1, end_s, end_s))
    return tuple(runs)


def _continues(run: Run) -> bool:
    """Whether the boundary after the run may become one inside it: all of these cost the same."""
    return run.length == 1 or run.end_cut_s == run.inner_cut_s


def _cut_s(table: CostTable, segment: int) -> float:
    """Transfer time over the boundary before `segment`; 0 after the last one."""
    return 0.0 if segment >= len(table.kinds) else table.cut_s[segment - 1] or 0.0


def stage_sizes(mesh: Mesh, *, n_pieces: int) -> tuple[range, ...]:
    """How many pieces each stage may have.

    Any number with one stage per rank, or with few in all. Otherwise all stages are alike, to one piece; the first and
    the last may be smaller, because what they hold besides (embedding, head, loss) is not.
    """
    n_stages = mesh.n_stages
    if mesh.n_chunks == 1 or (n_stages <= MAX_FREE_STAGES and n_pieces <= MAX_FREE_PIECES):
        return (range(1, n_pieces - n_stages + 2),) * n_stages
    small = n_pieces // n_stages
    end, inner = range(1, small + 2), range(small, small + 2)
    return (end, *(inner,) * (n_stages - 2), end)


def repeated_segments(table: CostTable) -> tuple[int, ...]:
    """The segments that "full" recomputation covers: those whose kind occurs again; all when none does."""
    kinds = table.graph_kinds or table.kinds
    return tuple(segment for segment in _repeated(kinds) if table.has_choice(table.kinds[segment]))


@lru_cache(maxsize=16)
def _repeated(kinds: tuple[int, ...]) -> tuple[int, ...]:
    repeated = {kind for kind, number in Counter(kinds).items() if number > 1} or set(kinds)
    return tuple(segment for segment, kind in enumerate(kinds) if kind in repeated)


def obeys_recompute(table: CostTable, stages: tuple[StagePlan, ...], *, recompute: str | None) -> bool:
    """Whether a plan has the recomputation the user fixed, and none where there is no choice."""
    chosen = {segment for stage in stages for segment in stage.recomputed}
    if recompute == "none" or not all(table.has_choice(table.kinds[segment]) for segment in chosen):
        return not chosen
    if recompute == "full":
        return chosen >= set(repeated_segments(table))
    return recompute is None or bool(chosen)


def count_plans(runs: tuple[Run, ...], mesh: Mesh) -> int:
    """How many plans the mesh has, whatever is fixed."""
    n_pieces = sum(run.length for run in runs)
    ways = {0: 1}  # stop of the stages so far, in pieces -> plans
    for own in stage_sizes(mesh, n_pieces=n_pieces):
        following: dict[int, int] = {}
        for start, number in ways.items():
            for stop in range(start + own.start, min(n_pieces, start + own.stop - 1) + 1):
                choices = math.prod(count + 1 for count, run in _shares(runs, start, stop) for _ in run.piece)
                following[stop] = following.get(stop, 0) + number * choices
        ways = following
    return ways.get(n_pieces, 0)


def all_plans(runs: tuple[Run, ...], mesh: Mesh) -> Iterator[tuple[StagePlan, ...]]:
    """Every plan of the mesh; of each run in a stage the first segments are recomputed."""
    n_pieces = sum(run.length for run in runs)
    sizes = stage_sizes(mesh, n_pieces=n_pieces)
    for cuts in combinations(range(1, n_pieces), mesh.n_stages - 1):
        edges = (0, *cuts, n_pieces)
        if not all(stop - start in own for own, (start, stop) in zip(sizes, pairwise(edges), strict=True)):
            continue
        shares = [_shares(runs, start, stop) for start, stop in zip(edges, edges[1:], strict=False)]
        per_stage = [list(product(*(range(count + 1) for count, run in stage for _ in run.piece))) for stage in shares]
        for again in product(*per_stage):
            yield staged(shares, again)


def _shares(runs: tuple[Run, ...], start: int, stop: int) -> list[tuple[int, Run]]:
    """How many pieces of each run lie between two pieces; runs with none are left out."""
    shares, first = [], 0
    for run in runs:
        count = min(stop, first + run.length) - max(start, first)
        if count > 0:
            shares.append((count, run))
        first += run.length
    return shares


def staged(shares: list[list[tuple[int, Run]]], again: tuple[tuple[int, ...], ...]) -> tuple[StagePlan, ...]:
    """Stages from the pieces of each run they hold and how often each slot of these is recomputed."""
    stages: list[StagePlan] = []
    position = 0
    for stage, counts in zip(shares, again, strict=True):
        start, recomputed, numbers = position, [], iter(counts)
        for count, run in stage:
            for slot in range(len(run.piece)):
                recomputed += [position + slot + piece * len(run.piece) for piece in range(next(numbers))]
            position += count * len(run.piece)
        stages.append(StagePlan(start, position, tuple(sorted(recomputed))))
    return tuple(stages)
