"""Causal attention split along its rows, one rank after the other on one device: as fast and exact as expected?

    python benchmarks/context_attention.py --device cuda --ranks 2,4,8 [--rows 8192 --heads 16] > rows.jsonl

A line has, of one rank: forward and backward time, its ratio to that of the whole attention, the ratio that the cost
model has (rank r of n: (2 r + 1) / n^2; the last one counts), and the largest difference of results and gradients from
the whole attention, in float32 on the same numbers; `rounding` is that of the whole attention in the given precision.
Run on 2 CPU cores to see that it works; not yet run on a GPU.
"""

import argparse
import json
import statistics
import time
import types
from collections.abc import Callable

import torch
from torch.nn import functional as F

from autoplan.runtime.attention import causal_attention_of_rows

Tensors = tuple[torch.Tensor, ...]
N_WARM, N_ROUNDS = 3, 10


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def of_rank(rank: int, n_ranks: int) -> Callable[..., torch.Tensor]:
    """The attention of one rank; what it needs of a process group is its number."""
    group = types.SimpleNamespace(rank=lambda: rank, size=lambda: n_ranks)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        is_grouped = q.shape[1] != k.shape[1]
        return causal_attention_of_rows(q, k, v, group, enable_gqa=is_grouped)  # type: ignore[arg-type]

    return attention


def both_ways(attention: Callable[..., torch.Tensor], operands: Tensors, gradient: torch.Tensor) -> Tensors:
    """The result, and the gradients of query, key and value."""
    leaves = [operand.detach().requires_grad_() for operand in operands]
    result = attention(*leaves)
    return (result.detach(), *torch.autograd.grad(result, leaves, gradient))


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """The median of some calls."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    times = []
    for _ in range(N_WARM + N_ROUNDS):
        start_s = now()
        call()
        times.append(now() - start_s)
    return statistics.median(times[N_WARM:])


def worst(found: Tensors, expected: Tensors) -> list[float]:
    return [float((a.float() - b).abs().max()) for a, b in zip(found, expected, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--ranks", default="2,4,8")
    for name, default in (("rows", 8192), ("heads", 16), ("key-heads", 16), ("size", 128), ("batch", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    device, dtype = torch.device(given.device), getattr(torch, given.precision)
    torch.manual_seed(0)
    n_heads = (given.heads, given.key_heads, given.key_heads, given.heads)
    q, k, v, gradient = (torch.randn(given.batch, n, given.rows, given.size, device=device).to(dtype) for n in n_heads)
    exact = both_ways(whole, tuple(x.float() for x in (q, k, v)), gradient.float())
    rounding = worst(both_ways(whole, (q, k, v), gradient), exact)
    whole_s = seconds(lambda: both_ways(whole, (q, k, v), gradient), device)
    for n_ranks in map(int, given.ranks.split(",")):
        parts = list(zip(q.chunk(n_ranks, 2), gradient.chunk(n_ranks, 2), strict=True))
        found = [both_ways(of_rank(r, n_ranks), (part, k, v), own) for r, (part, own) in enumerate(parts)]
        results = [torch.cat([f[i] for f in found], 2) for i in (0, 1)]
        sums = [sum(f[i].float() for f in found) for i in (2, 3)]
        for rank, (part, own) in enumerate(parts):
            attention = of_rank(rank, n_ranks)
            rank_s = seconds(lambda a=attention, p=part, g=own: both_ways(a, (p, k, v), g), device)
            row = {"n_ranks": n_ranks, "rank": rank, "rank_s": rank_s, "ratio": rank_s / whole_s}
            row |= {"expected_ratio": (2 * rank + 1) / n_ranks**2, "whole_s": whole_s, "rounding": rounding}
            print(json.dumps(row | {"difference": worst((*results, *sums), exact), **vars(given)}))


if __name__ == "__main__":
    main()
