"""What compiling the final norm and the head gains beside compiling the loss, which plans with compile=on do already.

    python benchmarks/compiled_head.py [--device cuda] [--rows 8192 --width 2048 --classes 128256] > rows.jsonl

    loss             the norm and the head as they are, the loss compiled: what programs do
    norm, loss       the norm compiled by itself too
    norm+head, loss  the norm and the head as one compiled function, the loss as another
    one              all of it as one function

Forward and backward, with the norms of the module and of Hugging Face (float32 inside, several ops). Rounds take all
ways in turn, so that what else the machine does meets all of them; on a CPU time is that of the process, not the clock.
A line has the median of the rounds, and of each round's ratio to the first way with its quartiles.

On 2 CPU cores that other work shared (results/compiled_head_2cores_2026-11-22.jsonl) the other three ways took 0.99 to
1.01, 0.99 to 1.00 and 0.98 to 0.99 of the time of the first, with quartiles up to 5 % from 1: no gain that could be
told there. Not yet run on a GPU.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

N_WARM = 3


class NormOfOps(nn.Module):
    """RMSNorm as Hugging Face models write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets)


def ways(norm: nn.Module, head: nn.Module) -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """Each computes the loss from the hidden states of all rows."""

    def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return torch.compile(function, dynamic=False)

    loss, own_norm, ended = compiled(loss_of), compiled(norm.forward), compiled(lambda x: head(norm(x)))
    return {
        "loss": lambda x, targets: loss(head(norm(x)), targets),
        "norm, loss": lambda x, targets: loss(head(own_norm(x)), targets),
        "norm+head, loss": lambda x, targets: loss(ended(x), targets),
        "one": compiled(lambda x, targets: loss_of(head(norm(x)), targets)),
    }


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Time of a call: of the device, or of this process where that is the device."""
    if device.type != "cuda":
        start = time.process_time()
        call()
        return time.process_time() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    call()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def measure(norm: nn.Module, head: nn.Module, *, n_rows: int, n_rounds: int) -> dict[str, list[float]]:
    """Seconds of each round by way."""
    weight = next(head.parameters())
    x = torch.randn(n_rows, weight.shape[1], dtype=weight.dtype, device=weight.device, requires_grad=True)
    targets = torch.randint(weight.shape[0], (n_rows,), device=weight.device)
    tried = ways(norm, head)
    found: dict[str, list[float]] = {name: [] for name in tried}
    for index in range(N_WARM + n_rounds):
        for name, loss in tried.items():
            took_s = seconds(lambda loss=loss: loss(x, targets).backward(), weight.device)
            if index >= N_WARM:
                found[name].append(took_s)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--classes", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    for norm_name, make in (("nn.RMSNorm", nn.RMSNorm), ("of ops", NormOfOps)):
        torch.compiler.reset()
        norm = make(arguments.width).to(device, dtype)
        head = nn.Linear(arguments.width, arguments.classes, bias=False).to(device, dtype)
        rounds = measure(norm, head, n_rows=arguments.rows, n_rounds=arguments.rounds)
        first = rounds["loss"]
        for name, took in rounds.items():
            low, middle, high = statistics.quantiles([a / b for a, b in zip(took, first, strict=True)], n=4)
            row = {"norm": norm_name, "compiled": name, "s": statistics.median(took), "ratio": middle}
            print(json.dumps({**vars(arguments), **row, "ratio_quartiles": [low, high]}), flush=True)


if __name__ == "__main__":
    main()
