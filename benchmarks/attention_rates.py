"""Fused attention of many lengths on this device, and the figures of its price that are fitted to it.

    python benchmarks/attention_rates.py run RESULTS.jsonl                needs torch and one GPU only
    python benchmarks/attention_rates.py masks RESULTS.jsonl              likewise
    python benchmarks/attention_rates.py fit RESULTS.jsonl [OTHERS.jsonl]  needs torch only

Rows of 16-bit numbers, each the mean over about 0.4 s, measured by events; products of matrices before and after.

`masks` measures attention beside a mask, whose kind decides which kernel torch takes: bool, or a bias that is added to
the scores, which has a gradient or lies transposed in memory, as that of T5 does.

`fit` finds F, half and width of `cost_models/attention.py`: the least squares of log(achieved / (F n / (n + half) d /
(d + width))) over a grid, where 679 TFLOP/s is what the profile of the H200 has for a large product. It prints how far
they are off on RESULTS and, never fitted to, on OTHERS.
"""

import argparse
import datetime
import json
import math
import statistics
from collections.abc import Callable, Iterator
from itertools import chain, starmap
from pathlib import Path

import torch
from op_rates import between_events
from torch.nn import functional as F

MEASURED_S = 0.4
N_TOKENS = 32768  # of all sequences together, where they are not longer
N_HEADS = 32
LENGTHS = (197, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
HEAD_DIMS = (64, 128)
MASKS = ("none", "bool", "bias", "bias_gradient", "bias_transposed", "bias_transposed_gradient", "bool_grouped")
MASKED_LENGTHS, N_MASKED_TOKENS, N_MASKED_HEADS = (128, 512, 2048), 16384, 16
PRODUCT = (16384, 8192, 8192)
PRODUCT_FLOPS_PER_S = 679e12


def run(path: Path, rows: Iterator[dict]) -> None:
    common = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    common |= {"cudnn": torch.backends.cudnn.version(), "date": datetime.date.today().isoformat()}
    with path.open("a") as file:
        for row in chain([product()], rows, [product()]):
            file.write(json.dumps(common | row) + "\n")
            file.flush()
            print(json.dumps(row), flush=True)
            torch.cuda.empty_cache()


def shapes() -> Iterator[tuple[int, int, int, int, int, bool]]:
    """(sequences, heads, key heads, tokens, head dim, whether causal)."""
    for tokens in LENGTHS:
        for head_dim in HEAD_DIMS:
            for n_key_heads, is_causal in ((N_HEADS, False), (N_HEADS, True), (N_HEADS // 4, True)):
                yield max(1, N_TOKENS // tokens), N_HEADS, n_key_heads, tokens, head_dim, is_causal


def attention(shape: tuple[int, int, int, int, int, bool]) -> dict:
    """Heads lie beside each other in memory, as a projection leaves them."""
    n, heads, key_heads, tokens, head_dim, is_causal = shape
    q, k, v = (random((n, tokens, h, head_dim)) for h in (heads, key_heads, key_heads))
    parts = [x.transpose(1, 2) for x in (q, k, v)]
    options = {"is_causal": is_causal, "enable_gqa": heads != key_heads}
    result = F.scaled_dot_product_attention(*parts, **options)
    gradient = torch.randn_like(result)
    return {
        "op": "attention",
        "shape": shape,
        "backend": torch._fused_sdp_choice(*parts, **options),
        "forward_s": timed(lambda: F.scaled_dot_product_attention(*parts, **options)),
        "backward_s": timed(lambda: torch.autograd.grad(result, [q, k, v], gradient, retain_graph=True)),
    }


def masked_shapes() -> Iterator[tuple[tuple[int, int, int, int, int, bool], str]]:
    """(shape as above, kind of mask)."""
    for tokens in MASKED_LENGTHS:
        for head_dim in HEAD_DIMS:
            for kind in MASKS:
                key_heads = N_MASKED_HEADS // (4 if kind.endswith("grouped") else 1)
                yield (N_MASKED_TOKENS // tokens, N_MASKED_HEADS, key_heads, tokens, head_dim, False), kind


def masked(shape: tuple[int, int, int, int, int, bool], kind: str) -> dict:
    """`attention` beside a mask; a bias is a matrix per sequence and head."""
    n, heads, key_heads, tokens, head_dim, _ = shape
    parts = [random((n, tokens, h, head_dim)).transpose(1, 2) for h in (heads, key_heads, key_heads)]
    options = {"attn_mask": mask(kind, n, heads, tokens), "enable_gqa": heads != key_heads}
    leaves = [leaf for leaf in (*parts, options["attn_mask"]) if leaf is not None and leaf.requires_grad]
    before_bytes = torch.cuda.memory_allocated()
    result = F.scaled_dot_product_attention(*parts, **options)
    saved_bytes = torch.cuda.memory_allocated() - before_bytes - result.nbytes
    gradient = torch.randn_like(result)
    return {
        "op": "masked attention",
        "shape": shape,
        "mask": kind,
        "backend": torch._fused_sdp_choice(*parts, **options),
        "saved_bytes": saved_bytes,
        "forward_s": timed(lambda: F.scaled_dot_product_attention(*parts, **options)),
        "backward_s": timed(lambda: torch.autograd.grad(result, leaves, gradient, retain_graph=True)),
    }


def mask(kind: str, n: int, heads: int, tokens: int) -> torch.Tensor | None:
    if kind == "none":
        return None
    if kind.startswith("bool"):
        return torch.ones(n, 1, tokens, tokens, device="cuda", dtype=torch.bool)
    bias = torch.randn(n, tokens, tokens, heads, device="cuda", dtype=torch.bfloat16).permute(0, 3, 1, 2)
    if "transposed" not in kind:
        bias = bias.contiguous()
    return bias.requires_grad_(kind.endswith("gradient"))


def product() -> dict:
    rows, width, features = PRODUCT
    x, weight = random((rows, width)), random((features, width))
    with torch.no_grad():
        return {"op": "linear", "shape": PRODUCT, "forward_s": timed(lambda: F.linear(x, weight))}


def random(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def timed(function: Callable) -> float:
    """Mean seconds of one call."""
    between_events(function, 3)
    n_calls = max(3, round(MEASURED_S * 2 / between_events(function, 2)))
    return between_events(function, n_calls) / n_calls


# ------------------------------------------------------------------------------------------------------------- fit


def fit(results: Path, others: Path | None) -> None:
    for direction, ratio in (("forward", 1.0), ("backward", 2.5)):
        rows = achieved(results, direction, ratio)
        grid = [(half, width) for half in range(0, 700, 10) for width in range(0, 140, 4)]
        half, width = min(grid, key=lambda pair: statistics.pvariance(residuals(rows, *pair)))
        most = statistics.mean(residuals(rows, half, width))
        print(f"{direction}: F {math.exp(most):.2f}, half {half}, width {width}")
        for path in filter(None, (results, others)):
            errors = [most - own for own in residuals(achieved(path, direction, ratio), half, width)]
            mean, bias = statistics.mean(map(abs, errors)), statistics.mean(errors)
            print(f"  {path.name}: mean |log| {mean:.3f}, bias {bias:+.3f}, worst {max(errors, key=abs):+.2f}")


def achieved(path: Path, direction: str, ratio: float) -> list[tuple[float, int, float]]:
    """(keys that a row reads, head dim, part of the rate of a product) of each row."""
    found = []
    for row in map(json.loads, path.read_text().splitlines()):
        if row["op"] == "attention":
            n, heads, _, tokens, head_dim, is_causal = row["shape"]
            n_read = tokens / 2 if is_causal else tokens
            flops = ratio * 4 * n * heads * tokens * n_read * head_dim
            found.append((n_read, head_dim, flops / row[f"{direction}_s"] / PRODUCT_FLOPS_PER_S))
    return found


def residuals(rows: list[tuple[float, int, float]], half: int, width: int) -> list[float]:
    """The logarithm of F, as each row has it."""
    return [math.log(part * (1 + half / n_read) * (1 + width / head_dim)) for n_read, head_dim, part in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("run").add_argument("results", type=Path)
    actions.add_parser("masks").add_argument("results", type=Path)
    fitting = actions.add_parser("fit")
    fitting.add_argument("results", type=Path)
    fitting.add_argument("others", type=Path, nargs="?")
    given = parser.parse_args()
    if given.action == "run":
        run(given.results, map(attention, shapes()))
    elif given.action == "masks":
        run(given.results, starmap(masked, masked_shapes()))
    else:
        fit(given.results, given.others)


if __name__ == "__main__":
    main()
