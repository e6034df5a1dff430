"""How fast NCCL sends, and what a receive that waits costs the products beside it, by the most thread blocks of each.

    torchrun --standalone --nproc-per-node 2 benchmarks/sends.py > RESULTS.jsonl    needs two GPUs

A line per limit: GB/s of sends of 1 to 256 MiB from rank 0 to rank 1, and milliseconds of one product of 8192 x 8192 on
rank 1, alone and while a receive waits for its sender. `runtime.mesh.SEND_BLOCKS` is chosen from it.
"""

import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist

LIMITS = (None, 1, 2, 4, 8, 16)  # None is NCCL's own choice
SIZES_MIB = (1, 16, 64, 256)
N_SENDS, N_PRODUCTS, SIZE = 20, 40, 8192


def group_with(limit: int | None) -> Any:
    """A group of both ranks whose kernels have at most so many thread blocks."""
    options = dist.ProcessGroupNCCL.Options()
    if limit is not None:
        options.config.max_ctas = limit
        options.config.min_ctas = 1
    return dist.new_group([0, 1], pg_options=options)


def send_gb_per_s(group: Any, n_mib: int, rank: int) -> float:
    """Of sends one after the other."""
    tensor = torch.empty(n_mib << 20, dtype=torch.uint8, device="cuda")
    started = 0.0
    for index in range(-3, N_SENDS):
        if index == 0:
            torch.cuda.synchronize()
            dist.barrier()
            started = time.perf_counter()
        if rank == 0:
            dist.send(tensor, 1, group=group)
        else:
            dist.recv(tensor, 0, group=group)
    torch.cuda.synchronize()
    return N_SENDS * (n_mib << 20) / (time.perf_counter() - started) / 1e9


def product_ms(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> float:
    """Of products one after the other."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(N_PRODUCTS):
        torch.mm(left, right, out=out)
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / N_PRODUCTS


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    left = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    right, out, message = torch.randn_like(left), torch.empty_like(left), torch.empty(64 << 20, device="cuda")
    for limit in LIMITS:
        group = group_with(limit)
        row = {"max_ctas": limit}
        row |= {f"send_{n_mib}mib_gb_per_s": send_gb_per_s(group, n_mib, rank) for n_mib in SIZES_MIB}
        product_ms(left, right, out)
        row["product_ms"] = product_ms(left, right, out)
        dist.barrier()
        if rank == 1:
            waiting = dist.irecv(message, 0, group=group)
            row["product_beside_waiting_ms"] = product_ms(left, right, out)
            waiting.wait()
            print(json.dumps(row), flush=True)
        else:
            time.sleep(0.5)  # longer than all products take
            dist.send(message, 1, group=group)
        torch.cuda.synchronize()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
