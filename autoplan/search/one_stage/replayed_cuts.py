"""One stage per rank: every cut that may be fast enough, bounded by the whole step, replayed. The last arithmetic.

The path behind `partition` has one rank that is never idle, and passes every other stage once. Under 1F1B the longest
path may leave that rank after its last forward pass, go to the last stage and come back: it passes the stages behind
twice. The replay (`relaxed_step`) has all paths, and what reductions leave to the passes after them.
"""

from __future__ import annotations

import numpy as np

from autoplan.cost.table import CostTable
from autoplan.search.one_stage.partition import Cut, partitions_below
from autoplan.search.relaxed_step import RelaxedStep

MAX_REPLAYED_PASSES = 200_000  # cuts x stages x micro-batches that are replayed at once


def cuts_below(table: CostTable, *, recompute: str | None, limit_s: float) -> list[tuple[float, Cut]] | None:
    """Every way to cut the model that may take less than `limit_s`, with its bound in seconds, the least one first.

    `recompute` is what the user fixed, or None. None if there are too many to be replayed.
    """
    n_most = MAX_REPLAYED_PASSES // (table.mesh.pp * table.mesh.n_micro_batches)
    cuts = partitions_below(table, recompute=recompute, limit_s=limit_s, n_most=n_most)
    if not cuts:
        return cuts if cuts is None else []
    step = RelaxedStep.of_cuts(table, recompute=recompute)
    bounds_s = step.least_s(np.array([cut.sizes for cut in cuts]), np.array([cut.again for cut in cuts]))
    order = np.argsort(bounds_s, kind="stable").tolist()
    return [(float(bounds_s[place]), cuts[place]) for place in order if bounds_s[place] < limit_s]
