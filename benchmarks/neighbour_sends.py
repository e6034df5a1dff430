"""How long sends between neighbouring ranks of a pipeline take, by which go on at once and the groups they share.

    torchrun --standalone --nproc-per-node 4 benchmarks/neighbour_sends.py KIND RESULTS.jsonl    two ranks or more

KIND is what the rows call the transport. A row is one of three:

    pattern   seconds of a send of `kib` KiB, the slowest rank's, while pairs of neighbours send: the first one alone,
              every second one, all, and each with its way back; `lanes`: each pair has a process group for either
              direction, in place of one for all
    late_s    seconds from the call of a receive to its end, where the send was called so much before
    joined    MiB more that a process takes on its device outside of torch's allocator, by one more group of two ranks
"""

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))
from autoplan.runtime.mesh import few_send_blocks

SIZES_KIB = (256, 1024, 4096, 16384, 65536)
LATE_S = (0.0, 0.02)
CYCLES_PER_S = 2e9  # of `torch.cuda._sleep`, about
N_ROUNDS, ROUND_S, MOST_CALLS = 3, 0.15, 50

Way = tuple[int, int]
Groups = dict[Way, Any]


class Ranks:
    """This process among the ranks of a pipeline, and all ways between neighbours."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        self.rank = int(os.environ["LOCAL_RANK"])
        if self.cuda:
            torch.cuda.set_device(self.rank)
        dist.init_process_group("nccl" if self.cuda else "gloo")
        self.n = dist.get_world_size()
        self.device = torch.device("cuda", self.rank) if self.cuda else torch.device("cpu")
        self.forward = list(pairwise(range(self.n)))
        self.ways = list(chain.from_iterable(((one, other), (other, one)) for one, other in self.forward))

    def slowest(self, seconds: float) -> float:
        value = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value.item()

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def outside_mib(self) -> float:
        """What the process takes on its device outside of the allocator."""
        if not self.cuda:
            return 0.0
        self.synchronize()
        free, total = torch.cuda.mem_get_info()
        return (total - free - torch.cuda.memory_reserved()) / 2**20


def ops_of(ranks: Ranks, way: Way, tensors: dict[Way, torch.Tensor], group: Any) -> list[dist.P2POp]:
    """This rank's part of a send."""
    source, target = way
    if ranks.rank not in way:
        return []
    op, peer = (dist.isend, target) if ranks.rank == source else (dist.irecv, source)
    return [dist.P2POp(op, tensors[way], peer, group)]


def sends(ranks: Ranks, ways: list[Way], tensors: dict[Way, torch.Tensor], groups: Groups) -> Callable[[], None]:
    """All of them at once: in one call where they have one group, else in one per group."""
    ops = [op for way in ways for op in ops_of(ranks, way, tensors, groups.get(way))]
    calls = [[op] for op in ops] if groups else [ops] if ops else []

    def call() -> None:
        for work in [work for own in calls for work in dist.batch_isend_irecv(own)]:
            work.wait()

    return call


def seconds_of(ranks: Ranks, call: Callable[[], None], n_calls: int) -> float:
    """Of one call, the slowest rank's."""
    dist.barrier()
    ranks.synchronize()
    start_s = time.perf_counter()
    for _ in range(n_calls):
        call()
    ranks.synchronize()
    return ranks.slowest((time.perf_counter() - start_s) / n_calls)


def pattern_rows(ranks: Ranks, kib: int, groups: Groups) -> list[dict]:
    tensors = {way: torch.ones(kib * 256, device=ranks.device) for way in ranks.ways}
    back = {way: way[::-1] for way in ranks.forward}
    some = {"alone": ranks.forward[:1], "pairs": ranks.forward[::2], "chain": ranks.forward}
    patterns = some | {f"both_{name}": [*ways, *map(back.get, ways)] for name, ways in some.items()}
    rows = []
    for name, ways in patterns.items():
        for own in ({}, groups):
            call = sends(ranks, ways, tensors, own)
            seconds_of(ranks, call, 2)
            n_calls = max(2, min(MOST_CALLS, int(ROUND_S / seconds_of(ranks, call, 2))))
            found = [seconds_of(ranks, call, n_calls) for _ in range(N_ROUNDS)]
            rows.append({"kib": kib, "pattern": name, "lanes": bool(own), "seconds": found, "calls": n_calls})
    return rows


def late_row(ranks: Ranks, kib: int, late_s: float, groups: Groups) -> dict:
    """A receive of the second rank, whose send the first one called so much earlier."""
    way = ranks.forward[0]
    tensors = {way: torch.ones(kib * 256, device=ranks.device)}
    found = []
    for _ in range(1 + N_ROUNDS):
        dist.barrier()
        ranks.synchronize()
        if ranks.rank == way[1]:
            wait(ranks, late_s)
        own_s = elapsed_s(ranks, sends(ranks, [way], tensors, groups))
        found.append(ranks.slowest(own_s if ranks.rank == way[1] else 0.0))
    return {"kib": kib, "late_s": late_s, "seconds": found[1:]}


def wait(ranks: Ranks, seconds: float) -> None:
    """Of the device, where there is one."""
    if ranks.cuda:
        torch.cuda._sleep(int(seconds * CYCLES_PER_S))
    else:
        time.sleep(seconds)


def elapsed_s(ranks: Ranks, call: Callable[[], None]) -> float:
    """Of one call, by the device's clock where there is one."""
    if not ranks.cuda:
        start_s = time.perf_counter()
        call()
        return time.perf_counter() - start_s
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3


def joined_rows(ranks: Ranks) -> tuple[list[dict], Groups]:
    """A group per direction of each way, by few thread blocks and then by as many as NCCL takes."""
    tensors = {way: torch.ones(1 << 20, device=ranks.device) for way in ranks.ways}
    dist.barrier()
    rows, groups = [], {}
    for few in (True, False):
        for way in ranks.ways:
            before = ranks.outside_mib()
            group = dist.new_group(
                sorted(way), pg_options=few_send_blocks(ranks.device) if few and ranks.cuda else None
            )
            sends(ranks, [way], tensors, {way: group})()
            more = ranks.slowest(ranks.outside_mib() - before)
            rows.append({"joined": way, "few_blocks": few, "mib": more})
            groups[way] = group
    return rows, groups


def main() -> None:
    kind, results = sys.argv[1:]
    ranks = Ranks()

    def write(row: dict) -> None:
        if ranks.rank == 0:
            print(row, flush=True)
            with Path(results).open("a") as file:
                file.write(json.dumps({"kind": kind} | row) + "\n")

    rows, groups = joined_rows(ranks)
    for row in rows:
        write(row)
    for kib in SIZES_KIB if ranks.cuda else SIZES_KIB[:1]:
        for row in pattern_rows(ranks, kib, groups):
            write(row)
        for late_s in LATE_S:
            write(late_row(ranks, kib, late_s, groups))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
