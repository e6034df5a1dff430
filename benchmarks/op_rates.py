"""Forward and backward of single operators on this device: what their prices from the data sheet are compared with.

    python benchmarks/op_rates.py run RESULTS.jsonl [--only OP]    needs torch and one GPU only
    python benchmarks/op_rates.py table RESULTS.jsonl [HARDWARE] [--host TIMES]    beside computed; needs autoplan

Convolutions, contiguous and in channels_last, in bf16, tf32 and float32, and what stands beside them, in bf16;
reading rows by index, whose gradient adds rows where they belong; and products, also by which dim of each factor is
the innermost in memory (`mm`, forward only). Each row is the mean over about 0.1 s, measured by events, after a warm-up
in which cuDNN tries its algorithms. Rows of convolutions also have the backward pass of the weight alone, and what each
pass takes besides its results: in its first call, in which algorithms are tried, and in later ones.

The table has the prices of `cost.op_time` in microseconds. Times that the host sets are marked h and left out of the
means of |log(computed / measured)|: a gradient that launches nothing (`add`) takes 55 us, or so many times as long.
"""

import argparse
import datetime
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch.nn import functional as F

N_WARM_UP, MEASURED_S = 3, 0.1

# (images, channels in, height and width, channels out, kernel, stride, groups)
CONVOLUTIONS = (
    (64, 3, 224, 64, 7, 2, 1),
    (64, 64, 56, 64, 1, 1, 1),
    (64, 64, 56, 64, 3, 1, 1),
    (64, 64, 56, 256, 1, 1, 1),
    (64, 256, 56, 128, 1, 1, 1),
    (64, 128, 56, 128, 3, 2, 1),
    (64, 128, 28, 128, 3, 1, 1),
    (64, 128, 28, 512, 1, 1, 1),
    (64, 256, 14, 256, 3, 1, 1),
    (64, 256, 14, 1024, 1, 1, 1),
    (64, 1024, 14, 256, 1, 1, 1),
    (64, 512, 7, 512, 3, 1, 1),
    (64, 512, 7, 2048, 1, 1, 1),
    (512, 64, 56, 64, 3, 1, 1),
    (512, 64, 56, 256, 1, 1, 1),
    (512, 256, 14, 256, 3, 1, 1),
    (512, 1024, 14, 256, 1, 1, 1),
    (512, 512, 7, 512, 3, 1, 1),
    (8, 320, 64, 320, 3, 1, 1),
    (8, 640, 32, 1280, 3, 1, 1),
    (256, 3, 224, 1024, 16, 16, 1),
    (128, 384, 14, 384, 7, 1, 384),
    (128, 96, 56, 96, 7, 1, 96),
    (64, 256, 56, 256, 3, 1, 32),
)
BESIDE = ("batch_norm", "relu", "max_pool", "add")
IMAGES = ((64, 256, 56, 56), (512, 1024, 14, 14))
TABLES = ((32768, 1024, 32768), (32768, 1024, 65536), (8192, 4096, 16384), (65536, 1, 65536), (50257, 1600, 16384))
FEW_ROWS = ((2, 1024, 65536), (32, 16, 262144), (32, 16, 65536), (512, 1024, 65536))  # of BERT and T5
READS = ("index", "index_permuted", "index_select", "embedding", "gather", "index_add")
PRODUCTS = ((16384, 4096, 4096), (8192, 1024, 4096))
# [m, k] @ [k, n] of Llama-1B (one block, and gradients of its weights), BERT-large and a square one
BY_LAYOUT = (
    *((8192, 2048, 8192), (8192, 8192, 2048), (8192, 2048, 2048), (2048, 8192, 8192), (8192, 2048, 32064)),
    *((16384, 1024, 4096), (1024, 16384, 4096), (8192, 8192, 8192)),
)
INNERMOST = ("k, k", "k, n", "m, k", "m, n")  # of either factor; torch's linear has "k, k" forward
HOST_S = {"forward": 20e-6, "backward": 110e-6}  # what takes no longer may have waited for the host
DIRECTIONS = tuple(HOST_S)


def run(path: Path, only: str | None) -> None:
    torch.backends.cudnn.benchmark = True
    common = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    common |= {"cudnn": torch.backends.cudnn.version(), "date": datetime.date.today().isoformat()}
    with path.open("a") as file:
        for described, make, dtype in cases():
            if only not in (None, described["op"]):
                continue
            set_float32(dtype)
            start_s = time.perf_counter()
            try:
                result = measure(*make(), with_weight_alone=described["op"] == "conv2d")
            except RuntimeError as error:
                result = {"error": str(error)[:200]}
            row = common | {"dtype": dtype} | described | result | {"wall_s": time.perf_counter() - start_s}
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(json.dumps({k: v for k, v in row.items() if k not in common}), flush=True)
            torch.cuda.empty_cache()


