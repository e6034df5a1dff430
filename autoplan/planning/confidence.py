"""Plans whose memory suffices with the confidence asked for; where there are none, plans that fit as computed.

search with the confidence --a plan--> result
          | none fits so, or none was found in `PLANLESS_SHARE` of the time
          v
search with the whole device, in the time left --> result, which names the confidence that was not met
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autoplan.options import AS_COMPUTED, Options
from autoplan.search.result import SearchResult

PLANLESS_SHARE = 0.5  # of the time limit, after which a search that knows no plan gives way to the second one

SearchUnder = Callable[[Options, float], SearchResult]  # searches under other options, with a `planless_share`


def search_confidently(search: SearchUnder, options: Options, *, is_patient: bool = False) -> SearchResult:
    """The result of the first of the searches above that finds a plan; that of the whole device where none does.

    `is_patient`: the time limit of each counts from its first plan on (see `search.search`), so the second has it all.
    """
    if options.memory_confidence <= AS_COMPUTED:
        return search(options, 1.0)
    sure = search(options, PLANLESS_SHARE)
    if sure.best is not None or sure.n_meshes == 0 or sure.stopped_by == "interrupted":
        return sure
    left_s = options.time_limit_s
    if left_s is not None and not is_patient:
        left_s = max(0.0, left_s - sure.search_s)
    found = search(replace(options, memory_confidence=AS_COMPUTED, time_limit_s=left_s), 1.0)
    if found.best is None:
        return replace(found, search_s=sure.search_s + found.search_s)
    return replace(
        found,
        search_s=sure.search_s + found.search_s,
        unmet_confidence=options.memory_confidence,
        unmet_status=sure.status,
    )
