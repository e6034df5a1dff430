"""The plans autoplan picks against programs tuned by hand, in one job on the same devices.

    python benchmarks/hand_tuned.py emit FOLDER [--profile FILE] [--hw h200_x4/2] [--rivals N]           needs autoplan
    python benchmarks/hand_tuned.py run MODEL RESULTS.jsonl [--programs FOLDER/MODEL] [--seconds S]  needs torch only
    python benchmarks/hand_tuned.py table RESULTS.jsonl              one line per model
    python benchmarks/hand_tuned.py plans RESULTS.jsonl [--hw NAME]  one line per emitted program; --hw needs autoplan

`emit` writes the program of the plan that autoplan picks for each model of hand_tuned_cases.csv, with nothing fixed, as
FOLDER/MODEL/plan_00, and after it its N fastest rivals by the estimate, each the best plan of a kind. `run` runs these
and then, until S seconds are over, programs as one writes and tunes them by hand (hand_tuned_programs.py), in the order
of hand_tuned_space.py: the same model, seed, batches, optimizer and precision. Started again without --programs, it
goes on where it stopped. A plan may leave devices idle.

A row is the median of the steps after warm-up, each step that of the slowest rank, and the largest allocated memory of
any rank. A program that does not fit, fails, or is far behind the fastest after its warm-up is a row too.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from hand_tuned_space import Configuration, Tried, next_try, parse_fixed, read_cases, read_rows, tried_of

HERE = Path(__file__).parent
CASES = HERE / "hand_tuned_cases.csv"
# What the rivals of a pick have fixed: a reader who doubts the pick would try the best plan that has it.
KINDS = (
    *("zero=0", "zero=1", "zero=2", "zero=3", "tp=2", "tp=4", "pp=2", "pp=4", "tp=1,pp=1"),
    *("recompute=full", "compile=off", "cuda_graph=off", "cuda_graph=on", "generated=on", "generated=off"),
)


# ------------------------------------------------------------------------------------------------------- emit


def emit(folder: Path, *, cases: Path, profile: Path | None, hw: str, rivals: int, only: list[str]) -> None:
    from autoplan import AutoplanError, api
    from autoplan.options import Options

    for case in read_cases(cases, only):
        options = Options(global_batch=case.global_batch, profile=profile and str(profile))
        try:
            asked = api.make_problem(case.file, hw=hw, overrides=case.overrides, options=options)
            answer = api.solve(asked)
            if answer.result.best is None:
                print(f"{case.name}: {answer.result.why_nothing}", flush=True)
                continue
            others = rivals_of(asked, answer, n_most=rivals)
            (folder / case.name).mkdir(parents=True, exist_ok=True)
            for i, given in enumerate([answer, *others]):
                api.emit(asked, given, folder / case.name / f"plan_{i:02}", force=True)
                print(f"{case.name}/plan_{i:02}: {line_of(given)}", flush=True)
        except AutoplanError as error:
            print(f"{case.name}: {error}", flush=True)


def rivals_of(asked, answer, *, n_most: int) -> list:
    """The best plan of each kind but the pick, the fastest by the estimate first."""
    from autoplan import AutoplanError, api
    from autoplan.checks.options import parse_fix

    found = []
    for kind in KINDS if n_most else ():
        try:
            other = api.solve(replace(asked, options=replace(asked.options, fix=parse_fix(kind.split(",")))))
        except AutoplanError:  # this model or number of devices has no such plan
            continue
        known = [given.best.plan for given in (answer, *found)]
        if other.result.best is not None and other.best.plan not in known:
            found.append(other)
    return sorted(found, key=lambda given: given.best.estimate.step_s)[:n_most]


def line_of(answer) -> str:
    from autoplan.report.plan import describe_plan

    return f"{answer.best.estimate.step_s:.4f} s  {' '.join(describe_plan(answer.best.plan).split())}"


# ------------------------------------------------------------------------------------------------------- run


def run(
    name: str,
    results: Path,
    *,
    cases: Path,
    programs: Path | None,
    seconds: float,
    fix: list[str],
    tries: int | None,
    **settings,
) -> None:
    """The emitted programs, then the hand-written ones until the time is over."""
    stop_s = time.monotonic() + seconds
    [case], fixed = read_cases(cases, [name]), parse_fixed(fix)
    os.environ["OMP_NUM_THREADS"] = "1"  # a process that forks has one thread,
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # and may look for devices, but not start CUDA
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # as emitted programs have it
    from hand_tuned_ranks import Job, check_folder, folders_of, plan_of, prediction_of, run_folder

    job = Job(case, results=results.absolute(), stop_s=stop_s, **settings)
    common = common_of(job)
    folders = folders_of(programs) if programs else []
    for folder in folders:
        check_folder(job, folder)
    tried = tried_of([row for row in read_rows(results) if common.items() <= row.items()])
    with results.open("a") as file:

        def write(baseline: str, options: dict, answer: dict, *, start_s: float) -> None:
            row = common | {"baseline": baseline, "options": options} | summary(answer)
            row |= {"wall_s": time.monotonic() - start_s, "date": datetime.date.today().isoformat()}
            file.write(json.dumps(row) + "\n")
            file.flush()
            text = f"{row['step_s']:.4f} s" if row["step_s"] else f"{row['status']} {row.get('error', '')[-300:]}"
            print(f"{name}: {baseline} {options}: {text}", flush=True)

        for folder in folders:
            start_s = time.monotonic()
            options = {"folder": folder.name, "plan": plan_of(folder)}
            write("autoplan", options, prediction_of(folder) | run_folder(job, folder), start_s=start_s)
        run_by_hand(job, tried, write, fixed=fixed, n_most=tries)


def run_by_hand(job, tried: list[Tried], write: Callable, *, fixed: tuple, n_most: int | None) -> None:
    """One configuration after the other, until the time or the space is used up, or `n_most` were tried."""
    from hand_tuned_ranks import Ranks, make_batches

    space, ranks, batches, n_known = job.space(fixed), None, make_batches(job), len(tried)
    try:
        while time.monotonic() < job.stop_s and (n_most is None or len(tried) - n_known < n_most):
            configuration = next_try(space, tried)
            if configuration is None:
                return
            start_s = time.monotonic()
            ranks = ranks or Ranks(job, batches)
            best_s = min((item.step_s for item in tried if item.step_s is not None), default=None)
            answer = ranks.ask(configuration, best_s)
            if answer["status"] not in ("ok", "slow"):
                ranks.end()
                ranks = None
            tried.append(Tried(configuration, answer["status"], summary(answer)["step_s"]))
            write(configuration.strategy, asdict(configuration), answer, start_s=start_s)
    finally:
        if ranks is not None:
            ranks.end()


def common_of(job) -> dict:
    """What all rows of a run have in common."""
    import torch

    found = ["cpu"]
    if job.device == "cuda":  # this process leaves CUDA alone: it could not fork any more
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.splitlines()
        found = [line.split(": ")[1].split(" (")[0] for line in listed]
    sizes = {"ranks": job.n_ranks, "global_batch": job.case.global_batch, "precision": job.precision}
    return {"model": job.case.name, **sizes, "device": found[0], "torch": torch.__version__}


def summary(answer: dict) -> dict:
    """The answer of the ranks with the median and the spread of its steps; of one that ended early, with neither."""
    if answer["status"] != "ok":
        return {"step_s": None, "spread": None} | answer
    steps_s = answer["steps_s"]
    median_s = statistics.median(steps_s)
    return {"step_s": median_s, "spread": (max(steps_s) - min(steps_s)) / median_s} | answer


# --------------------------------------------------------------------------------------------------- table


def table(results: Path) -> str:
    """One line per model; "ratio" is the best by hand over autoplan's, "regret" autoplan's over its own best."""
    groups: dict[tuple, list[dict]] = {}
    for row in read_rows(results):
        groups.setdefault((row["model"], row["ranks"], row["precision"]), []).append(row)
    head = (
        "model",
        "ranks",
        "by hand",
        "GiB",
        "predicted",
        "autoplan",
        "GiB",
        "ratio",
        "regret",
        "tried",
        "best by hand",
    )
    lines = [head, *(table_line(part) for rows in groups.values() for part in parts_by_norm(rows))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in range(1, len(widths))), line[-1]])
        for line in lines
    )


def parts_by_norm(rows: list[dict]) -> list[list[dict]]:
    """Those by hand that take the norm of the gradients, and those that do not, each beside autoplan's."""
    own = [row for row in rows if row["baseline"] == "autoplan"]
    by_hand: dict[bool, list[dict]] = {}
    for row in rows:
        if row["baseline"] != "autoplan":
            by_hand.setdefault(row["options"].get("gradient_norm", False), []).append(row)
    return [own + part for part in by_hand.values()] or [own]


