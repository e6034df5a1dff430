"""What padding the classes of a head gains: forward and backward of the product and its loss, by rows and classes.

    python benchmarks/padded_head.py [--device cuda] [--rounds 12] > rows.jsonl

A line has the median of the rounds and what is allocated at most besides weights and hidden states. `multiple` says to
multiples of how many classes logits are padded; null is the product as it is. Cases are the heads of GPT-2 XL (16 and
32 samples of 1,024 tokens), BERT-large, GPT-2, and one that is too small to gain.
"""

import argparse
import functools
import json
import statistics
import timeit
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

CASES = (  # rows, width, classes, has a bias
    (16384, 1600, 50257, False),
    (32768, 1600, 50257, False),
    (65536, 1024, 30522, True),
    (8192, 768, 50257, False),
    (4096, 512, 2001, False),
)
SMALL_CASES = ((64, 32, 131, True),)  # on a CPU
MULTIPLES = (None, 8, 64, 128)
N_WARM = 4


def logits_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, multiple: int | None) -> torch.Tensor:
    if multiple is None:
        return F.linear(x, weight, bias)
    n_classes = weight.shape[0]
    padding = (0, -n_classes % multiple)
    return F.linear(x, F.pad(weight, (0, 0, *padding)), None if bias is None else F.pad(bias, padding))[:, :n_classes]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets)


def rows_of_case(case: tuple[int, int, int, bool], device: torch.device, n_rounds: int) -> Iterator[dict]:
    """A row for each multiple, with a loss of plain functions and a compiled one."""
    n_rows, width, n_classes, has_bias = case
    shapes = [(n_rows, width), (n_classes, width), *([(n_classes,)] if has_bias else [])]
    tensors = [torch.randn(s, device=device, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    x, weight, bias = (*tensors, None)[:3]
    targets = torch.randint(n_classes, (n_rows,), device=device)

    def step(loss: Callable[..., torch.Tensor], multiple: int | None) -> None:
        for tensor in tensors:
            tensor.grad = None
        loss(logits_of(x, weight, bias, multiple), targets).backward()

    for multiple in MULTIPLES:
        torch.compiler.reset()
        for name, loss in (("eager", loss_of), ("compiled", torch.compile(loss_of, dynamic=False))):
            row = {"rows": n_rows, "width": width, "classes": n_classes, "bias": has_bias, "loss": name}
            yield row | {"multiple": multiple} | measure(functools.partial(step, loss, multiple), device, n_rounds)


def measure(call: Callable[[], None], device: torch.device, n_rounds: int) -> dict[str, float]:
    """The median in milliseconds, and GiB where the device says."""
    call()
    if device.type != "cuda":
        return {"ms": statistics.median(timeit.repeat(call, number=1, repeat=n_rounds)) * 1e3}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, took_ms = torch.cuda.memory_allocated(), []
    for _ in range(N_WARM + n_rounds):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        took_ms.append(first.elapsed_time(last))
    peak_gib = (torch.cuda.max_memory_allocated() - before) / 2**30
    return {"ms": statistics.median(took_ms[N_WARM:]), "peak_gib": peak_gib}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    for case in CASES if given.device == "cuda" else SMALL_CASES:
        for row in rows_of_case(case, torch.device(given.device), given.rounds):
            print(json.dumps(row | {"device": name, "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
