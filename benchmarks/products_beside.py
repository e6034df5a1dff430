"""How long products take beside receives that wait, with some multiprocessors left to NCCL or none.

    torchrun --standalone --nproc-per-node 2 benchmarks/products_beside.py measure RESULTS.jsonl     two GPUs
    python benchmarks/products_beside.py table RESULTS.jsonl

A row is of a product of m x k by k x n in bf16, with a bias or without: `ms`, milliseconds alone and beside one and two
receives, each of at most 4 thread blocks, that wait for the other rank; `left`, multiprocessors that cuBLAS leaves to
others, where it was told to; `library`, cublas or cublaslt, which torch was told to prefer.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))
from autoplan.runtime.mesh import few_send_blocks

Row = dict[str, Any]
Product = tuple[int, int, int]

PRODUCTS: tuple[Product, ...] = (
    (3152, 1024, 1024),  # the first three are ViT-L's, 16 images
    (3152, 1024, 4096),
    (3152, 4096, 1024),
    (4096, 1024, 1024),
    (8192, 1024, 4096),
    (8192, 4096, 1024),
    (4096, 4096, 4096),
    (4096, 4096, 14336),
    (8192, 8192, 8192),
)
LIBRARIES = ("cublas", "cublaslt")
LEFT = (None, 2, 4, 8, 16)
N_WARM_UP, N_CALLS = 3, 60
MESSAGE_ELEMENTS = 4 << 20
N_RECEIVES = 2


def product_ms(product: Product, *, has_bias: bool) -> float:
    m, k, n = product
    left, right = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (n, k)))
    bias, out = (torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for shape in ((n,), (m, n)))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for call in range(N_WARM_UP + N_CALLS):
        if call == N_WARM_UP:
            begin.record()
        if has_bias:
            torch.addmm(bias, left, right.t(), out=out)
        else:
            torch.mm(left, right.t(), out=out)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / N_CALLS


def beside_ms(product: Product, n_receives: int, groups: list[Any], *, has_bias: bool) -> float | None:
    """Milliseconds on rank 1, nothing on rank 0, which sends once they are known."""
    messages = [torch.empty(MESSAGE_ELEMENTS, device="cuda") for _ in range(n_receives)]
    found = None
    dist.barrier()
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        dist.barrier()
        for message, group in zip(messages, groups, strict=False):
            dist.send(message, 1, group=group)
    else:
        works = [dist.irecv(message, 0, group=group) for message, group in zip(messages, groups, strict=False)]
        time.sleep(0.002)  # NCCL's kernels run
        found = product_ms(product, has_bias=has_bias)
        dist.barrier()
        for work in works:
            work.wait()
    torch.cuda.synchronize()
    return found


def measured() -> Iterator[Row]:
    """The rows, on rank 1."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    groups = [dist.new_group([0, 1], pg_options=few_send_blocks(device)) for _ in range(N_RECEIVES)]
    for group in groups:  # the first transfer of a group waits for the other rank
        message = torch.zeros(1, device=device)
        dist.recv(message, 0, group=group) if dist.get_rank() == 1 else dist.send(message, 1, group=group)
    for library in LIBRARIES:
        torch.backends.cuda.preferred_blas_library(library)
        for left in LEFT:
            torch._C._set_sm_carveout_experimental(left)
            for product in PRODUCTS:
                for has_bias in (False, True):
                    times_ms = [beside_ms(product, n, groups, has_bias=has_bias) for n in range(N_RECEIVES + 1)]
                    if dist.get_rank() == 1:
                        yield {
                            "library": library,
                            "left": left,
                            "product": product,
                            "bias": has_bias,
                            "ms": times_ms,
                            "device": torch.cuda.get_device_name(),
                            "torch": torch.__version__,
                        }
    dist.barrier()
    dist.destroy_process_group()


def table(rows: list[Row]) -> Iterator[str]:
    """A line per product and library: alone, then beside one and two receives by how many multiprocessors are left."""
    alone_ms = {_case(row): row["ms"][0] for row in rows if row["left"] is None}
    yield "times what it takes alone with none left, alone / beside one receive / beside two"
    yield f"{'product':24s}{'library':10s}{'alone ms':>9s}  " + "".join(f"{left or 'none':^20}" for left in LEFT)
    for case, ms in alone_ms.items():
        library, product, has_bias = case
        own = {row["left"]: [value / ms for value in row["ms"]] for row in rows if _case(row) == case}
        name = "x".join(map(str, product)) + (" + bias" if has_bias else "")
        ratios = "".join(f"{' / '.join(f'{value:.2f}' for value in own[left]):^20s}" for left in LEFT)
        yield f"{name:24s}{library:10s}{ms:9.3f}  {ratios}"


def _case(row: Row) -> tuple[str, Product, bool]:
    m, k, n = row["product"]
    return row["library"], (m, k, n), row["bias"]


def main() -> None:
    what, results = sys.argv[1], Path(sys.argv[2])
    if what == "measure":
        for row in measured():
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    else:
        print("\n".join(table([json.loads(line) for line in results.read_text().splitlines()])))


if __name__ == "__main__":
    main()