def table_line(rows: list[dict]) -> tuple[str, ...]:
    own = [row for row in rows if row["baseline"] == "autoplan"]
    by_hand = [row for row in rows if row["baseline"] != "autoplan"]
    first = min((row["options"]["folder"] for row in own), default="")
    rows_of_first = [row for row in own if row["options"]["folder"] == first]
    chosen = fastest(rows_of_first)
    best, best_own = fastest(by_hand), fastest(own)
    which = str(Configuration(**best["options"])) if best else "-"
    ratio = f"{best['step_s'] / chosen['step_s']:.3f}" if best and chosen else "-"
    regret = f"{chosen['step_s'] / best_own['step_s'] - 1:.1%}" if chosen and len(own) > 1 else "-"
    predicted_s = (chosen or {}).get("predicted_step_s")
    figures = (
        *step_and_memory(best),
        f"{predicted_s:.4f} s" if predicted_s else "-",
        *(step_and_memory(chosen) if chosen or not rows_of_first else (rows_of_first[0]["status"], "-")),
    )
    return (rows[0]["model"], str(rows[0]["ranks"]), *figures, ratio, regret, f"{len(by_hand)}+{len(own)}", which)


def plans(results: Path, hw: str | None, profile: Path | None) -> str:
    """One line per emitted program: predicted then and, on `hw`, by today's prices; measured; how far each was off."""
    lines = []
    for row in read_rows(results):
        if row["baseline"] != "autoplan" or "plan" not in row["options"]:
            continue
        predictions_s = [row["predicted_step_s"], *([] if hw is None else [predicted_again_s(row, hw, profile)])]
        step_s = row["step_s"]
        off = [f"{predicted_s / step_s - 1:+.1%}" for predicted_s in predictions_s] if step_s else [row["status"]]
        seconds = [f"{seconds:.4f} s" for seconds in (*predictions_s, step_s) if seconds]
        head = f"{row['model']:12}  {row['options']['folder']}  {plan_words(row['options']['plan']):68}"
        lines.append("  ".join([head, *seconds, *off]))
    return "\n".join(lines)


