"""Products and fused attention of 32-bit numbers on this device, with operands rounded to tf32 and not.

    python benchmarks/in_32_bits.py RESULTS.jsonl    needs torch and one GPU only

Each row is the mean of ten calls, by events; tflops are those of what is computed, without what a causal mask skips.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from op_rates import between_events
from torch.nn import functional as F

N_CALLS = 10
# (rows, width, features); (sequences, heads, tokens, head dim, whether causal)
PRODUCTS = (
    (8192, 2048, 2048),
    (8192, 2048, 8192),
    (8192, 8192, 2048),
    (8192, 2048, 128256),
    (16384, 1024, 4096),
    (4096, 4096, 4096),
)
ATTENTIONS = (
    (2, 32, 4096, 64, True),
    (32, 16, 512, 64, False),
    (2, 32, 4096, 128, True),
    (64, 16, 197, 64, False),
    (16, 16, 1024, 64, True),
)


def main(path: Path) -> None:
    common = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    with path.open("a") as file:
        for tf32 in (True, False):
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            for row in (*map(product, PRODUCTS), *map(attention, ATTENTIONS)):
                file.write(json.dumps(row | {"tf32": tf32} | common) + "\n")
                print(json.dumps(row | {"tf32": tf32}), flush=True)
                torch.cuda.empty_cache()


def product(shape: tuple[int, int, int]) -> dict:
    m, k, n = shape
    x, weight = (torch.randn(size, k, device="cuda", requires_grad=True) for size in (m, n))
    found = timed(lambda: F.linear(x, weight), (x, weight), flops=2 * m * k * n, backward_ratio=2.0)
    return {"op": "linear", "m": m, "k": k, "n": n} | found


def attention(shape: tuple[int, int, int, int, bool]) -> dict:
    n, heads, tokens, head_dim, causal = shape
    given = [torch.randn(n, heads, tokens, head_dim, device="cuda", requires_grad=True) for _ in range(3)]
    flops = 4 * n * heads * tokens**2 * head_dim // (2 if causal else 1)
    found = timed(
        lambda: F.scaled_dot_product_attention(*given, is_causal=causal), given, flops=flops, backward_ratio=2.5
    )
    return {"op": "attention", "B": n, "H": heads, "L": tokens, "D": head_dim, "causal": causal} | found


def timed(
    forward: Callable[[], torch.Tensor], inputs: tuple | list, *, flops: float, backward_ratio: float
) -> dict[str, float]:
    result = forward()
    gradient = torch.randn_like(result)
    found: dict[str, float] = {}
    for name, call, ratio in (
        ("forward", forward, 1.0),
        ("backward", lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True), backward_ratio),
    ):
        between_events(call, 3)
        seconds = between_events(call, N_CALLS) / N_CALLS
        found |= {f"{name}_ms": seconds * 1e3, f"{name}_tflops": ratio * flops / seconds / 1e12}
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
