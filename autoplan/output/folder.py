"""What an output folder holds beside the program, and the answer that it was written for.

    Answer --report_files--> plan.json, report.html, charts, trace, rejected meshes, launch scripts
    folder or plan.json --read_answer--> Answer

`autoplan.files` writes the folder, whole or not at all.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from autoplan.answers.answer import Answer, answer_from_json, answer_to_json
from autoplan.errors import InputError
from autoplan.files import check_folder, read_text_file
from autoplan.output.launch_scripts import LaunchGroup, launch_files, launch_line, mixed_launch_files, mixed_launch_line
from autoplan.parallel_plan import Mesh
from autoplan.plan_words import lanes_of, mesh_values
from autoplan.report.chrome_trace import timeline_to_chrome_json
from autoplan.search.result import Rejection

REPORT_FOLDER = "report"


def report_files(answer: Answer, *, memory: tuple[tuple[tuple[float, int], ...], ...] = ()) -> dict[str, str | bytes]:
    """Everything in the folder that is not the program itself: plan, reports, predicted trace, launch scripts.

    `memory` is what `simulator.simulate.memory_over_time` returns, for the trace and the page.
    """
    from autoplan.html_report import chart_files, plan_page  # a plan without a folder needs no templates

    trace = timeline_to_chrome_json(answer.best.estimate.timeline, memory=memory, lanes=lanes_of(answer.best.plan))
    return {
        "plan.json": answer_to_json(answer) + "\n",
        "report.html": plan_page(answer, memory=memory),
        **{f"{REPORT_FOLDER}/{name}": text for name, text in chart_files(answer, memory=memory).items()},
        "trace.json.gz": gzip.compress(trace.encode(), mtime=0),
        "rejected.csv": rejected_csv(answer.result.rejected),
        **dict(_launch_files(answer)),
    }


def launch_size(answer: Answer) -> dict[str, int]:
    """How many hosts, and processes per host at the most, the plan starts; a plan may leave hosts idle."""
    groups = launch_groups(answer)
    return {
        "n_hosts": sum(group.n_hosts for group in groups),
        "n_devices_per_host": max(group.n_devices_per_host for group in groups),
    }


def launch_groups(answer: Answer) -> tuple[LaunchGroup, ...]:
    """The hosts that the plan starts, in order of rank: of each group of a mixed cluster, or of the one kind."""
    workload, plan = answer.workload, answer.best.plan
    if not plan.groups:
        kind = workload.hardware, workload.n_devices // workload.n_hosts
        return (_launch_group(*kind, n_devices=plan.mesh.n_devices),)
    kinds = zip((workload.groups[own.group] for own in plan.groups), plan.n_devices_of_groups, strict=True)
    return tuple(_launch_group(kind.hardware, kind.n_devices_per_host, n_devices=n) for kind, n in kinds)


def launch_command(answer: Answer) -> str:
    """The command that starts the program of the plan."""
    groups = launch_groups(answer)
    return mixed_launch_line(groups) if len(groups) > 1 else launch_line(**launch_size(answer))


def _launch_files(answer: Answer) -> tuple[tuple[str, str], ...]:
    groups = launch_groups(answer)
    return mixed_launch_files(groups) if len(groups) > 1 else launch_files(answer.workload.model, **launch_size(answer))


def _launch_group(hardware: str, n_devices_per_host: int, *, n_devices: int) -> LaunchGroup:
    n_per_host = min(n_devices_per_host, n_devices)
    return LaunchGroup(hardware, -(-n_devices // n_per_host), n_per_host)


def read_answer(path: str | Path) -> Answer:
    """The answer that an output folder, or a plan.json, holds.

    Raises: InputError when it is missing, incomplete or damaged.
    """
    path = Path(path)
    if path.is_dir():
        check_folder(path)
        path = path / "plan.json"
    elif not path.exists():
        raise InputError.unreadable(
            str(path),
            FileNotFoundError(),
            expected="a folder that plan --out wrote, or a plan.json",
            fix="check the path, or make it: autoplan plan MODEL --out FOLDER",
        )
    return answer_from_json(read_text_file(path), where=str(path))


def rejected_csv(rejected: Sequence[Rejection]) -> str:
    """Every rejected mesh with its reason, as CSV text."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*Mesh.__dataclass_fields__, "reason", "detail", "step_s", "short_bytes"))
    for item in rejected:
        values = mesh_values(item.mesh).values()
        writer.writerow((*values, item.reason, item.detail, item.step_s, item.short_bytes))
    return text.getvalue()
