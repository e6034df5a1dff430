"""How long planning takes and how far the plan is proved, on real models and clusters.

    python benchmarks/search_speed.py run FILE [--time-limit S] [--group GROUP ...]    each case in its own process
    python benchmarks/search_speed.py table FILE                  the table of benchmarks/evidence/search.md
    python benchmarks/search_speed.py plot FILE OUT.svg           search time against devices and against layers

`run` writes JSON lines, of all groups of cases by default. `cold` starts with an empty cache: import, trace, layout
programs, search. `warm` is the same command again. Seconds are of the processor, on one core. `first` is when the first
plan that fits was known, from the start of the search; `gap` is what is left unproved. `RSS` is the largest of the
process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"
HARDWARE = "dgx_a100_x8"
TIME_LIMIT_S = 60.0
# model file, --set, hosts, global batch
CASES = (
    ("gpt.py", {"size": "char"}, 1, 64),
    ("llama.py", {"size": "7b"}, 1, 64),
    ("llama.py", {"size": "8b"}, 1, 128),
    ("llama.py", {"size": "7b"}, 8, 512),
    ("llama.py", {"size": "70b"}, 8, 1024),
    ("gpt.py", {"size": "200b"}, 8, 512),
    ("llama.py", {"size": "70b"}, 128, 2048),
    ("gpt.py", {"size": "175b"}, 512, 4096),
    ("gpt.py", {"size": "175b"}, 2048, 16384),
)
DEVICES = tuple(("llama.py", {"size": "7b"}, n // 8, 8 * n) for n in (8, 64, 512, 4096, 32768, 65536))
LAYERS = tuple(("llama.py", {"size": "1b", "n_layers": n}, 8, 512) for n in (4, 16, 64, 250, 1000))
MIXED = tuple(("llama.py", {"size": size}, (64, 64), 4096) for size in ("15m", "7b"))  # hosts of each of `KINDS`
KINDS, BETWEEN = ("dgx_a100_x8", "v100_x8"), "a100_v100.toml"
GROUPS = {"case": CASES, "devices": DEVICES, "layers": LAYERS, "mixed": MIXED}


def measure(
    file: str, overrides: dict[str, object], hosts: int | list[int], global_batch: int, time_limit_s: float
) -> None:
    """Plan once in this process, as the command does, and print a JSON line; `hosts` of several kinds are a cluster."""
    from autoplan.garbage import NEW_OBJECTS_PER_COLLECTION

    gc.set_threshold(NEW_OBJECTS_PER_COLLECTION)
    from autoplan.api import trace_model

    start_s = time.process_time()
    graph = trace_model(EXAMPLES / file, overrides=overrides)
    graph_s = time.process_time() - start_s
    plan = _plan if isinstance(hosts, int) else _plan_mixed
    n_devices, space_s, search_s, result = plan(graph, hosts, global_batch, time_limit_s)
    print(
        json.dumps(
            {
                "model": Path(file).stem,
                "set": overrides,
                "n_devices": n_devices,
                "n_layers": sum(segment.is_block for segment in graph.segments),
                "n_meshes": result.n_meshes,
                "graph_s": graph_s,
                "space_s": space_s,
                "search_s": search_s,
                "first_plan_s": result.first_plan_s,
                "process_s": time.process_time(),
                "step_s": result.best.estimate.step_s if result.best else None,
                "gap": result.gap,
                "status": result.status,
                "stopped_by": result.stopped_by,
                "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    )


def _plan(graph, n_hosts: int, global_batch: int, time_limit_s: float) -> tuple:
    """Devices, seconds to price the space and to search it, and the result."""
    from autoplan.hardware import load_hardware_profile
    from autoplan.options import Options
    from autoplan.search import search
    from autoplan.space.priced import priced_space

    options = Options(global_batch=global_batch, time_limit_s=time_limit_s)
    hardware, start_s = load_hardware_profile(HARDWARE, n_hosts=n_hosts), time.process_time()
    offered, space_s = priced_space(graph, hardware, options, global_batch=global_batch), time.process_time() - start_s
    start_s = time.process_time()
    result = search(offered.space, price=offered.price, options=options, make_plan=offered.make_plan)
    return hardware.n_devices, space_s, time.process_time() - start_s, result


def _plan_mixed(graph, hosts: list[int], global_batch: int, time_limit_s: float) -> tuple:
    """Likewise, in fp16, which both kinds have."""
    from autoplan.hardware import load_hardware_profile
    from autoplan.hardware.cluster import load_cluster
    from autoplan.options import Options
    from autoplan.search.mixed.search import search_mixed
    from autoplan.space.mixed_space import mixed_space

    options = Options(global_batch=global_batch, precision="fp16", time_limit_s=time_limit_s)
    groups = tuple(load_hardware_profile(kind, n_hosts=n) for kind, n in zip(KINDS, hosts, strict=True))
    cluster, start_s = replace(load_cluster(EXAMPLES / BETWEEN), groups=groups), time.process_time()
    space, space_s = mixed_space(graph, cluster, options, global_batch=global_batch), time.process_time() - start_s
    start_s = time.process_time()
    result = search_mixed(space, options=options)
    return cluster.n_devices, space_s, time.process_time() - start_s, result


def run(path: Path, time_limit_s: float, groups: Sequence[str]) -> None:
    """Measure every case of these groups cold and warm."""
    with path.open("w") as file:
        for group in groups:
            for case in GROUPS[group]:
                with tempfile.TemporaryDirectory() as cache:
                    for state in ("cold", "warm"):
                        line = {"group": group, "state": state, **_one(case, time_limit_s, cache)}
                        file.write(json.dumps(line) + "\n")
                        file.flush()
                        print(_row(line), flush=True)


def _one(case: tuple, time_limit_s: float, cache: str) -> dict[str, object]:
    command = [sys.executable, __file__, "one", json.dumps([*case, time_limit_s])]
    environment = {**os.environ, "XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


HEADER = "model             devices  layers  meshes   cold s   warm s  search s  first s      step s     gap  RSS GiB"


def _name(line: dict) -> str:
    return " ".join([line["model"], *(str(value) for value in line["set"].values())])


def _row(line: dict, warm: dict | None = None) -> str:
    warm = warm or line
    step = f"{warm['step_s']:10.4g}" if warm["step_s"] else "         -"
    gap = f"{warm['gap']:7.2%}" if warm["gap"] is not None else "      -"
    first = f"{warm['first_plan_s']:7.2f}" if warm["first_plan_s"] is not None else "      -"
    rss = max(line["rss_bytes"], warm["rss_bytes"]) / 2**30
    seconds = f"{line['process_s']:7.2f}  {warm['process_s']:7.2f}  {warm['search_s']:8.2f}"
    numbers = f"{line['n_devices']:8}  {line['n_layers']:6}  {line['n_meshes']:6}"
    return f"{_name(line):16} {numbers}  {seconds}  {first}  {step} {gap}  {rss:7.2f}"


def table(path: Path) -> None:
    """Cold and warm of each case in one row."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    print(HEADER)
    for cold, warm in zip(lines[::2], lines[1::2], strict=True):
        if cold["group"] in ("case", "mixed"):
            print(_row(cold, warm))


