"""How long planning takes and how far the plan is proved, on real models and clusters; prints one table.

    python benchmarks/search_speed.py [TIME_LIMIT_S]

`trace s` is a trace without the cache, `space s` solves the tensor-parallel programs of every degree, `search s` is
the search under its time limit; RSS is the largest of the whole process so far.
"""

import resource
import sys
import time
from pathlib import Path

from autoplan.hardware import load_profile
from autoplan.options import DEFAULT_TIME_LIMIT_S, Options
from autoplan.search import search
from autoplan.space import priced_space
from autoplan.trace import model_source, trace_model
from autoplan.units import GiB, KiB

EXAMPLES = Path(__file__).parent.parent / "examples"
CASES = (
    ("gpt.py", "char", 1, 64),
    ("llama.py", "7b", 1, 64),
    ("llama.py", "8b", 1, 128),
    ("llama.py", "7b", 8, 512),
    ("llama.py", "70b", 8, 1024),
    ("gpt.py", "200b", 8, 512),
    ("llama.py", "70b", 128, 2048),
)


def main(time_limit_s: float) -> None:
    print(f"dgx_a100_x8, time limit {time_limit_s:g} s")
    print("model       devices  meshes  trace s  space s  search s      step s    gap  status    RSS GiB")
    for file, size, n_hosts, global_batch in CASES:
        start_s = time.perf_counter()
        graph = trace_model(model_source(EXAMPLES / file, {"size": size}))
        trace_s = time.perf_counter() - start_s
        profile = load_profile("dgx_a100_x8", n_hosts=n_hosts)
        options = Options(global_batch=global_batch, time_limit_s=time_limit_s)
        start_s = time.perf_counter()
        offered = priced_space(graph, profile, options, global_batch=global_batch)
        space_s = time.perf_counter() - start_s
        result = search(offered.space, price=offered.price, options=options, make_plan=offered.make_plan)
        step = f"{result.best.estimate.step_s:10.4g}" if result.best else "         -"
        gap = f"{result.gap:6.1%}" if result.gap is not None else "     -"
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KiB / GiB
        name = f"{Path(file).stem} {size}"
        print(
            f"{name:12} {profile.n_devices:6}  {result.n_meshes:6}  {trace_s:7.2f}  {space_s:7.2f}  "
            f"{result.search_s:8.2f}  {step}  {gap}  {result.status:9} {rss:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_TIME_LIMIT_S)
