"""How much longer kernels take while NCCL's run beside them, from traces of a program.

    python benchmarks/kernels_beside.py rank0.json.gz [rank1.json.gz ...]

The traces are those of `train.py --profile-steps A:B --profile-dir`, of GPUs. A kernel is known by its name and grid
and those of the five in front of it and the five behind. Alone it takes the median of its runs without a kernel of NCCL
at their start or end; one with less than three of them is left out. Products are the kernels of cuBLAS. Milliseconds
are of all steps of a trace.
"""

import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any

from compare_trace import complete, is_communication, load

PRODUCTS = ("nvjet", "gemm", "cutlass_")
N_SHOWN, N_AROUND, LEAST_ALONE = 8, 5, 3
MS_PER_US = 1e-3


@dataclass
class Kernel:
    """All runs of one kernel, in microseconds.

    Attributes:
        beside_us: by how many of NCCL's kernels ran beside; 0 are those alone.
    """

    name: str
    grid: str
    beside_us: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def is_product(self) -> bool:
        return any(part in self.name for part in PRODUCTS) and "fmha" not in self.name

    @property
    def alone_us(self) -> float:
        return median(self.beside_us[0])

    def slowed(self) -> tuple[float, float]:
        """(of all runs beside some: what they took, what as many take alone)."""
        runs_us = [us for n, own in self.beside_us.items() if n > 0 for us in own]
        return sum(runs_us), len(runs_us) * self.alone_us


def kernels(trace: dict[str, Any]) -> list[Kernel]:
    """Those with enough runs alone, the longest in all first."""
    events = [event for event in complete(trace) if event.get("cat") == "kernel"]
    n_beside = counter([event for event in events if is_communication(event)])
    computing = sorted((e for e in events if not is_communication(e)), key=lambda event: event["ts"])
    names = [(event["name"], "x".join(map(str, event["args"]["grid"]))) for event in computing]
    found: dict[tuple[tuple[str, str], ...], Kernel] = {}
    for place, event in enumerate(computing):
        around = tuple(names[max(0, place - N_AROUND) : place + N_AROUND + 1])
        n = max(n_beside(event["ts"]), n_beside(event["ts"] + event["dur"]))
        found.setdefault(around, Kernel(*names[place])).beside_us[n].append(event["dur"])
    enough = [kernel for kernel in found.values() if len(kernel.beside_us[0]) >= LEAST_ALONE]
    return sorted(enough, key=lambda kernel: -sum(map(sum, kernel.beside_us.values())))


def counter(communication: Sequence[dict[str, Any]]) -> Callable[[float], int]:
    """The function from a moment to how many of these run then."""
    changes = sorted([(e["ts"], 1) for e in communication] + [(e["ts"] + e["dur"], -1) for e in communication])
    moments, running = [us for us, _ in changes], [0, *accumulate(change for _, change in changes)]
    return lambda us: running[bisect_right(moments, us)]


def lines(found: Sequence[Kernel]) -> Iterator[str]:
    took_us = sum(us for kernel in found for own in kernel.beside_us.values() for us in own)
    alone_us = took_us - sum(beside_us - same_us for beside_us, same_us in map(Kernel.slowed, found))
    yield f"all kernels {took_us * MS_PER_US:.1f} ms, alone {alone_us * MS_PER_US:.1f} ({took_us / alone_us - 1:+.1%})"
    for name, is_product in (("products", True), ("others", False)):
        sums = [kernel.slowed() for kernel in found if kernel.is_product == is_product]
        beside_us, same_us = sum(beside_us for beside_us, _ in sums), sum(same_us for _, same_us in sums)
        if same_us:
            ms = (us * MS_PER_US for us in (beside_us, same_us))
            yield "  {} beside NCCL's {:.1f} ms, alone {:.1f} ({:+.1%})".format(name, *ms, beside_us / same_us - 1)
    for kernel in found[:N_SHOWN]:
        means = ", ".join(f"{n}: {fmean(us):.1f} ({len(us)})" for n, us in sorted(kernel.beside_us.items()) if us)
        yield f"    {kernel.name[:56]:56s} {kernel.grid:12s} us by kernels beside {means}"


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        print(f"{path.parent.name}/{path.name}", *lines(kernels(load(path))), sep="\n")


if __name__ == "__main__":
    main()
