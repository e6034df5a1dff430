"""Measure the blocks of emitted programs, and nothing else: what each of them runs, as it runs it.

    python benchmarks/case_blocks.py emit PROGRAMS FOLDERS [DEVICES [HARDWARE]]    one folder per model (needs autoplan)
    python benchmarks/case_blocks.py measure FOLDER ROWS.jsonl                     needs torch and one GPU

PROGRAMS is what `predictions.py emit` or `hand_tuned.py emit` wrote. A folder is that of `autoplan profile --emit`,
with the rows in wanted.json that programs on at most DEVICES devices run: their layouts, micro-batch sizes, eager or
compiled, generated code or the user's own classes. `autoplan profile` measures all of their combinations, as a search
may ask for any.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import hand_tuned_space
from predictions import HARDWARE, HERE, cases

WANTED = "wanted.json"
Row = tuple[str, str, int, int, bool, str, bool]  # content, assignment, tp, micro-batch, compiled, format, own class
Model = tuple[str, Path, tuple[tuple[str, object], ...]]  # name, model file, arguments of its build_model


def emit(programs: Path, folders: Path, n_devices: str = "4", hardware: str = HARDWARE) -> None:
    for (name, file, overrides), plans in plans_by_model(programs).items():
        own = [plan for plan in plans if plan.mesh.n_devices <= int(n_devices)]
        if own:
            wanted = emit_model(file, dict(overrides), own, folders / name, hardware)
            n_compiled = sum(row[4] for row in wanted)
            print(f"{folders / name}: {len(wanted)} rows, {n_compiled} of them compiled", flush=True)


def plans_by_model(programs: Path) -> dict[Model, list]:
    """The plans of all programs in a folder."""
    from autoplan.answers.answer import plan_from_dict

    found = defaultdict(list)
    for case in cases():
        name = "_".join(filter(None, (case.model, case.set)))
        found[name, case.file, tuple(case.overrides.items())].append(programs / case.folder / "plan.json")
    for case in hand_tuned_space.read_cases(HERE / "hand_tuned_cases.csv"):
        found[case.name, case.file, tuple(case.overrides.items())] += (programs / case.name).glob("*/plan.json")
    return {
        model: [plan_from_dict(json.loads(path.read_text())["best"]["plan"], where=str(path)) for path in existing]
        for model, paths in found.items()
        if (existing := [path for path in paths if path.exists()])
    }


def emit_model(file: Path, overrides: Mapping[str, object], plans: Sequence, folder: Path, hardware: str) -> set[Row]:
    """The folder of one model, and what its programs run."""
    from autoplan import api

    graph = api.trace_model(file, overrides=overrides)
    wanted = {row for plan in plans for row in rows_of(graph, plan)}
    formats = {plan.mesh.memory_format for plan in plans}
    files = api.measurement_folder(
        file,
        hw=hardware,
        overrides=overrides,
        degrees=sorted({plan.mesh.tp for plan in plans}),
        micro_batch_sizes=sorted({plan.mesh.micro_batch_size for plan in plans}),
        compile="both" if any(plan.mesh.compile for plan in plans) else "off",
        memory_format="both" if len(formats) > 1 else formats.pop(),
    )
    for name, text in {**files, WANTED: json.dumps(sorted(wanted))}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return wanted


def rows_of(graph, plan) -> Iterator[Row]:
    """Each kind of segment, as a plan's program runs it."""
    from autoplan.analysis.executions import execution_of
    from autoplan.graph import GraphFacts
    from autoplan.measured_profile.segment_key import assignment_key, content_key

    mesh, facts = plan.mesh, GraphFacts.of(graph)
    layouts = {assignment.kind: assignment for assignment in plan.shardings}
    keeps_modules = mesh.tp == 1 and mesh.pp == 1 and not mesh.generated
    for kind, segment in graph.first_of_kind().items():
        runs = execution_of(graph, kind, mesh.execution)
        keys = content_key(graph, facts, segment), assignment_key(graph, segment, layouts.get(kind))
        ways = runs.compile, runs.memory_format, keeps_modules and segment.is_block
        yield (*keys, mesh.tp, mesh.micro_batch_size, *ways)


def measure(folder: Path, rows: Path) -> None:
    sys.path.insert(0, str(folder))
    from measuring_program import program

    wanted = {tuple(row) for row in json.loads((folder / WANTED).read_text())}
    all_tasks = program.tasks

    def tasks(plan):
        for task, region in all_tasks(plan):
            names = ("content", "assignment", "tp", "micro_batch_size", "compiled", "memory_format")
            key = (*(task.get(name) for name in names), task.get("module") == "own")
            if task["what"] == "optimizer" or (task["what"] == "segment" and key in wanted):
                yield task, region

    program.tasks = tasks
    program.main(folder, ["--out", str(rows)])


if __name__ == "__main__":
    action, first, second, *rest = sys.argv[1:]
    if action == "emit":
        emit(Path(first), Path(second), *rest)
    else:
        measure(Path(first).absolute(), Path(second).absolute())
