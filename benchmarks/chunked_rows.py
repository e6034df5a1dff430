"""What the chunked loss takes by how many rows a slice has, beside the whole one; forward and backward, loss compiled.

    python benchmarks/chunked_rows.py [--device cpu] > rows.jsonl      needs torch and one GPU

A line has the median of the rounds in seconds, and the peak of allocated memory beyond what is there before. Rounds
take all numbers of rows in turn. `products` are those of one slice by themselves: the logits, the gradient of the
hidden states, and that of the weight added to a sum.
"""

import argparse
import functools
import json
import statistics
from collections.abc import Callable

import torch
from compiled_head import seconds
from torch import nn
from torch.nn import functional as F

from autoplan.runtime.stages.chunked_loss import defer_products

# rows of a micro-batch, width, classes: Llama-1B, the mixture, GPT-2 XL with a padded head
SHAPES = ((65536, 2048, 128256), (131072, 1024, 32000), (32768, 1600, 50304))
SLICES = (0, 2048, 4096, 8192, 16384)  # 0: the whole loss
N_WARM, N_ROUNDS = 3, 9


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets)


def passes(n_rows: int, width: int, classes: int, slice_rows: int, device: torch.device) -> Callable[[], None]:
    """Forward and backward of the head and the loss, the head's weight in 16 bits."""
    head = nn.Linear(width, classes, bias=False, device=device, dtype=torch.bfloat16)
    x = torch.randn(n_rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(classes, (n_rows,), device=device)
    loss = torch.compile(loss_of, dynamic=False)
    if slice_rows:
        defer_products(head, slice_rows=slice_rows, is_compiled=True)

    def run() -> None:
        head.weight.grad = x.grad = None
        logits = head(x)
        (loss_of if slice_rows else loss)(logits, targets).backward()

    return run


def measure(shape: tuple[int, int, int], device: torch.device) -> None:
    tried = {rows: passes(*shape, rows, device) for rows in SLICES if rows <= shape[0]}
    found: dict[int, list[float]] = {rows: [] for rows in tried}
    peaks: dict[int, int] = {}
    for index in range(N_WARM + N_ROUNDS):
        for rows, run in tried.items():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
            took_s = seconds(run, device)
            peaks[rows] = (torch.cuda.max_memory_allocated() if device.type == "cuda" else 0) - before
            if index >= N_WARM:
                found[rows].append(took_s)
    for rows, took_s in found.items():
        told = {"shape": shape, "slice_rows": rows, "s": statistics.median(took_s), "peak_bytes": peaks[rows]}
        if rows:
            told["products"] = products(rows, *shape[1:], device)
        print(json.dumps(told | {"device": device_name(device), "torch": torch.__version__}), flush=True)


def products(rows: int, width: int, classes: int, device: torch.device) -> dict[str, float]:
    options = {"device": device, "dtype": torch.bfloat16}
    x, gradient = torch.randn(rows, width, **options), torch.randn(rows, classes, **options)
    weight = torch.randn(classes, width, **options)
    total, of_x = torch.zeros_like(weight), torch.empty_like(x)
    calls = {
        "logits": functools.partial(F.linear, x, weight),
        "of_x": functools.partial(torch.mm, gradient, weight, out=of_x),
        "of_weight": functools.partial(total.addmm_, gradient.t(), x),
        "of_weight_alone": functools.partial(torch.mm, gradient.t(), x, out=total),
    }
    return {
        name: statistics.median([seconds(call, device) for _ in range(N_WARM + N_ROUNDS)][N_WARM:])
        for name, call in calls.items()
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    given = torch.device(parser.parse_args().device)
    for each in SHAPES if given.type == "cuda" else ((4096, 16, 48),):
        torch.compiler.reset()
        measure(each, given)
