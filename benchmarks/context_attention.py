"""Causal attention split along its rows over some devices: as fast as the cost model says, and as exact as the whole?

    torchrun --standalone --nproc-per-node 2 benchmarks/context_attention.py --device cuda [--rows 8192 ...] > row.jsonl

A line: seconds forward and backward of the whole attention on one device, of the slowest rank's rows, and of those
without their exchange; the share of the latter in the whole, which is 1 / ranks in the cost model; the largest
differences of the result and the gradients of query, key and value from the whole attention in float32 on the same
numbers, and those of the whole attention in this precision. Run on a CPU to see that it works; not yet on GPUs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F

from autoplan.runtime.tensor_parallel import attention

Tensors = tuple[torch.Tensor, ...]
N_WARM, N_ROUNDS = 3, 10


class NoExchange:
    """Stands in for torch.distributed: what leaves stands for what arrives."""

    def all_to_all_single(self, arriving: torch.Tensor, leaving: torch.Tensor, **_: object) -> None:
        arriving.copy_(leaving)


def both_ways(function: Callable[..., torch.Tensor], operands: Tensors, gradient: torch.Tensor) -> Tensors:
    """The result, and the gradients of query, key and value."""
    leaves = [operand.detach().requires_grad_() for operand in operands]
    result = function(*leaves)
    return (result.detach(), *torch.autograd.grad(result, leaves, gradient))


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """The median of some calls; ranks begin each together."""

    def now_s() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    times = []
    for _ in range(N_WARM + N_ROUNDS):
        dist.barrier()
        start_s = now_s()
        call()
        times.append(now_s() - start_s)
    return statistics.median(times[N_WARM:])


def largest(value: float, device: torch.device) -> float:
    """Over all ranks."""
    found = torch.tensor(value, device=device, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def measured(given: argparse.Namespace, device: torch.device) -> dict[str, object]:
    rank, n_ranks, tp = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    dtype, is_grouped = getattr(torch, given.precision), given.heads != given.key_heads
    torch.manual_seed(0)
    n_heads = (given.heads, given.key_heads, given.key_heads, given.heads)
    q, k, v, g = (torch.randn(given.batch, n, given.rows, given.size).to(device, dtype) for n in n_heads)
    own, own_g = q.chunk(n_ranks, 2)[rank].contiguous(), g.chunk(n_ranks, 2)[rank].contiguous()
    whole = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=is_grouped)
    rows = partial(attention.causal_attention_of_rows, tp=tp, enable_gqa=is_grouped)
    exact = both_ways(whole, tuple(x.float() for x in (q, k, v)), g.float())
    result, q_gradient, *shares = both_ways(rows, (own, k, v), own_g)
    sums = [share.float() for share in shares]
    for share in sums:
        dist.all_reduce(share)
    expected = (*(x.chunk(n_ranks, 2)[rank] for x in exact[:2]), *exact[2:])
    pairs = zip((result, q_gradient, *sums), expected, strict=True)
    plain = zip(both_ways(whole, (q, k, v), g), exact, strict=True)
    rows_s = seconds(lambda: both_ways(rows, (own, k, v), own_g), device)
    whole_s = seconds(lambda: both_ways(whole, (q, k, v), g), device)
    attention.dist = NoExchange()  # type: ignore[assignment]
    alone_s = seconds(lambda: both_ways(rows, (own, k, v), own_g), device)
    return {
        **vars(given),
        "n_ranks": n_ranks,
        "whole_s": whole_s,
        "rows_s": largest(rows_s, device),
        "without_exchange_s": largest(alone_s, device),
        "share": largest(alone_s, device) / whole_s,
        "differences": [largest(float((a.float() - b).abs().max()), device) for a, b in pairs],
        "differences_of_whole": [float((a.float() - b).abs().max()) for a, b in plain],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", default="bfloat16")
    for name, default in (("rows", 8192), ("heads", 16), ("key-heads", 16), ("size", 128), ("batch", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    device = torch.device(given.device, dist.get_rank() if given.device == "cuda" else None)
    if given.device == "cuda":
        torch.cuda.set_device(device)
    row = measured(given, device)
    if dist.get_rank() == 0:
        print(json.dumps(row))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
