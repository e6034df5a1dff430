"""verify: what the program reports becomes parity, timing, or an error with the right exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoplan.answer import Answer
from autoplan.errors import InputError, MeasureError, ToleranceError
from autoplan.output_folder import report_files, write_folder
from autoplan.verify import verification_text, verify_folder

AGREES = {"loss": 1e-15, "gradient": 1e-14, "parameter": 0.0}


@pytest.fixture
def folder(tmp_path: Path, answer: Answer) -> Path:
    write_folder(tmp_path / "out", {"train.py": "", **report_files(answer)})
    return tmp_path / "out"


def _program(*, code: int = 0, device: str = "cpu", times_s=(9.0, 1.5, 1.7), differences=AGREES):
    """Stands for the launched program: keeps its command line, writes its report."""
    seen: list[str] = []

    def start(command, cwd: Path) -> int:
        seen.extend(command)
        steps = [{"step_s": time_s, "differences": differences} for time_s in times_s]
        report = Path(command[command.index("--out-json") + 1])
        report.write_text(json.dumps({"device": device, "steps": steps}))
        return code

    return start, seen


def test_cpu_run_checks_parity_in_float64_on_every_process_of_the_plan(folder: Path) -> None:
    start, seen = _program()
    found = verify_folder(folder, n_steps=3, device="cpu", start=start)
    assert found.parity is True and found.measured_step_s is None
    assert "--nproc-per-node=4" in seen
    assert seen[seen.index("--dtype") + 1] == "float64" and "--check" in seen
    assert "equal one process" in verification_text(found)


def test_step_time_on_the_planned_device_is_the_median_without_warm_up(folder: Path) -> None:
    # the median of 1.5 and 1.7 is 1.6 s; the estimate is 1.6 s, its interval 1.2 to 2.32 s
    start, seen = _program(device="Toy 1T", differences=None)
    found = verify_folder(folder, n_steps=3, device="cuda", start=start)
    assert found.measured_step_s == pytest.approx(1.6)
    assert found.within_interval is True and found.parity is None
    assert "--check" not in seen


def test_step_time_outside_the_interval_is_said(folder: Path) -> None:
    start, _ = _program(device="Toy 1T", times_s=(9.0, 3.0, 3.0), differences=None)
    found = verify_folder(folder, n_steps=3, device="cuda", start=start)
    assert found.within_interval is False
    assert "OUTSIDE" in verification_text(found)


def test_disagreement_with_one_process_is_a_tolerance_error(folder: Path) -> None:
    start, _ = _program(code=1, differences={"loss": 0.5, "gradient": 0.5, "parameter": 0.5})
    with pytest.raises(ToleranceError):
        verify_folder(folder, n_steps=3, device="cpu", start=start)


def test_crash_before_any_comparison_is_not_called_disagreement(folder: Path) -> None:
    start, _ = _program(code=1, times_s=())
    with pytest.raises(MeasureError) as caught:
        verify_folder(folder, n_steps=3, device="cpu", start=start)
    assert caught.value.exit_code == 7


def test_changed_program_is_refused_before_it_runs(folder: Path) -> None:
    (folder / "train.py").write_text("import os")
    start, seen = _program()
    with pytest.raises(InputError, match=r"train\.py"):
        verify_folder(folder, n_steps=3, device="cpu", start=start)
    assert seen == []
