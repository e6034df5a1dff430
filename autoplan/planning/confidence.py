"""Plans whose memory suffices with the confidence asked for; where there are none, plans that fit as computed.

search with the confidence --a plan--> result
          | none fits so, or none was found in `PLANLESS_SHARE` of the time
          v
search with the whole device, in the time left --> result, which names the confidence that was not met

Where it seems hopeless (`search.outlook`), the whole device comes first: what does not fit on it does not fit with a
confidence either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autoplan.options import AS_COMPUTED, Options
from autoplan.search.result import SearchResult

PLANLESS_SHARE = 0.5  # of the time limit, after which a search that knows no plan gives way to the second one

SearchUnder = Callable[[Options, float], SearchResult]  # searches under other options, with a `planless_share`


def search_confidently(
    search: SearchUnder,
    options: Options,
    *,
    is_patient: bool = False,
    seems_hopeless: Callable[[], bool] = lambda: False,
) -> SearchResult:
    """The result of the first of the searches above that finds a plan; that of the whole device where none does.

    `is_patient`: the time limit of each counts from its first plan on (see `search.search`), so the second has it all.
    """
    if options.memory_confidence <= AS_COMPUTED:
        return search(options, 1.0)
    whole = replace(options, memory_confidence=AS_COMPUTED)
    found = search(whole, 1.0) if seems_hopeless() else None
    if found is not None and found.best is None:
        return found
    if found is not None and found.stopped_by == "interrupted":
        return _unmet(found, options, status="unknown")
    sure = search(options if found is None or is_patient else _later(options, found), PLANLESS_SHARE)
    searched_s = sure.search_s + (0.0 if found is None else found.search_s)
    if sure.best is not None or sure.n_meshes == 0 or sure.stopped_by == "interrupted":
        return replace(sure, search_s=searched_s)
    if found is None:
        found = search(whole if is_patient else _later(whole, sure), 1.0)
        searched_s += found.search_s
    found = replace(found, search_s=searched_s)
    return found if found.best is None else _unmet(found, options, status=sure.status)


def _later(options: Options, before: SearchResult) -> Options:
    """For a search in the time that another one has left."""
    limit_s = options.time_limit_s
    return options if limit_s is None else replace(options, time_limit_s=max(0.0, limit_s - before.search_s))


def _unmet(found: SearchResult, options: Options, *, status: str) -> SearchResult:
    """A result of the whole device, with the confidence that was asked for; see `SearchResult.unmet_status`."""
    return replace(found, unmet_confidence=options.memory_confidence, unmet_status=status)