def cases() -> Iterator[tuple[dict, Callable, str]]:
    """(what it is, a function that makes (op, inputs with gradients), dtype)."""
    for shape in CONVOLUTIONS:
        for layout in ("contiguous", "channels_last"):
            for dtype in ("bf16", "tf32", "fp32"):
                described = {"op": "conv2d", "shape": shape, "layout": layout}
                yield described, lambda s=shape, la=layout, d=dtype: convolution(s, la, d), dtype
    for shape in IMAGES:
        for op in BESIDE:
            for layout in ("contiguous", "channels_last"):
                described = {"op": op, "shape": shape, "layout": layout}
                yield described, lambda o=op, s=shape, la=layout: beside(o, s, la), "bf16"
    for shape in FEW_ROWS:
        for dtype in ("bf16", "fp32"):
            yield {"op": "embedding", "shape": shape}, lambda s=shape, d=dtype: reading("embedding", s, d), dtype
    for shape in TABLES:
        for op in READS:
            for dtype in ("bf16", "fp32"):
                yield {"op": op, "shape": shape}, lambda o=op, s=shape, d=dtype: reading(o, s, d), dtype
    for shape in PRODUCTS:
        for dtype in ("bf16", "tf32", "fp32"):
            yield {"op": "linear", "shape": shape}, lambda s=shape, d=dtype: product(s, d), dtype
    for shape in BY_LAYOUT:
        for layout in INNERMOST:
            for dtype in ("bf16", "tf32"):
                described = {"op": "mm", "shape": shape, "layout": layout}
                yield described, lambda s=shape, la=layout, d=dtype: product_by_layout(s, la, d), dtype


def set_float32(dtype: str) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"