def plan_words(plan: dict) -> str:
    mesh = plan["mesh"]
    words = [f"dp {mesh['dp']} tp {mesh['tp']} pp {mesh['pp']} ZeRO {mesh['zero_stage']}"]
    words.append(f"{mesh['micro_batch_size']} x {mesh['n_micro_batches']}")
    words += [f"{mesh['schedule']} {mesh['n_chunks']}"] if mesh["pp"] > 1 else []
    words += [name for name in ("compile", "cuda_graph", "generated") if mesh[name]]
    words += [f"{plan['recompute']} recompute"] if plan["recompute"] != "none" else []
    return " ".join(words)


def predicted_again_s(row: dict, hw: str, profile: Path | None) -> float:
    from autoplan import api
    from autoplan.answers.answer import plan_from_dict
    from autoplan.options import Options

    [case] = read_cases(CASES, [row["model"]])
    measured = profile and str(profile)
    options = Options(global_batch=case.global_batch, precision=row["precision"], profile=measured)
    asked = api.make_problem(case.file, hw=hw, overrides=case.overrides, options=options)
    return api.judge(asked, plan_from_dict(row["options"]["plan"], where=f"{row['model']}: plan")).step_s


def fastest(rows: list[dict]) -> dict | None:
    return min((row for row in rows if row["step_s"] is not None), key=lambda row: row["step_s"], default=None)


def step_and_memory(row: dict | None) -> tuple[str, str]:
    if row is None:
        return "-", "-"
    peak = row["peak_allocated_bytes"]
    return f"{row['step_s']:.4f} s", "-" if peak is None else f"{peak / 2**30:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    emitting, running = actions.add_parser("emit"), actions.add_parser("run")
    for action in (emitting, running):
        action.add_argument("--cases", type=Path, default=CASES)
    emitting.add_argument("folder", type=Path)
    emitting.add_argument("--profile", type=Path, help="of `autoplan profile`")
    emitting.add_argument("--hw", default="h200_x4/2")
    emitting.add_argument("--rivals", type=int, default=0, help="so many plans of other kinds too")
    emitting.add_argument("--only", nargs="*", default=[], metavar="MODEL")
    running.add_argument("name", metavar="MODEL")
    running.add_argument("results", type=Path)
    running.add_argument("--programs", type=Path, help="emitted folder, or one that holds some")
    running.add_argument("--ranks", dest="n_ranks", type=int, default=2)
    running.add_argument("--seconds", type=float, default=300.0)
    running.add_argument(
        "--fix", nargs="*", default=[], metavar="NAME=VALUE", help="what all by hand have: compile=off"
    )
    running.add_argument("--tries", type=int, help="run at most so many by hand")
    running.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    running.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    printing, listing = actions.add_parser("table"), actions.add_parser("plans")
    for action in (printing, listing):
        action.add_argument("results", type=Path)
    listing.add_argument("--hw", help="predict the plans again, by today's prices on this")
    listing.add_argument("--profile", type=Path, help="and with these measured blocks")
    given = vars(parser.parse_args())
    action = given.pop("action")
    text = {"emit": emit, "run": run, "table": table, "plans": plans}[action](**given)
    if text is not None:
        print(text)


if __name__ == "__main__":
    main()