def plot(path: Path, out: Path) -> None:
    """Two panels, both axes logarithmic: warm search time against devices, and against layers."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    warm = [line for line in lines if line["state"] == "warm"]
    panels = [
        _panel(20, "devices, Llama 7B", [(x["n_devices"], x["search_s"]) for x in warm if x["group"] == "devices"]),
        _panel(400, "layers, 64 devices", [(x["n_layers"], x["search_s"]) for x in warm if x["group"] == "layers"]),
    ]
    style = "text{font:12px sans-serif;fill:#555}path{fill:none;stroke:#2266aa;stroke-width:2}circle{fill:#2266aa}"
    frame = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 260" role="img">'
    title = "<title>Search time in processor seconds against devices and against layers</title>"
    out.write_text(f"{frame}{title}<style>{style}line{{stroke:#ddd}}</style>{''.join(panels)}</svg>\n")


def _panel(left: int, label: str, points: list[tuple[float, float]]) -> str:
    from math import log10

    width, height, lowest, decades = 300, 180, 0.1, 3
    first, last = log10(points[0][0]), log10(points[-1][0])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (log10(x) - first) / (last - first)
        return left + 40 + across * width, 20 + height * (1 - (log10(max(y, lowest)) - log10(lowest)) / decades)

    grid = ""
    for decade in range(decades + 1):
        seconds = lowest * 10**decade
        _, y = place(points[0][0], seconds)
        grid += f'<line x1="{left + 40}" x2="{left + 40 + width}" y1="{y:.1f}" y2="{y:.1f}"/>'
        grid += f'<text x="{left + 34}" y="{y + 4:.1f}" text-anchor="end">{seconds:g} s</text>'
    marks = ""
    for x, y in points:
        across, down = place(x, y)
        marks += f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3"/>'
        marks += f'<text x="{across:.1f}" y="{20 + height + 16}" text-anchor="middle">{x:g}</text>'
    line = " L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in points))
    caption = f'<text x="{left + 40 + width / 2}" y="{20 + height + 36}" text-anchor="middle">{label}</text>'
    return f'{grid}<path d="M{line}"/>{marks}{caption}'


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("run", "measure cases"), ("table", "print tables"), ("plot", "draw search times")):
        command = commands.add_parser(name, help=text)
        command.add_argument("file", type=Path, help="JSON lines")
        if name == "plot":
            command.add_argument("out", type=Path, help="the SVG to write")
        if name == "run":
            command.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, metavar="S", help="of each search")
            command.add_argument("--group", choices=GROUPS, action="append", help="only these cases; may be repeated")
    commands.add_parser("one").add_argument("case", help="as `run` calls it")
    given = parser.parse_args()
    if given.command == "one":
        measure(*json.loads(given.case))
    elif given.command == "run":
        run(given.file, given.time_limit, given.group or tuple(GROUPS))
    elif given.command == "table":
        table(given.file)
    else:
        plot(given.file, given.out)


if __name__ == "__main__":
    main()
