"""One stage per rank by banded dynamic programming: the shortest path, looked for only where each stage may lie.

A stage is a range of pieces with two times, A and G of `partition`. How many pieces it may have in a step that is fast
enough is known beforehand (`most_pieces`), and so where each stage may begin and end: a band of the table (start, stop)
of all ranges (`bands_of`). The path with the least sum of A under G <= x is `least_sum`; the best x is found by halving
(`best_threshold`).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from autoplan.search.ranges import Array, Ranges
from autoplan.solver.linear_model import INFINITY

MAX_HALVINGS = 24
CLOSE_ENOUGH = 2e-4  # share of the bound; thresholds are not halved below it

Times = tuple[Array, Array]  # A and G of each range as one stage; INFINITY where it does not fit


def most_pieces(ranges: Ranges, stages: list[Times], most_s: float) -> Array:
    """Per stage, the most pieces of any range with G up to `most_s`; 0 where there is none."""
    most = []
    for _, bottleneck_s in stages:
        least_s = ranges.least_of_count(bottleneck_s)
        counts = np.flatnonzero((least_s <= most_s) & np.isfinite(least_s))
        most.append(int(counts[-1]) + 1 if len(counts) else 0)
    return np.array(most)


@dataclass(frozen=True, slots=True)
class Band:
    """Where a stage may lie: arrays (stop, count) of its starts, A and G; the last two INFINITY where it may not."""

    stops: Array
    counts: Array
    starts: Array
    sum_s: Array
    bottleneck_s: Array


def bands_of(ranges: Ranges, stages: list[Times], most_s: float) -> list[Band]:
    """The bands of all stages, with G up to `most_s`; none if they cannot make up the model."""
    n_pieces, most = ranges.n_pieces, most_pieces(ranges, stages, most_s)
    latest = np.minimum(np.cumsum(most), n_pieces - np.arange(len(stages))[::-1])
    earliest = np.maximum(n_pieces - most.sum() + np.cumsum(most), np.arange(1, len(stages) + 1))
    if (most == 0).any() or (latest < earliest).any() or latest[-1] < n_pieces:
        return []
    bands = []
    for place, (sums_s, bottlenecks_s) in enumerate(stages):
        first, last = (int(earliest[place - 1]), int(latest[place - 1])) if place > 0 else (0, 0)
        stops = np.arange(earliest[place], latest[place] + 1)
        counts = np.arange(max(1, stops[0] - last), min(most[place], stops[-1] - first) + 1)
        starts = stops[:, None] - counts
        spans = ranges.kind[stops[0] : stops[-1] + 1, counts[0] - 1 : counts[-1]]
        bottleneck_s = bottlenecks_s[spans]
        lies = (starts >= first) & (starts <= last) & (bottleneck_s <= most_s)
        bands.append(
            Band(
                stops,
                counts,
                np.clip(starts, first, last),
                np.where(lies, sums_s[spans], INFINITY),
                np.where(lies, bottleneck_s, INFINITY),
            )
        )
    return bands


def least_bottleneck_s(bands: list[Band]) -> float:
    """The least possible max of G over the stages; INFINITY when no partition fits."""
    worst, first = np.zeros(1), 0
    for band in bands:
        worst = np.maximum(worst[band.starts - first], band.bottleneck_s).min(axis=1)
        first = band.stops[0]
    return float(worst[-1])


def least_sum(bands: list[Band], threshold_s: float) -> tuple[float, list[int]]:
    """D(x): the least sum of A under G <= x, and where its stages stop; INFINITY when there is none."""
    least, first = np.zeros(1), 0
    chosen = []
    for band in bands:
        sums = least[band.starts - first] + np.where(band.bottleneck_s <= threshold_s, band.sum_s, INFINITY)
        places = sums.argmin(axis=1)
        chosen.append(places)
        least, first = sums[np.arange(len(places)), places], band.stops[0]
    if least[-1] == INFINITY:
        return INFINITY, []
    stops = [int(bands[-1].stops[-1])]
    for band, places in zip(reversed(bands[1:]), reversed(chosen[1:]), strict=True):
        stops.append(stops[-1] - int(band.counts[places[stops[-1] - band.stops[0]]]))
    return float(least[-1]), stops[::-1]


def least_rests(n_pieces: int, bands: list[Band]) -> tuple[list[Array], list[Array]]:
    """Per stage, and at the end: the least sum of A from it on, and the least max of G, by the piece it starts with."""
    at_end = np.append(np.full(n_pieces, INFINITY), 0.0)
    sums, worst = [at_end], [at_end]
    for band in reversed(bands):
        sum_s = band.sum_s + sums[-1][band.stops, None]
        worst_s = np.maximum(band.bottleneck_s, worst[-1][band.stops, None])
        for rests, values in ((sums, sum_s), (worst, worst_s)):
            least = np.full(n_pieces + 1, INFINITY)
            np.minimum.at(least, band.starts, values)
            rests.append(least)
    return sums[::-1], worst[::-1]


def best_threshold(bands: list[Band], lowest_s: float, *, floor_s: float) -> tuple[float, list[int]]:
    """The least D(x) + x from below, and the stops of the best threshold tried; `floor_s` is D(INFINITY)."""
    least_s, stops = least_sum(bands, lowest_s)
    best_s = least_s + lowest_s
    waiting = [(floor_s + lowest_s, lowest_s, lowest_s + least_s - floor_s, floor_s)]  # bound, from, to, D(to)
    for _ in range(MAX_HALVINGS):
        bound_s, low_s, high_s, least_high_s = waiting[0]
        if bound_s >= best_s * (1.0 - CLOSE_ENOUGH):
            break
        middle_s = (low_s + high_s) / 2.0
        least_s, found = least_sum(bands, middle_s)
        if least_s + middle_s < best_s:
            best_s, stops = least_s + middle_s, found
        heapq.heapreplace(waiting, (low_s + least_s, low_s, middle_s, least_s))
        heapq.heappush(waiting, (middle_s + least_high_s, middle_s, high_s, least_high_s))
    return min(best_s, waiting[0][0]), stops
