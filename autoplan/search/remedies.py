"""What would make an infeasible request feasible: changes, the cheapest first, each verified by searching again.

    another value for one thing that was fixed (`FIXES` in order)
    ->  a batch near the one asked for, where that is not shared alike  ->  other values for all  ->  more hosts

A value costs nothing and a host does, so hosts come last; giving up everything that was fixed is tried where no single
thing is enough. Hosts are doubled until something fits, and the last step halved back to the fewest that do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autoplan.options import Options
from autoplan.search.fixed_values import value_of
from autoplan.search.result import Candidate, Remedy, SearchResult

# From the least to the most intrusive. The rest of what may be fixed changes what is trained.
FIXES = (
    "cuda_graph", "compile", "memory_format", "generated", "loss", "keep_attention", "recompute", "micro_batch", "zero",
    "shard", "schedule", "stages_per_rank", "pp", "tp", "dp",
)  # fmt: skip
MAX_HOSTS = 64
TIME_LIMIT_S = 10.0  # of all searches together
SEARCH_TIME_LIMIT_S = 2.0  # of each: any plan will do

Retry = Callable[[Options, int], SearchResult]  # searches under other options, on that many hosts


@dataclass(frozen=True, slots=True)
class _Tries:
    """Searches that share one time limit."""

    retry: Retry
    clock: Callable[[], float]
    deadline_s: float

    def best(self, options: Options, n_hosts: int) -> Candidate | None:
        """The best plan under these options; None when there is none, or no time is left to look for one.

        Raises: KeyboardInterrupt when the search was interrupted, whatever it had found.
        """
        remaining_s = self.deadline_s - self.clock()
        if remaining_s <= 0.0:
            return None
        result = self.retry(replace(options, time_limit_s=_least(remaining_s, options.time_limit_s)), n_hosts)
        if result.stopped_by == "interrupted":
            raise KeyboardInterrupt
        return result.best


def find_remedies(
    options: Options,
    *,
    n_hosts: int,
    retry: Retry,
    shared_batch: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Remedy]:
    """The changes that were verified, the cheapest first, each as soon as it is known.

    They end after `TIME_LIMIT_S`; what was not tried by then is left out. `shared_batch` is a batch near the one asked
    for that all devices share alike, where that one cannot be.
    """
    tries = _Tries(retry, clock, clock() + TIME_LIMIT_S)
    options = replace(options, top=0, require_optimal=False)
    fixed = tuple(name for name in FIXES if name in dict(options.fix))
    n_found = 0
    for name in fixed:
        best = tries.best(_without(options, (name,)), n_hosts)
        if best is not None:
            n_found += 1
            yield _other_value(options, name, best, n_hosts=n_hosts)
    if shared_batch is not None:
        best = tries.best(replace(options, global_batch=shared_batch), n_hosts)
        if best is not None:
            n_found += 1
            change = f"a global batch of {shared_batch} instead of {options.global_batch}"
            yield _remedy(change, best, fix=options.fix, n_hosts=n_hosts)
    freed = _without(options, fixed)
    if n_found == 0 and len(fixed) > 1:
        best = tries.best(freed, n_hosts)
        if best is not None:
            n_found += 1
            yield _remedy(f"without {_text(options, fixed)}", best, fix=freed.fix, n_hosts=n_hosts)
    yield from _more_hosts(tries, options if n_found else freed, asked=options, n_hosts=n_hosts)


def _more_hosts(tries: _Tries, options: Options, *, asked: Options, n_hosts: int) -> Iterator[Remedy]:
    """The fewest hosts found that are enough; with nothing fixed where no other value was enough on these hosts."""
    too_few, enough, best = n_hosts, 2 * n_hosts, None
    while enough <= MAX_HOSTS and best is None:
        best = tries.best(options, enough)
        too_few, enough = (too_few, enough) if best is not None else (enough, 2 * enough)
    if best is None:
        return
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        candidate = tries.best(options, middle)
        too_few, enough, best = (too_few, middle, candidate) if candidate else (middle, enough, best)
    given_up = tuple(name for name, _ in asked.fix if name not in dict(options.fix))
    change = f"{enough} hosts instead of {n_hosts}" + (f", without {_text(asked, given_up)}" if given_up else "")
    yield _remedy(change, best, fix=options.fix, n_hosts=enough)


def _other_value(options: Options, name: str, best: Candidate, *, n_hosts: int) -> Remedy:
    """The value that the best plan has of what it was free to choose.

    Recomputation of some blocks, when fixed, leaves the loss whole unless that is fixed too; see `space.choices`.
    """
    fixed = dict(options.fix)
    is_chunked = name == "recompute" and "loss" not in fixed and best.plan.loss == "chunked"
    names = (name, "loss") if is_chunked else (name,)
    found = replace(options, fix=tuple((other, value_of(other, best.plan) or fixed[other]) for other in names))
    change = f"{_text(found, names)} instead of {_text(options, (name,))}"
    return _remedy(change, best, fix=tuple((fixed | dict(found.fix)).items()), n_hosts=n_hosts)


def _remedy(change: str, best: Candidate, *, fix: tuple[tuple[str, str], ...], n_hosts: int) -> Remedy:
    estimate = best.estimate
    peak_bytes = max(estimate.needed_bytes)
    return Remedy(change, fix, n_hosts, best.plan.mesh, best.plan.recompute, estimate.step_s, peak_bytes)


def _text(options: Options, names: tuple[str, ...]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.fix if name in names)


def _without(options: Options, names: tuple[str, ...]) -> Options:
    return replace(options, fix=tuple((name, value) for name, value in options.fix if name not in names))


def _least(remaining_s: float, limit_s: float | None) -> float:
    return min(remaining_s, SEARCH_TIME_LIMIT_S, SEARCH_TIME_LIMIT_S if limit_s is None else limit_s)
