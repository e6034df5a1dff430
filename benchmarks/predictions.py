"""Predicted against measured: emit the program of each case in cases.csv, run it on real devices, print one table.

    python benchmarks/predictions.py emit FOLDER [PROFILE.jsonl|- [HARDWARE N]]  plans each case (needs autoplan)
    python benchmarks/predictions.py run FOLDER RESULTS.jsonl [LINKS [S]]        runs the programs (needs torch, GPUs)
    python benchmarks/predictions.py table RESULTS.jsonl... PROFILE.jsonl DIR    predicts each plan anew, prints a table
    python benchmarks/predictions.py table RESULTS.jsonl... - DIR                eager ones without measured segments
    python benchmarks/predictions.py table RESULTS.jsonl... compiled DIR         compiled ones without measured segments
    python benchmarks/predictions.py table ... -- ...                            runs of other PROFILE and DIR, too
    python benchmarks/predictions.py tables [NAME...]                            all of tables.csv, or some, anew
    python benchmarks/predictions.py worst [N]                                   the N worst steps and peaks of these
    python benchmarks/predictions.py limited RESULTS.jsonl...                    runs with no more memory than planned

`emit` plans for HARDWARE (default: h200_x4) the cases of at most N devices (default: 4).

A row holds what the program measured: the median step after warm-up, and the largest allocated memory of any rank. Bad
rows are rows. A prediction takes the measured segments of PROFILE (`autoplan profile`) and the links of
DIR/LINKS_xN.toml for N devices, or DIR/LINKS.toml (`autoplan hw measure`), where there are any; or DIR is the name of a
hardware profile. Several profiles are A.jsonl+B.jsonl; what both hold is taken from the later one.

`tables` writes them into `results`; a change of a price moves them. Blocks of Hugging Face models are found by the code
that is generated for them, which differs from version to version: only rows of the one that is installed are printed.

`limited` is of runs with LIMIT_MEMORY (`program_runs.py`): of the rank that came closest to its limit.

`run` takes the cases of one kind of links (default: nvlink), which the caller sets through NCCL's variables. It starts
several programs at once on devices of their own, each in processes forked from one that has imported what they need. It
starts none after S seconds; run again, it goes on with what RESULTS does not hold.
"""

import csv
import functools
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from program_runs import RANKS_PER_GPU, Run, import_once

HERE = Path(__file__).resolve().parent
N_WARM_UP = 4
HARDWARE = "h200_x4"
LINE = re.compile(r"^(\S+) +(\S.*?)" + 2 * r" +([\d.]+) +([\d.]+) +([-+][\d.]+)%" + "$", re.MULTILINE)  # of a table
EXAMPLES = {name: HERE.parent / "examples" / f"{name}.py" for name in ("gpt", "llama")}


@dataclass(frozen=True)
class Case:
    """One line of cases.csv; `fix` is what `autoplan plan --fix` takes, and the precision where that is not bf16.

    Passes are a CUDA graph only where it says so.
    """

    links: str
    name: str
    model: str
    set: str
    devices: int
    global_batch: int
    fix: str

    @property
    def folder(self) -> str:
        return f"{self.links}_{self.name.replace(' ', '_')}"

    @property
    def file(self) -> Path:
        return EXAMPLES.get(self.model, HERE / "models" / f"{self.model}.py")

    @property
    def overrides(self) -> dict[str, str | int]:
        """`set` is a size, or several `name=value`."""
        pairs = (item.split("=") for item in (self.set if "=" in self.set else f"size={self.set}").split())
        return {name: int(value) if value.isdecimal() else value for name, value in pairs if value}

    @property
    def fixed(self) -> tuple[tuple[str, str], ...]:
        pairs = dict(item.split("=") for item in self.fix.split(","))
        return tuple({"cuda_graph": "off", **{name: pairs[name] for name in pairs if name != "precision"}}.items())

    @property
    def precision(self) -> str:
        return dict(item.split("=") for item in self.fix.split(",")).get("precision", "bf16")


