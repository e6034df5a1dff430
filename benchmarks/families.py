"""Which model families work under which parallelism: runs every case on CPU processes and prints one table.

    python benchmarks/families.py run RESULTS.jsonl [FAMILY ...]    about 12 minutes on 2 cores
    python benchmarks/families.py table RESULTS.jsonl               Markdown
    python benchmarks/families.py emit FOLDER                       the programs of two-rank cases, for another machine
    python benchmarks/families.py check FOLDER RESULTS.jsonl        runs them on two GPUs (needs torch only)

"exact" means: loss, gradients and parameters of three AdamW steps in float64 differ from one process by less than
1e-9, relative; by less than 1e-5 for models that compute in float32 themselves (norms and routers of many Hugging Face
models). The models are small; sharding is made to look profitable, so that everything that can be split is.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
if sys.argv[1] != "check":
    from distributed.families import FAMILIES, FEATURES, family_plan, n_ranks, sharded_fraction, tolerance
    from distributed.launch import run_ranks
    from distributed.programs import EXAMPLES, MODELS, check_programs, graph_of, prices, write_programs

N_STEPS = 3
TITLES = {"TP 2, split sequence": "TP 2, seq.", "PP 2 x TP 2 x ZeRO 3 x recompute": "all of it"}
EMITTED = ("recompute", "TP 2", "PP 2")
N_AT_ONCE = 6


def run(results: Path, families: list[str]) -> None:
    with results.open("w") as file:
        for title, model in FAMILIES.items():
            if families and model not in families:
                continue
            row = {"family": title, "model": model, "cases": {f: check(model, f) for f in FEATURES}}
            row |= json.loads(subprocess.check_output([sys.executable, __file__, "measure", model], text=True))
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(title, {feature: case["result"] for feature, case in row["cases"].items()}, flush=True)


def check(model: str, feature: str) -> dict[str, object]:
    """How one family fares under one kind of parallelism."""
    try:
        plan = family_plan(model, feature)
    except (KeyError, RuntimeError) as error:
        reason = f"no boundary {error}" if isinstance(error, KeyError) else str(error)
        return {"result": "not possible", "reason": reason}
    with tempfile.TemporaryDirectory() as folder:
        rows = write_programs(Path(folder), {"case": (model, plan)})
        try:
            ranks = run_ranks(check_programs, n_ranks(feature), folder, rows, N_STEPS, timeout_s=120.0)
        except AssertionError as error:
            return {"result": "failed", "reason": str(error)[-600:]}
    largest = max(max(step) for differences in ranks for step in differences["case"])
    case: dict[str, object] = {
        "result": "exact" if largest <= tolerance(model) else "differs",
        "largest_difference": largest,
    }
    if plan.shardings:
        case["sharded_fraction"] = sharded_fraction(model, plan)
    return case


def emit(folder: Path) -> None:
    from autoplan.codegen import generate
    from autoplan.rules import load_rules

    for model in FAMILIES.values():
        file, overrides = MODELS[model]
        for feature in EMITTED:
            program = generate(
                graph_of(model),
                family_plan(model, feature),
                rules=load_rules(),
                header=f"{model}, {feature}",
                model_text=(EXAMPLES / file).read_text(),
                overrides=overrides,
            )
            for path, text in program.files:
                target = folder / f"{model}-{feature.replace(' ', '_')}" / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text)
            (target.parent.parent / "tolerance").write_text(str(tolerance(model)))


def check_emitted(folder: Path, results: Path) -> None:
    """Several programs at once; each checks itself against one process in float64."""
    with ThreadPoolExecutor(N_AT_ONCE) as pool, results.open("w") as file:
        for row in pool.map(check_one, sorted(path.parent for path in folder.glob("*/train.py"))):
            print(json.dumps(row), flush=True)
            file.write(json.dumps(row) + "\n")


def check_one(program: Path) -> dict[str, object]:
    """On the GPUs; on CPU where that fails (grouped products have no float64 there), keeping the reason."""
    import torch

    row: dict[str, object] = {"case": program.name, "torch": torch.__version__}
    if torch.cuda.is_available():
        found = check_on(program, "cuda")
        if "error" not in found:
            return row | {"device": torch.cuda.get_device_name()} | found
        row["gpu_error"] = found["error"]
    return row | {"device": "CPU"} | check_on(program, "cpu")


def check_on(program: Path, device: str) -> dict[str, object]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py", "--device",
        device, "--steps", str(N_STEPS), "--dtype", "float64", "--check", "--clip", "1.0", "--out-json", "checked.json",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, cwd=program, capture_output=True, text=True, timeout=150, check=False)
    except subprocess.TimeoutExpired:
        return {"result": "failed", "error": "timed out"}
    if not (program / "checked.json").exists():
        return {"result": "failed", "error": done.stderr[-800:]}
    steps = json.loads((program / "checked.json").read_text())["steps"]
    largest = max(value for step in steps for value in step["differences"].values())
    is_exact = largest <= float((program / "tolerance").read_text())
    return {"result": "exact" if is_exact else "differs", "largest_difference": largest}


def measure(model: str) -> None:
    """Print the cost of planning one family as JSON; a process of its own, so that its peak memory is its own."""
    from autoplan.rules import load_rules
    from autoplan.solver.solve import minimize
    from autoplan.tensor_parallel.sharding import shard_graph
    from autoplan.tracing.model_source import model_source
    from autoplan.tracing.trace import trace_model

    file, overrides = MODELS[model]
    started_s = time.perf_counter()
    graph = trace_model(model_source(EXAMPLES / file, overrides))
    trace_s = time.perf_counter() - started_s
    sizes = []

    def counted(problem):
        sizes.append(len(problem.costs))
        return minimize(problem, time_limit_s=None)

    started_s = time.perf_counter()
    shard_graph(graph, degree=2, rules=load_rules(), prices=prices(graph, 2), solve=counted)
    row = {
        "trace_s": trace_s,
        "n_ops": len(graph.ops),
        "n_segments": len(graph.segments),
        "n_kinds": len(graph.first_of_kind()),
        "n_columns": sum(sizes),
        "shard_s": time.perf_counter() - started_s,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(row))


def table(results: Path) -> None:
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    titles = (TITLES.get(feature, feature) for feature in FEATURES)
    print("| Family | " + " | ".join(titles) + " | trace s | ops | unique segments | ILP columns | ILP s | GB |")
    print("|---|" + "---|" * (len(FEATURES) + 6))
    for row in rows:
        cells = [cell(row["cases"][feature]) for feature in FEATURES]
        cells += [f"{row['trace_s']:.1f}", str(row["n_ops"]), f"{row['n_kinds']} of {row['n_segments']}"]
        cells += [str(row["n_columns"]), f"{row['shard_s']:.2f}", f"{row['peak_rss_bytes'] / 1e9:.2f}"]
        print(f"| {row['family']} | {' | '.join(cells)} |")
    for row in rows:
        for feature, case in row["cases"].items():
            if case["result"] != "exact":
                print(f"\n{row['family']}, {feature}: {case['result']}: {case.get('reason', case)}")


def cell(case: dict[str, object]) -> str:
    """`exact`, or the largest difference where it is above 1e-9; in brackets which part of the parameters is split."""
    text = str(case["result"])
    if text == "exact" and case["largest_difference"] > 1e-9:
        text = f"{case['largest_difference']:.0e}"
    return f"{text} ({case['sharded_fraction']:.0%})" if "sharded_fraction" in case else text


if __name__ == "__main__":
    action, *rest = sys.argv[1:]
    if action == "run":
        run(Path(rest[0]), rest[1:])
    elif action == "measure":
        measure(rest[0])
    elif action == "emit":
        emit(Path(rest[0]))
    elif action == "check":
        check_emitted(*map(Path, rest))
    else:
        table(Path(rest[0]))
