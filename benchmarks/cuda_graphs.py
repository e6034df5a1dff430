"""Programs with and without a CUDA graph of their passes: the median step after warm-up, and the largest peak.

    python benchmarks/cuda_graphs.py RESULTS.jsonl

A row is one program in one job: its steps, losses and peaks, from the `--out-json` of train.py.
"""

import json
import statistics
import sys
from pathlib import Path

N_WARM_UP = 4  # two steps as they come, the capture, and one replay


def main(results: Path) -> None:
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    print(f"{'job':>3}  {'case':29}{'graph':>6}{'step s':>9}{'GiB':>7}{'launch us':>11}")
    for row in sorted(rows, key=lambda row: (row["case"], row["cuda_graph"], row["job"])):
        step_s = statistics.median(row["steps_s"][N_WARM_UP:])
        peak_gib = max(row["peak_allocated_bytes_per_rank"]) / 2**30
        graph = "yes" if row["cuda_graph"] else "no"
        print(f"{row['job']:3}  {row['case']:29}{graph:>6}{step_s:9.4f}{peak_gib:7.1f}{row['launch_s'] * 1e6:11.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
