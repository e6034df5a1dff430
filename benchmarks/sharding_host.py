"""What `fully_shard` takes of the host where it shards over one device, two, or more: is alone cheaper?

    torchrun --standalone --nproc-per-node N benchmarks/sharding_host.py measure RESULTS.jsonl    for N = 1, 2, in turn
    python benchmarks/sharding_host.py table RESULTS.jsonl

A row is one process group: the figures of `[device.sharding]` in a hardware profile, and the passes behind them.
"""

import json
import os
import statistics
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

N_TIMES = 3


def measure(results: Path) -> None:
    import torch
    import torch.distributed as dist

    from autoplan.measure_hardware.host_shares import sharding_host
    from autoplan.measure_hardware.links import Ranks
    from autoplan.measure_hardware.zero_host_time import sharded_passes

    rank, n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_cuda else "gloo", device_id=device if on_cuda else None)
    ranks = Ranks(rank, n_ranks, device, ((n_ranks, dist.group.WORLD),))
    for _ in range(N_TIMES):
        passes = sharded_passes(ranks)
        if rank == 0:
            name = torch.cuda.get_device_name() if on_cuda else "CPU"
            row = {"device": name, "torch": torch.__version__, "n_devices": n_ranks}
            row |= {"us": {key: 1e6 * value for key, value in asdict(sharding_host(passes)).items()}}
            with results.open("a") as file:
                file.write(json.dumps(row | {"passes": [asdict(item) for item in passes]}) + "\n")
    dist.destroy_process_group()


def table(results: Path) -> None:
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in results.read_text().splitlines():
        row = json.loads(line)
        for name, us in row["us"].items():
            found[name.removesuffix("_s")][row["n_devices"]].append(us)
    sizes = sorted({size for by_size in found.values() for size in by_size})
    print(f"{'us, median (least to most)':28}" + "".join(f"{size:>17} device{'s' * (size > 1):1}" for size in sizes))
    for name, by_size in found.items():
        values = (by_size[size] for size in sizes)
        cells = (f"{statistics.median(us):.4g} ({min(us):.4g} to {max(us):.4g})" for us in values)
        print(f"{name:28}" + "".join(f"{cell:>25}" for cell in cells))


if __name__ == "__main__":
    {"measure": measure, "table": table}[sys.argv[1]](Path(sys.argv[2]))