def random(shape: tuple[int, ...], dtype: str, layout: str = "contiguous") -> torch.Tensor:
    tensor = torch.randn(shape, device="cuda", dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    if layout == "channels_last":
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    return tensor.requires_grad_()


def convolution(shape: tuple[int, ...], layout: str, dtype: str) -> tuple[Callable, list[torch.Tensor]]:
    n, c_in, height, c_out, kernel, stride, groups = shape
    x = random((n, c_in, height, height), dtype, layout)
    if c_in == 3:  # images have no gradient
        x.requires_grad_(False)
    weight = random((c_out, c_in // groups, kernel, kernel), dtype, layout)
    padding = 0 if kernel == stride else kernel // 2
    return lambda: F.conv2d(x, weight, None, stride, padding, 1, groups), [t for t in (x, weight) if t.requires_grad]


def beside(op: str, shape: tuple[int, ...], layout: str) -> tuple[Callable, list[torch.Tensor]]:
    x = random(shape, "bf16", layout)
    if op == "batch_norm":
        scale, shift = random((shape[1],), "bf16"), random((shape[1],), "bf16")
        mean, variance = torch.zeros_like(scale).detach(), torch.ones_like(scale).detach()
        return lambda: F.batch_norm(x, mean, variance, scale, shift, True), [x, scale, shift]
    if op == "max_pool":
        return lambda: F.max_pool2d(x, 3, 2, 1), [x]
    if op == "relu":
        return lambda: F.relu(x), [x]
    other = random(shape, "bf16", layout)
    return lambda: x + other, [x, other]


def reading(op: str, shape: tuple[int, ...], dtype: str) -> tuple[Callable, list[torch.Tensor]]:
    """shape: rows of the table, their width, rows read."""
    n_rows, width, n_read = shape
    table = random((n_rows, width) if width > 1 else (n_rows,), dtype)
    index = torch.randint(n_rows, (n_read,), device="cuda")
    if op == "index_permuted":  # no row twice, as where tokens are sorted by expert
        index = torch.cat([torch.randperm(n_rows, device="cuda") for _ in range(-(-n_read // n_rows))])[:n_read]
    if op in ("index", "index_permuted"):
        return lambda: table[index], [table]
    if op == "index_select":
        return lambda: table.index_select(0, index), [table]
    if op == "embedding":
        matrix = table if width > 1 else table.detach()[:, None].requires_grad_()
        return lambda: F.embedding(index, matrix), [matrix]
    if op == "gather":
        wide = index[:, None].expand(-1, width) if width > 1 else index
        return lambda: table.gather(0, wide), [table]
    rows = random((n_read, width) if width > 1 else (n_read,), dtype)
    return lambda: table.index_add(0, index, rows), [table, rows]


def product(shape: tuple[int, ...], dtype: str) -> tuple[Callable, list[torch.Tensor]]:
    rows, width, features = shape
    x, weight = random((rows, width), dtype), random((features, width), dtype)
    return lambda: F.linear(x, weight), [x, weight]


def product_by_layout(shape: tuple[int, ...], layout: str, dtype: str) -> tuple[Callable, list[torch.Tensor]]:
    m, k, n = shape
    left = random((m, k) if layout.startswith("k") else (k, m), dtype).detach()
    right = random((k, n) if layout.endswith("n") else (n, k), dtype).detach()
    factors = left if layout.startswith("k") else left.t(), right if layout.endswith("n") else right.t()
    return lambda: torch.mm(*factors), []


def measure(op: Callable, inputs: list[torch.Tensor], *, with_weight_alone: bool = False) -> dict:
    """Seconds of one forward and, if some input has a gradient, one backward pass, and their memory."""
    found = measured_pass("forward", op)
    if not inputs:
        return found
    result = op()
    gradient = torch.randn_like(result)
    found |= measured_pass("backward", lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True))
    if with_weight_alone:
        weight = inputs[-1]
        found |= measured_pass("weight", lambda: torch.autograd.grad(result, weight, gradient, retain_graph=True))
    return found


def measured_pass(name: str, function: Callable) -> dict:
    found = {f"{name}_first_bytes": bytes_besides_results(function), f"{name}_s": timed(function)}
    return found | {f"{name}_bytes": bytes_besides_results(function)}


def bytes_besides_results(function: Callable) -> int:
    """What one call allocates at once, but for what it returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = function()
    peak = torch.cuda.max_memory_allocated()
    tensors = results if isinstance(results, tuple) else (results,)
    return peak - before - sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def timed(function: Callable) -> float:
    """Mean seconds of one call, by events around many."""
    for _ in range(N_WARM_UP):
        function()
    once = between_events(function, 2) / 2
    n_calls = max(3, min(1000, round(MEASURED_S / once)))
    return between_events(function, n_calls) / n_calls


def between_events(function: Callable, n_calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(n_calls):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


# --------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Compared:
    """One time of a row beside its price, in seconds."""

    row: dict
    direction: str
    computed_s: float
    host_s: float

    @property
    def measured_s(self) -> float:
        return self.row[f"{self.direction}_s"]

    @property
    def is_of_host(self) -> bool:
        return self.measured_s < self.host_s

    @property
    def log_error(self) -> float:
        return abs(math.log(self.computed_s / self.measured_s))

    @property
    def kind(self) -> tuple[str, str]:
        return self.row["op"], f"{self.row.get('layout', '')} {self.row['dtype']}".strip()

    def __str__(self) -> str:
        error = self.computed_s / self.measured_s - 1
        return (
            f"{self.measured_s * 1e6:12.1f}{self.computed_s * 1e6:10.1f}{error:+8.0%}{'h' if self.is_of_host else ' '}"
        )


def compared(path: Path, hw: str, *, host: float = 1.0) -> list[Compared]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    pairs = [(row, computed(row, hw)) for row in rows if "error" not in row]
    return [
        Compared(row, name, own_s, host * HOST_S[name])
        for row, both in pairs
        for name, own_s in zip(DIRECTIONS, both, strict=True)
        if f"{name}_s" in row
    ]


def table(path: Path, hw: str, *, host: float) -> None:
    found = compared(path, hw, host=host)
    titles = "".join(f"{direction:>12}{'computed':>10}{'error':>9}" for direction in DIRECTIONS)
    print(f"{'op':16}{'shape':34}{'layout':15}{'':5}{titles}")
    for _, own in groupby(found, key=lambda item: id(item.row)):
        directions = list(own)
        row = directions[0].row
        shape = ", ".join(map(str, row["shape"]))
        head = f"{row['op']:16}{shape:34}{row.get('layout', ''):15}{row['dtype']:5}"
        print("".join([head, *map(str, directions)]).rstrip())
    print("\nmean |log(computed / measured)| (of so many rows), h left out")
    of_device = [item for item in found if not item.is_of_host]
    for kind in dict.fromkeys(item.kind for item in of_device):
        cells = ""
        for direction in DIRECTIONS:
            own = [item.log_error for item in of_device if (item.kind, item.direction) == (kind, direction)]
            cells += f"{statistics.mean(own):12.2f} ({len(own)})" if own else f"{'-':>16}"
        print(f"{kind[0]:16}{kind[1]:22}{cells}")
    for direction in DIRECTIONS:
        own = [item.log_error for item in of_device if item.direction == direction]
        if own:
            print(f"{direction}: {len(own)} times, {statistics.mean(own):.3f}, worst {max(own):.2f}")


def computed(row: dict, hw: str) -> tuple[float, float]:
    """Seconds of a row, forward and backward, as the planner prices it without a measured profile."""
    from autoplan.cost.op_time import op_time
    from autoplan.hardware import load_hardware_profile
    from autoplan.rules import LocalCall, load_rules

    op, operands = as_graph_op(row)
    gradients = (row["op"] != "conv2d" or row["shape"][1] != 3, *[True] * (len(operands) - 1))
    layout = "contiguous" if row["op"] == "mm" else row.get("layout", "contiguous")
    device = load_hardware_profile(hw).device
    kernels = {"attention": device.attention, "gradients": gradients}
    call = LocalCall(op, operands, operands, op.outputs, 1, row["dtype"], layout, **kernels)
    found = op_time(load_rules()[op.target], call, device=device, has_gradient=True)
    return found.forward_s, found.backward_s


def as_graph_op(row: dict):
    """The op of a row and the specs of its operands, as a trace has them."""
    from autoplan.graph import COMPUTE, Op, Ref, TensorSpec

    def call(
        target: str, result: tuple[int, ...], *operands: tuple[int, ...], then: tuple = (), index: int | None = None
    ):
        specs = [TensorSpec(tuple(s), "int64" if i == index else COMPUTE) for i, s in enumerate(operands)]
        names = [Ref(f"x{i}") for i in range(len(operands))]
        args = then(*names) if callable(then) else (*names, *then)
        return Op("y", f"aten.{target}", args, (), (TensorSpec(tuple(result), COMPUTE),), ""), tuple(specs)

    op, shape = row["op"], row["shape"]
    if op == "conv2d":
        n, c_in, height, c_out, kernel, stride, groups = shape
        padding = 0 if kernel == stride else kernel // 2
        out = (height + 2 * padding - kernel) // stride + 1
        then = (None, (stride,) * 2, (padding,) * 2, (1, 1), groups)
        weight = c_out, c_in // groups, kernel, kernel
        return call("conv2d.default", (n, c_out, out, out), (n, c_in, height, height), weight, then=then)
    if op == "batch_norm":
        vector = (shape[1],)
        return call("batch_norm.default", shape, shape, *[vector] * 4, then=(True, 0.1, 1e-5, True))
    if op == "max_pool":
        n, channels, height, width = shape
        return call("max_pool2d.default", (n, channels, height // 2, width // 2), shape, then=((3, 3), (2, 2), (1, 1)))
    if op in ("relu", "add"):
        return call("relu.default" if op == "relu" else "add.Tensor", shape, *[shape] * (1 + (op == "add")))
    if op == "linear":
        n, width, features = shape
        return call("linear.default", (n, features), (n, width), (features, width))
    if op == "mm":
        m, k, n = shape
        return call("mm.default", (m, n), (m, k), (k, n))
    n_rows, width, n_read = shape
    columns = (width,) if width > 1 or op == "embedding" else ()
    whole, read, index = (n_rows, *columns), (n_read, *columns), (n_read,)
    if op in ("index", "index_permuted"):
        return call("index.Tensor", read, whole, index, then=lambda x, i: (x, (i,)), index=1)
    if op == "index_add":
        return call("index_add.default", whole, whole, index, read, then=lambda x, i, y: (x, 0, i, y), index=1)
    if op == "embedding":
        return call("embedding.default", read, whole, index, index=1)
    places = read if op == "gather" else index
    return call(f"{op}.default", read, whole, places, then=lambda x, i: (x, 0, i), index=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    of_run = actions.add_parser("run")
    of_run.add_argument("results", type=Path)
    of_run.add_argument("--only", metavar="OP")
    of_table = actions.add_parser("table")
    of_table.add_argument("results", type=Path)
    of_table.add_argument("hardware", nargs="?", default="h200_x4")
    of_table.add_argument("--host", type=float, default=1.0, metavar="TIMES", help="how much slower this host is")
    given = parser.parse_args()
    run(given.results, given.only) if given.action == "run" else table(given.results, given.hardware, host=given.host)


if __name__ == "__main__":
    main()