def cases() -> list[Case]:
    with (HERE / "cases.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [Case(**row | {"devices": int(row["devices"]), "global_batch": int(row["global_batch"])}) for row in rows]


def problem(case: Case, hardware: str, *, profile: Path | None = None, fix: bool = False):
    """One case on this hardware."""
    from autoplan import api
    from autoplan.options import Options

    options = Options(
        global_batch=case.global_batch,
        precision=case.precision,
        fix=case.fixed if fix else (),
        profile=profile and str(profile),
    )
    return api.make_problem(case.file, hw=f"{hardware}/{case.devices}", overrides=case.overrides, options=options)


def as_it_ran(asked, case: Case, plan):
    """The problem, whose head is not padded where that of the program was not: programs of before padded none."""
    if plan.graph_hash in (asked.graph.content_hash(), without_label(asked.graph).content_hash()):
        return asked
    from autoplan.measure_model.lookup import measurements_of

    graph = unpadded_graph(case.file, tuple(case.overrides.items()))
    measured = measurements_of(asked.options, graph, asked.hardware, model=case.file.name)
    return replace(asked, graph=graph, measured=measured)


def without_label(graph):
    """The graph, whose loss has no label, as it was until 2026-11-28 where the model returns it."""
    ops = tuple(replace(op, label="") if op.name == graph.loss else op for op in graph.ops)
    return replace(graph, ops=ops)


def as_traced(plan, graph):
    """The plan, whose last segment takes all that the model returns: of programs of before only what it reads."""
    if plan.graph_hash == graph.content_hash():
        return plan
    inputs, shardings = {kind: segment.inputs for kind, segment in graph.first_of_kind().items()}, []
    layouts = {name: layout for sharding in plan.shardings for name, layout in sharding.values}
    for sharding in plan.shardings:
        missing = [name for name in inputs[sharding.kind] if name not in dict(sharding.values)]
        values = (*sharding.values, *((name, layouts[name]) for name in missing))
        shardings.append(replace(sharding, values=values))
    return replace(plan, graph_hash="", shardings=tuple(shardings))


@functools.cache
def unpadded_graph(file: Path, overrides: tuple[tuple[str, object], ...]):
    from autoplan.tracing.model_source import model_source
    from autoplan.tracing.trace import trace_model

    return trace_model(model_source(file, dict(overrides)))


def emit(folder: Path, profile: str = "-", hardware: str = HARDWARE, most_devices: str = "4") -> None:
    from autoplan import AutoplanError, api

    folder.mkdir(parents=True, exist_ok=True)
    for case in (case for case in cases() if case.devices <= int(most_devices)):
        try:
            asked = problem(case, hardware, profile=None if profile == "-" else Path(profile), fix=True)
            answer = api.solve(asked)
            if answer.result.best is None:
                print(f"{case.folder}: {answer.result.why_nothing}", flush=True)
                continue
            api.emit(asked, answer, folder / case.folder, force=True)
            print(f"{case.folder}: {answer.best.estimate.step_s:.4f} s", flush=True)
        except AutoplanError as error:
            print(f"{case.folder}: {error}", flush=True)


# ------------------------------------------------------------------------------------------------------- running


def run(folder: Path, results: Path, links: str = "nvlink", seconds: str = "inf") -> None:
    stop_s = time.perf_counter() + float(seconds)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.splitlines()
    free, running = list(range(len(found))) * RANKS_PER_GPU, []
    known = {(row["links"], row["case"]) for row in read(results) if not row["exit_code"]}
    waiting = [case for case in cases() if case.links == links and (links, case.name) not in known]
    waiting = [case for case in waiting if case.devices <= len(free) and (folder / case.folder / "train.py").exists()]
    waiting.sort(key=lambda case: -case.devices)
    for case in {case.model: case for case in waiting}.values():
        import_once(folder.absolute() / case.folder)
    with results.open("a") as file:
        while waiting or running:
            waiting = waiting if time.perf_counter() < stop_s else []
            fitting = next((case for case in waiting if case.devices <= len(free)), None)
            if fitting is not None:
                waiting.remove(fitting)
                running.append(
                    Run(fitting, folder.absolute() / fitting.folder, [free.pop() for _ in range(fitting.devices)])
                )
                continue
            time.sleep(0.05)
            for done in [item for item in running if item.is_done()]:
                running.remove(done)
                free += done.devices
                row = done.row() | {"torch": torch.__version__, "device": found[0].split(": ")[1].split(" (")[0]}
                file.write(json.dumps(row) + "\n")
                file.flush()
                brief = {key: row[key] for key in ("case", "exit_code", "run_s")}
                print(json.dumps(brief | {"step_s": median_step_s(row)}), row.get("error", ""), flush=True)


def read(results: Path) -> list[dict]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def median_step_s(row: dict) -> float | None:
    return statistics.median(step["step_s"] for step in row["steps"][N_WARM_UP:]) if "steps" in row else None


def spread(row: dict) -> float:
    """The slowest less the fastest step after warm-up, over the median."""
    steps_s = [step["step_s"] for step in row["steps"][N_WARM_UP:]]
    return (max(steps_s) - min(steps_s)) / statistics.median(steps_s)


# --------------------------------------------------------------------------------------------------- the table


def predictions(results: list[Path], profile: str, hardware: Path) -> Iterator[tuple[dict, object]]:
    """Each run, with the estimate of its plan by today's cost model; without a profile the eager or compiled ones."""
    from autoplan import api
    from autoplan.answers.answer import plan_from_dict

    by_name = {(case.links, case.name): case for case in cases()}
    with profile_file(profile) as file:
        for row in (row for result in results for row in read(result)):
            case = by_name[row["links"], row["case"]]
            if profile == ("-" if row["plan"]["mesh"]["compile"] else "compiled"):
                continue
            links = [hardware / f"{case.links}{of}.toml" for of in (f"_x{case.devices}", "")]
            other = HARDWARE if hardware.is_dir() else hardware.name
            name = next((str(found) for found in links if found.exists()), other)
            plan = plan_from_dict(row["plan"], where=case.name)
            with nullcontext() if row.get("takes_16_bits") else widened_losses():
                asked = as_it_ran(problem(case, name, profile=file), case, plan)
                best = api.score(asked, as_traced(plan, asked.graph)).best
            yield row, best


@contextmanager
def widened_losses() -> Iterator[None]:
    """Price as programs were until 2026-11-29: a loss that is split over classes was given logits in float32."""
    from autoplan.cost_models.loss import RULES

    name = "aten.cross_entropy_loss.default"
    with ExitStack() as as_before:  # with a rule of its own, so that what is remembered under the other is not taken
        as_before.enter_context(mock.patch.dict(RULES, {name: replace(RULES[name], extra_saved_bytes=kept_by_loss)}))
        for module in ("cost.local_segment", "codegen.loss"):
            as_before.enter_context(mock.patch(f"autoplan.{module}.is_narrow_loss", lambda *_: False))
        yield


def kept_by_loss(call) -> int:
    from autoplan.cost_models.loss import log_probabilities

    return log_probabilities(call)


@contextmanager
def profile_file(given: str) -> Iterator[Path | None]:
    """The file of one profile, or one that holds several; None where the argument asks for no profile."""
    first, *others = map(Path, given.split("+"))
    if not others:
        yield None if given in ("-", "compiled") else first
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "profile.jsonl"
        file.write_text("".join(part.read_text() for part in (first, *others)))
        yield file


def all_predictions(given: list[str]) -> Iterator[tuple[dict, object]]:
    """Those of each group of files; groups end at "--"."""
    while given:
        end = given.index("--") if "--" in given else len(given)
        (*results, profile, hardware), given = given[:end], given[end + 1 :]
        yield from predictions([*map(Path, results)], profile, Path(hardware))


@dataclass(frozen=True)
class Compared:
    """One run beside its prediction: pairs are predicted and measured, bytes those of the rank that needs most.

    `bound` is "host-bound" or "device-bound", by the prediction; `trust` and `spread` are as the functions say.
    """

    links: str
    case: str
    bound: str
    trust: str
    spread: float
    step_s: tuple[float, float]
    allocated_bytes: tuple[int, int]
    reserved_bytes: tuple[int, int]
    step_interval_s: tuple[float, float]
    allocated_interval_bytes: tuple[float, float]

    @property
    def group(self) -> str:
        return f"{self.links}, {self.bound}"


def compared(row: dict, best: object) -> Compared:
    """`best` is the estimate of the plan that ran, as an answer has it."""
    from autoplan.answers.answer import allocated_interval_bytes, step_interval_s, trust
    from autoplan.answers.intervals import is_host_bound

    estimate = best.estimate
    return Compared(
        links=row["links"],
        case=row["case"],
        bound="host-bound" if is_host_bound(estimate.breakdown.launch_s, estimate.step_s) else "device-bound",
        trust=trust(estimate),
        spread=spread(row),
        step_s=(estimate.step_s, median_step_s(row)),
        allocated_bytes=(max(estimate.allocated_bytes), max(row["peak_allocated_bytes_per_rank"])),
        reserved_bytes=(max(estimate.allocator_bytes), max(row["peak_reserved_bytes_per_rank"])),
        step_interval_s=step_interval_s(best),
        allocated_interval_bytes=max(allocated_interval_bytes(best)),
    )


def table(*given: str) -> None:
    print(f"{'links':12}{'case':26}{'pred. s':>9}{'meas. s':>9}{'error':>8}{'pred. GiB':>11}{'GiB':>7}{'error':>8}")
    runs = []
    for row, best in all_predictions(list(given)):
        print(line(row, best), flush=True)
        if not row["exit_code"]:
            runs.append(compared(row, best))
    if not runs:
        print("no run that was asked for came to its end")
        return
    print_step_errors(runs)
    print_memory_errors(runs)
    print_intervals(runs)


def tables(*names: str) -> None:
    """Print the tables of tables.csv that are named, or all, into `results`."""
    import transformers

    rows = {row["table"]: row for row in table_rows()}
    if unknown := sorted(set(names) - set(rows)):
        raise SystemExit(f"tables: found {', '.join(unknown)}\n  expected: some of {', '.join(rows)}")
    os.chdir(HERE / "results")
    for row in (rows[name] for name in names or rows):
        if not transformers.__version__.startswith(f"{row['transformers']}."):
            print(f"{row['table']}: needs transformers {row['transformers']}, found {transformers.__version__}")
            continue
        printed = io.StringIO()
        with redirect_stdout(printed):
            table(*row["arguments"].split())
        Path(f"{row['table']}.txt").write_text(printed.getvalue())
        print(row["table"], flush=True)


def table_rows() -> list[dict[str, str]]:
    """`table`, `transformers` and `arguments` of each row of tables.csv."""
    with (HERE / "tables.csv").open() as file:
        return list(csv.DictReader(file))


def worst(n_most: str = "10") -> None:
    """Print the runs whose steps, and those whose peaks, are furthest off in any table, each once, for Markdown."""
    found: dict[tuple[str, ...], tuple[float, str]] = {}
    for row in table_rows():
        for match in LINE.finditer((HERE / "results" / f"{row['table']}.txt").read_text()):
            links, case, *cells = match.groups()
            for unit, (predicted, measured, off) in (("s", cells[:3]), ("GiB", cells[3:])):
                run = (unit, links, case, measured)
                told = f"| {case}, {links} | `{row['table']}` | {measured} {unit} | {predicted} | {float(off):+.0f} % |"
                found[run] = max(found.get(run, (0.0, "")), (abs(float(off)), told))
    for unit in ("s", "GiB"):
        ranked = sorted((item for run, item in found.items() if run[0] == unit), reverse=True)
        print(*(told for _, told in ranked[: int(n_most)]), sep="\n")


def line(row: dict, best: object) -> str:
    """A run beside its prediction, as the table has it."""
    start = f"{row['links']:12}{row['case']:26}{best.estimate.step_s:9.4f}"
    if row["exit_code"]:
        return f"{start}   failed with exit code {row['exit_code']}"
    run = compared(row, best)
    predicted, measured = run.allocated_bytes
    cells = f"{run.step_s[1]:9.4f}{error(run.step_s):+8.1%}{predicted / 2**30:11.1f}{measured / 2**30:7.1f}"
    return f"{start}{cells}{error(run.allocated_bytes):+8.1%}"


def print_step_errors(runs: list[Compared]) -> None:
    for group, found in grouped(runs, lambda run: run.group):
        wander = f"slowest less fastest step of one run {statistics.mean(run.spread for run in found):.0%}"
        print(f"{group}: {len(found)} runs, {summary([error(run.step_s) for run in found])}; {wander}")
    first_s: dict[tuple[str, str], float] = {}
    again = [(run, first_s.setdefault((run.links, run.case), run.step_s[1])) for run in runs]
    for bound, found in grouped([pair for pair in again if pair[0].step_s[1] != pair[1]], lambda pair: pair[0].bound):
        said = summary([run.step_s[1] / first - 1 for run, first in found]).replace("error", "change")
        print(f"the same case again, {bound}: {len(found)} runs, {said}")
    worst = sorted(runs, key=lambda run: -abs(error(run.step_s)))[:10]
    print("worst: " + ", ".join(f"{run.case} {error(run.step_s):+.0%}" for run in worst))


def print_memory_errors(runs: list[Compared]) -> None:
    print(f"memory: {len(runs)} runs, {summary([error(run.allocated_bytes) for run in runs])}")
    errors = [error(run.reserved_bytes) for run in runs]
    n_under = sum(each < 0 for each in errors)
    print(f"reserved: {len(runs)} runs, {summary(errors)}, {n_under} predicted too small")


def print_intervals(runs: list[Compared]) -> None:
    """What `autoplan.answers.intervals` is made from, and how often its intervals hold."""
    from autoplan.answers.intervals import COMPUTED, coverage, errors_of
    from autoplan.cost.table import MEASURED

    pairs: list[tuple[str, tuple[float, float]]] = []
    for run in runs:
        source = COMPUTED if run.trust == COMPUTED else "with a profile"
        pairs.append((f"step, {source}, {run.bound}", run.step_s))
        source = run.trust if run.trust in (MEASURED, COMPUTED) else "scaled or calibrated"
        pairs.append((f"memory, {source}", run.allocated_bytes))
    for name, found in grouped(pairs, lambda pair: pair[0]):
        errors = errors_of([pair for _, pair in found], source="")
        print(f"{name}: Errors({errors.rms:.2g}, {errors.n_runs})")
    steps = coverage([(run.step_interval_s, run.step_s[1]) for run in runs])
    peaks = coverage([(run.allocated_interval_bytes, run.allocated_bytes[1]) for run in runs])
    print(f"inside the 90 % interval: {steps:.0%} of the steps, {peaks:.0%} of the peaks")


def limited(*results: str) -> None:
    """What torch's allocator was given and what it took, in GiB; a program that did not fit says so.

    Behind it seconds per step, and how often in one the allocator ran short and gave memory back, where that was told.
    """
    rows = [row for file in results for row in read(Path(file))]
    print(f"{'case':36}{'given':>8}{'held':>8}{'share':>7}{'step s':>9}{'short':>7}")
    for row in rows:
        held = row.get("peak_reserved_bytes_per_rank")
        limits = row.get("limit_bytes_per_rank", row.get("offered_bytes_per_rank"))
        if held is None:
            is_short = "OutOfMemoryError" in row["error"]
            print(f"{row['case']:36}{max(limits) / 2**30:8.2f}{'does not fit' if is_short else 'failed':>15}")
            continue
        share, limit, taken = max((taken / limit, limit, taken) for taken, limit in zip(held, limits, strict=True))
        n_short = retries_per_step(row)
        short = "" if n_short is None else f"{n_short:7.1f}"
        cells = f"{limit / 2**30:8.2f}{taken / 2**30:8.2f}{share:7.0%}{median_step_s(row):9.4f}{short}"
        print(f"{row['case']:36}{cells}")
    n_ended = sum(row["exit_code"] == 0 for row in rows)
    print(f"{n_ended} of {len(rows)} came to their end")


def retries_per_step(row: dict) -> float | None:
    """How often the allocator of rank 0 asked again for memory; None where the program did not tell."""
    of_steps = [step.get("n_retries_for_memory") for step in row["steps"][N_WARM_UP:]]
    if None not in of_steps:
        return statistics.mean(of_steps)
    so_far = [step.get("n_allocator_retries") for step in row["steps"][N_WARM_UP - 1 :]]  # programs of 2026-11-29
    return None if None in so_far else (so_far[-1] - so_far[0]) / len(of_steps)


def grouped(items: list, key: Callable[[object], str]) -> list[tuple[str, list]]:
    found: dict[str, list] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return sorted(found.items())


def error(pair: tuple[float, float]) -> float:
    """Of a prediction, relative to what was measured."""
    predicted, measured = pair
    return predicted / measured - 1


def summary(errors: list[float]) -> str:
    mean, worst = statistics.mean(map(abs, errors)), max(errors, key=abs)
    return f"mean absolute error {mean:.1%}, median {statistics.median(errors):+.1%}, worst {worst:+.1%}"


if __name__ == "__main__":
    action, *given = sys.argv[1:]
    if action in ("table", "tables", "worst", "limited"):
        {"table": table, "tables": tables, "worst": worst, "limited": limited}[action](*given)
    elif action == "run":
        run(*(Path(text).absolute() for text in given[:2]), *given[2:])
    elif action == "emit":
        emit(Path(given[0]).absolute(), *given[1:])
    else:
        raise SystemExit(f"found {action!r}\n  expected: emit, run, table, tables, worst or limited")
