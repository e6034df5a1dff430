"""What a process takes on its device outside of torch's allocator: the context, kernels, and every communicator.

    torchrun --nproc-per-node N benchmarks/communicator_memory.py RESULTS.jsonl

Does one thing after the other and writes a row after each: `outside_bytes` is device memory in use less what the
allocator reserves, of the rank with the most, `added_bytes` what this thing added, of the rank to which it added most;
the first is the context with all that was there before. Nothing else may run on the devices. The constants of
`autoplan/cost/outside_allocator.py` come from here. On CPU, with gloo, it is the resident memory of the process, which
serves to try the program out. Needs torch only.
"""

import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

N_MESSAGE_ELEMENTS = {"cuda": 2**25, "cpu": 2**16}  # 64 MiB in bf16, a common bucket
WIDTH = {"cuda": 4096, "cpu": 64}
N_MORE_GROUPS = 3
Thing = tuple[str, Callable[[], object]]


class Rank:
    """A process, its device, and the tensors that it talks about."""

    def __init__(self) -> None:
        is_cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if is_cuda else "cpu", int(os.environ["LOCAL_RANK"]) if is_cuda else 0)
        if is_cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if is_cuda else "gloo")
        self.rank, self.n_ranks = dist.get_rank(), dist.get_world_size()
        self.host_group = dist.new_group(backend="gloo")  # to compare figures without a communicator of the devices

    def outside_bytes(self) -> int:
        """Device memory that is in use and not the allocator's; on CPU the most that was resident so far."""
        if self.device.type == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)

    def largest(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """The largest of all ranks, of each."""
        found = torch.tensor(values)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.host_group)
        return tuple(found.tolist())

    def message(self) -> torch.Tensor:
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        n_each = N_MESSAGE_ELEMENTS[self.device.type] // self.n_ranks
        return torch.ones(n_each * self.n_ranks, dtype=dtype, device=self.device)


def things(rank: Rank) -> Iterator[Thing]:
    """What is done, in order. Groups are made when reached, and talk for the first time in their own row."""
    world = dist.group.WORLD
    yield "context", lambda: torch.ones(1, device=rank.device)
    yield "kernels of a product, forward and backward", lambda: multiply(rank)
    yield "all ranks: all-reduce", lambda: dist.all_reduce(rank.message(), group=world)
    yield "all ranks: reduce-scatter and all-gather", lambda: scatter_and_gather(rank, world)
    if rank.n_ranks > 1:
        yield "all ranks: transfers to both neighbours", lambda: send_around(rank, world)
    for number in range(1, N_MORE_GROUPS + 1):
        group = dist.new_group()
        yield (
            f"group {number} of all ranks: all-reduce",
            lambda group=group: dist.all_reduce(rank.message(), group=group),
        )
    if rank.n_ranks > 1:
        sending = dist.new_group()
        yield "group of all ranks: transfers to both neighbours", lambda: send_around(rank, sending)
    for size in (size for size in (2, 4) if size < rank.n_ranks and rank.n_ranks % size == 0):
        own = groups_of(size, rank)
        yield f"groups of {size}: all-reduce", lambda own=own: dist.all_reduce(rank.message(), group=own)


def groups_of(size: int, rank: Rank) -> dist.ProcessGroup:
    """This rank's group, of neighbours."""
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, rank.n_ranks, size)]
    return groups[rank.rank // size]


def multiply(rank: Rank) -> None:
    width = WIDTH[rank.device.type]
    weight = torch.ones(width, width, dtype=rank.message().dtype, device=rank.device, requires_grad=True)
    (weight @ weight).softmax(-1).sum().backward()


def scatter_and_gather(rank: Rank, group: dist.ProcessGroup) -> None:
    whole = list(rank.message().chunk(rank.n_ranks))
    part = torch.empty_like(whole[rank.rank])
    if rank.device.type == "cuda":  # gloo has none
        dist.reduce_scatter(part, whole, group=group)
    dist.all_gather(whole, part, group=group)


def send_around(rank: Rank, group: dist.ProcessGroup) -> None:
    """As a pipeline does: activations to the next rank, gradients to the one before."""
    sent, received = rank.message(), rank.message()
    for step in (1, -1):
        to, source = (rank.rank + step) % rank.n_ranks, (rank.rank - step) % rank.n_ranks
        pair = [dist.P2POp(dist.isend, sent, to, group), dist.P2POp(dist.irecv, received, source, group)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()


def rows(rank: Rank) -> Iterator[dict]:
    name = torch.cuda.get_device_name(rank.device) if rank.device.type == "cuda" else "CPU"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if rank.device.type == "cuda" else ""
    common = {"device": name, "torch": torch.__version__, "nccl": nccl, "n_ranks": rank.n_ranks}
    before = 0
    for what, do in things(rank):
        do()
        after = rank.outside_bytes()
        most, added = rank.largest((after, after - before))
        yield common | {"what": what, "outside_bytes": most, "added_bytes": added}
        before = after


def main(results: Path) -> None:
    rank = Rank()
    with results.open("w") if rank.rank == 0 else nullcontext() as file:
        for row in rows(rank):
            if file is not None:
                file.write(json.dumps(row) + "\n")
                file.flush()
                sizes = f"{row['added_bytes'] / 2**20:+10.1f} MiB{row['outside_bytes'] / 2**20:10.1f} MiB"
                print(f"{row['what']:50}{sizes}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
