"""verify: what the program reports becomes parity, a comparison, or an error with the right exit code."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from autoplan.answers.answer import Answer, allocated_interval_bytes, step_interval_s
from autoplan.errors import InputError, MeasureError, ToleranceError, UsageError
from autoplan.files import write_folder
from autoplan.output.folder import report_files
from autoplan.output.verify import (
    ALLOCATED,
    N_BEFORE_REPLAYS,
    NEEDED,
    RESERVED,
    STEP,
    Verification,
    outside_text,
    verification_text,
    verify_folder,
)
from autoplan.runtime.stages.cuda_graph import N_STEPS_BEFORE
from autoplan.units import GiB

AGREES = {"loss": 1e-15, "gradient": 1e-14, "parameter": 0.0}
# 0.9 + 0.1 + (0.05 + 0.05) + 0.3 + 0.2 = 1.6 s; the other ranks began their optimizer earlier
PROFILE = {
    "step_s": 1.6,
    "compute_s": 0.9,
    "exposed_s": {"dp": {"all_gather": 0.05, "reduce_scatter": 0.05}, "pp": {"send_recv": 0.3}},
    "optimizer_s": 0.1,
    "idle_s": 0.2,
    "until_optimizer_s": 1.5,
}
OTHER = {**PROFILE, "compute_s": 0.7, "idle_s": 0.4, "until_optimizer_s": 1.4}


@pytest.fixture(autouse=True)
def _four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)


@pytest.fixture
def folder(tmp_path: Path, answer: Answer) -> Path:
    write_folder(tmp_path / "out", {"train.py": "", **report_files(answer)})
    return tmp_path / "out"


def _program(*, code: int = 0, device: str = "cpu", times_s=(9.0, 1.5, 1.7), differences=AGREES, **measured):
    """Stands for the launched program: keeps its command line, writes its report."""
    seen: list[str] = []

    def start(command, cwd: Path) -> int:
        seen.extend(command)
        is_wrong = differences is not None and max(differences.values()) > 1e-9
        steps = [
            {
                "step": i,
                "step_s": s,
                "differences": differences,
                "is_wrong": is_wrong,
                "differs_most_in": "a.weight (1e-3)",
            }
            for i, s in enumerate(times_s)
        ]
        report = Path(command[command.index("--out-json") + 1])
        report.write_text(json.dumps({"device": device, "steps": steps, **measured}))
        return code

    return start, seen


def _verified(folder: Path, **measured) -> Verification:
    """On the planned device; 4 ranks: 2 pipeline ranks of 2 data-parallel ranks."""
    start, _ = _program(device="Toy 1T", differences=None, **measured)
    return verify_folder(folder, n_steps=3, device="cuda", start=start)


def test_cpu_run_checks_parity_in_float64_on_every_process_of_the_plan(folder: Path) -> None:
    start, seen = _program()
    found = verify_folder(folder, n_steps=3, device="cpu", start=start)
    assert found.parity is True and found.measured_step_s is None
    assert "--nproc-per-node=4" in seen
    assert seen[seen.index("--dtype") + 1] == "float64" and "--check" in seen
    text = verification_text(found)
    assert "equal one process" in text
    assert "predicted  measured" not in text and "Run on cpu. The step (1.6 s predicted)" in text
    assert "compared with one:" not in text and "Compared in" not in text
    assert "one process was compared with one: plan --fix dp=2" in verification_text(replace(found, n_processes=1))


def test_a_model_that_fails_in_float64_is_compared_in_float32_and_that_is_said(tmp_path: Path, answer: Answer) -> None:
    failing = replace(answer, fails_in_float64=True)
    write_folder(tmp_path / "cast", {"train.py": "", **report_files(failing)})
    start, seen = _program()
    found = verify_folder(tmp_path / "cast", n_steps=3, device="cpu", start=start)
    assert seen[seen.index("--dtype") + 1] == "float32" and found.parity_dtype == "float32"
    assert "Compared in float32, not in float64" in verification_text(found)
    start, _ = _program(device="Toy 1T", differences=None)
    assert "Compared" not in verification_text(verify_folder(tmp_path / "cast", n_steps=3, device="cuda", start=start))


def test_on_cpu_all_hosts_are_processes_of_this_machine_and_on_gpus_refused(tmp_path: Path, answer: Answer) -> None:
    of_two_hosts = replace(answer, workload=replace(answer.workload, n_hosts=2))
    write_folder(tmp_path / "two", {"train.py": "", **report_files(of_two_hosts)})
    start, seen = _program()
    assert verify_folder(tmp_path / "two", n_steps=1, device="cpu", start=start).parity is True
    assert "--nproc-per-node=4" in seen
    with pytest.raises(InputError, match=r"2 hosts(.|\n)*--device cpu"):
        verify_folder(tmp_path / "two", n_steps=1, device="cuda", start=start)


def test_step_time_on_the_planned_device_is_the_median_without_warm_up(folder: Path) -> None:
    # the median of 1.5 and 1.7 is 1.6 s, which is the estimate
    start, seen = _program(device="Toy 1T", differences=None)
    found = verify_folder(folder, n_steps=3, device="cuda", start=start)
    assert found.measured_step_s == pytest.approx(1.6)
    assert found.within_interval is True and found.parity is None
    assert "--check" not in seen and seen[seen.index("--profile-steps") + 1] == "4:5"


def test_steps_before_the_replays_of_a_graph_are_run_besides_and_not_counted(tmp_path: Path, answer: Answer) -> None:
    plan = replace(answer.best.plan, mesh=replace(answer.best.plan.mesh, cuda_graph=True))
    captured = replace(answer, result=replace(answer.result, best=replace(answer.best, plan=plan)))
    write_folder(tmp_path / "out", {"train.py": "", **report_files(captured)})
    start, seen = _program(device="Toy 1T", differences=None, times_s=(9.0, 5.0, 7.0, 1.8, 1.5, 1.7))
    found = verify_folder(tmp_path / "out", n_steps=3, device="cuda", start=start)
    assert found.measured_step_s == pytest.approx(1.6)
    assert seen[seen.index("--steps") + 1] == "8" and seen[seen.index("--profile-steps") + 1] == "7:8"
    assert N_BEFORE_REPLAYS == N_STEPS_BEFORE + 1


def test_step_time_outside_the_interval_is_said(folder: Path, answer: Answer) -> None:
    low_s, high_s = step_interval_s(answer.best)
    for step_s in (low_s * 0.99, high_s * 1.01):
        found = _verified(folder, times_s=(9.0, step_s, step_s))
        assert found.within_interval is False
        assert "OUTSIDE" in verification_text(found)
        assert outside_text(found).startswith(f"{STEP} ")


def test_memory_is_judged_per_pipeline_rank_by_its_largest_rank(folder: Path, answer: Answer) -> None:
    # 4 and 7 GiB allocated, 4 and 7 GiB reserved beside a context of 1 GiB are predicted
    _, (low, high) = allocated_interval_bytes(answer.best)
    found = _verified(folder, peak_allocated_bytes_per_rank=[3 * GiB, 4 * GiB, high, low])
    memory = {item.what: item for item in found.comparisons if item.what.startswith(ALLOCATED)}
    assert [item.measured for item in memory.values()] == [4 * GiB, high]
    assert memory[f"{ALLOCATED}, pp rank 0"].difference == 0.0
    assert found.within_interval is True
    found = _verified(folder, peak_allocated_bytes_per_rank=[3 * GiB, 4 * GiB, high + 1, low])
    assert found.measured_step_s == pytest.approx(1.6)
    assert found.within_interval is False
    assert outside_text(found).startswith(f"{ALLOCATED}, pp rank 1 ")


def test_reserved_memory_is_compared_without_what_the_allocator_does_not_see(folder: Path) -> None:
    sizes = [4 * GiB, 3 * GiB, 7 * GiB, 7 * GiB]
    offered = [10 * GiB, 10 * GiB, 10 * GiB, 9 * GiB]  # of 10 GiB
    outside = {"outside_allocator_bytes_per_rank": [GiB] * 4, "offered_bytes_per_rank": offered}
    found = _verified(folder, peak_reserved_bytes_per_rank=sizes, **outside)
    reserved = [item for item in found.comparisons if item.what.startswith(RESERVED)]
    # the toy plan needs 5 and 8 GiB, of which 1 GiB is the context's
    assert [item.difference for item in reserved] == [0.0, 0.0]
    assert all(item.is_inside is None for item in reserved)
    needed = [(item.predicted, item.measured) for item in found.comparisons if item.what.startswith(NEEDED)]
    assert needed == [(5 * GiB, 5 * GiB), (8 * GiB, 9 * GiB)]


def test_what_is_needed_is_not_measured_where_a_program_did_not_look(folder: Path) -> None:
    found = _verified(folder, peak_reserved_bytes_per_rank=[4 * GiB] * 4)
    assert [item.measured for item in found.comparisons if item.what.startswith(NEEDED)] == [None, None]


def test_components_are_those_of_the_rank_that_was_waited_for(folder: Path) -> None:
    found = _verified(folder, profiled_step_per_rank=[OTHER, PROFILE, OTHER, OTHER])
    components = {item.what: (item.predicted, item.measured) for item in found.comparisons if item.unit == "s"}
    assert components == {
        "step": (1.6, pytest.approx(1.6)),
        "compute and recompute": (0.8, 0.9),
        "launch (device idle)": (0.1, 0.2),
        "exposed dp": (0.1, pytest.approx(0.1)),
        "exposed pp and bubble": (0.5, 0.3),
        "optimizer": (0.1, 0.1),
        "profiled step": (1.6, 1.6),
    }
    text = verification_text(found)
    assert "-6.2%" in text  # (0.8 - 0.9) / 1.6
    assert "exposed tp" not in text  # none predicted, none measured


def test_differences_of_the_components_sum_to_that_of_the_profiled_step(folder: Path) -> None:
    slower = {**PROFILE, "step_s": 2.0, "idle_s": 0.6}
    found = _verified(folder, profiled_step_per_rank=[slower] * 4)
    names = [item.what for item in found.comparisons]
    first = names.index("compute and recompute")
    *parts, total = found.comparisons[first:]
    assert total.difference == pytest.approx(1.6 / 2.0 - 1)
    assert sum(item.difference for item in parts) == pytest.approx(total.difference)


def test_nothing_is_judged_on_other_hardware_than_planned(folder: Path) -> None:
    start, _ = _program(device="Other 2T", differences=None, profiled_step_per_rank=[PROFILE] * 4)
    found = verify_folder(folder, n_steps=3, device="cuda", start=start)
    assert found.within_interval is None and found.measured_step_s is None
    assert all(item.measured is None for item in found.comparisons)
    assert "times are not compared" in " ".join(verification_text(found).split())


def test_disagreement_with_one_process_is_a_tolerance_error(folder: Path) -> None:
    start, _ = _program(code=1, differences={"loss": 0.5, "gradient": 0.5, "parameter": 0.5})
    with pytest.raises(ToleranceError):
        verify_folder(folder, n_steps=3, device="cpu", start=start)


@pytest.mark.parametrize(("ending", "code", "has_traceback"), [("sys.exit(8)", 8, False), ("1 / 0", 1, True)])
def test_a_program_that_says_it_differs_is_not_followed_by_a_traceback(
    folder: Path, tmp_path: Path, ending: str, code: int, has_traceback: bool
) -> None:
    start, seen = _program()
    verify_folder(folder, n_steps=3, device="cpu", start=start)
    (tmp_path / "train.py").write_text(f"import sys\n{ending}\n")
    command = [part.replace("--nproc-per-node=4", "--nproc-per-node=1") for part in seen]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120.0)
    assert ended.returncode == code
    assert ("ChildFailedError" in ended.stderr) == has_traceback


def test_a_crash_is_not_called_disagreement(folder: Path) -> None:
    for times_s in ((), (9.0, 1.5)):  # nor one after steps that agreed
        start, _ = _program(code=1, times_s=times_s)
        with pytest.raises(MeasureError) as caught:
            verify_folder(folder, n_steps=3, device="cpu", start=start)
        assert caught.value.exit_code == 7


def test_a_machine_without_the_planned_gpus_is_refused_before_the_program_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    start, seen = _program()
    with pytest.raises(MeasureError, match="found 3 GPUs(.|\n)*expected: 4(.|\n)*--device cpu"):
        verify_folder(folder, n_steps=3, device="cuda", start=start)
    assert seen == []


def _rank_alone(seen: list[list[str]], *, code: int = 0):
    """Stands for `train.py --alone RANK`, which reports what it has as that of all ranks."""

    def start(command, cwd: Path) -> int:
        seen.append(command)
        if code:
            return code
        rank = int(command[command.index("--alone") + 1])
        sizes = {f"peak_{name}_bytes_per_rank": [(4 + rank) * GiB] * 4 for name in ("allocated", "reserved")}
        report = {"device": "Toy 1T", "torch_version": "2.13", "steps": [{"step": 0, "step_s": 9.0}], **sizes}
        Path(command[command.index("--out-json") + 1]).write_text(json.dumps(report))
        return 0

    return start


def test_one_gpu_shows_the_memory_of_a_rank_of_each_stage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    seen: list[list[str]] = []
    found = verify_folder(folder, n_steps=3, device="cuda", is_alone=True, start=_rank_alone(seen))
    assert [command[command.index("--alone") + 1] for command in seen] == ["0", "2"]
    assert all("torch.distributed.run" not in " ".join(command) for command in seen)
    allocated = [item for item in found.comparisons if item.what.startswith(ALLOCATED)]
    assert [(item.predicted, item.measured) for item in allocated] == [(4 * GiB, 4 * GiB), (7 * GiB, 6 * GiB)]
    assert allocated[0].is_inside and found.within_interval is False
    assert found.measured_step_s is None and found.details["peak_allocated_bytes_per_rank"] == [
        4 * GiB, None, 6 * GiB, None
    ]  # fmt: skip
    text = verification_text(found)
    assert "0, 2 of 4" in text and "Alone a rank sends nothing" in text
    assert json.dumps(asdict(found))


def test_a_rank_alone_needs_a_gpu_and_says_so_where_it_does_not_fit(folder: Path) -> None:
    with pytest.raises(UsageError, match="--device cuda"):
        verify_folder(folder, n_steps=3, device="cpu", is_alone=True, start=_rank_alone([]))
    with pytest.raises(MeasureError, match="--alone 0 ended with exit code 1"):
        verify_folder(folder, n_steps=3, device="cuda", is_alone=True, start=_rank_alone([], code=1))


def test_changed_program_is_refused_before_it_runs(folder: Path) -> None:
    (folder / "train.py").write_text("import os")
    start, seen = _program()
    with pytest.raises(InputError, match=r"train\.py"):
        verify_folder(folder, n_steps=3, device="cpu", start=start)
    assert seen == []


def test_a_plan_without_its_program_is_refused(folder: Path) -> None:
    start, seen = _program()
    with pytest.raises(InputError, match="found 'a plan alone'"):
        verify_folder(folder / "plan.json", n_steps=3, device="cpu", start=start, progress=seen.append)
    assert seen == []
