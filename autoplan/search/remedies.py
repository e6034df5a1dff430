"""What would make an infeasible request feasible: the smallest change, verified by searching again.

Changes are tried from the least to the most intrusive: give up one thing the user fixed (`FIXES` in order), then all of
them, then double the hosts until something fits and halve the step back to the fewest that do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autoplan.cost.table import CostTable
from autoplan.errors import InfeasibleError
from autoplan.options import Options
from autoplan.parallel_plan import Mesh
from autoplan.search.meshes import SearchSpace
from autoplan.search.result import Candidate

FIXES = ("recompute", "micro_batch", "zero", "shard", "schedule", "pp", "tp", "dp")
MAX_HOSTS = 64
RETRY_S = 5.0  # time limit of each search made to verify a change

Price = Callable[[Mesh], CostTable]
Retry = Callable[[SearchSpace, Price, Options], Candidate | None]
WithHosts = Callable[[int], tuple[SearchSpace, Price]]


def nearest_fix(
    space: SearchSpace, *, price: Price, options: Options, retry: Retry, with_hosts: WithHosts | None
) -> str:
    """One sentence with the smallest change that was verified; "" when none was found."""
    dropped = [name for name in FIXES if name in dict(options.fix)]
    for names in [*((name,) for name in dropped), *([tuple(dropped)] if len(dropped) > 1 else [])]:
        best = _try(retry, space, price, _without(options, names))
        if best is not None:
            given = ", ".join(f"{name}={value}" for name, value in options.fix if name in names)
            return f"without {given} it fits: {_described(best)}"
    if with_hosts is None:
        return ""
    return _more_hosts(space, options=_without(options, ()), retry=retry, with_hosts=with_hosts)


def _try(retry: Retry, space: SearchSpace, price: Price, options: Options) -> Candidate | None:
    try:
        return retry(space, price, options)
    except InfeasibleError:  # not one mesh divides devices and batch after this change
        return None


def _without(options: Options, names: tuple[str, ...]) -> Options:
    kept = tuple((name, value) for name, value in options.fix if name not in names)
    time_limit_s = RETRY_S if options.time_limit_s is None else min(RETRY_S, options.time_limit_s)
    return replace(options, fix=kept, top=0, time_limit_s=time_limit_s)


def _more_hosts(space: SearchSpace, *, options: Options, retry: Retry, with_hosts: WithHosts) -> str:
    def fits(n_hosts: int) -> Candidate | None:
        return _try(retry, *with_hosts(n_hosts), options)

    too_few = max(1, space.n_devices // space.n_devices_per_host)
    enough, best = 2 * too_few, None
    while enough <= MAX_HOSTS and best is None:
        best = fits(enough)
        too_few, enough = (too_few, enough) if best is not None else (enough, 2 * enough)
    if best is None:
        return ""
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        candidate = fits(middle)
        too_few, enough, best = (too_few, middle, candidate) if candidate else (middle, enough, best)
    return f"with {enough} hosts it fits: {_described(best)}"


def _described(candidate: Candidate) -> str:
    mesh, estimate = candidate.plan.mesh, candidate.estimate
    return (
        f"dp {mesh.dp}, tp {mesh.tp}, pp {mesh.pp}, ZeRO {mesh.zero_stage}, micro-batch {mesh.micro_batch_size}, "
        f"recompute {candidate.plan.recompute}, {estimate.step_s:.3g} s per step"
    )
