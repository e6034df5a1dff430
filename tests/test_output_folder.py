"""The output folder: whole or not at all, inside its own walls, and checked when read."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

import pytest

from autoplan import files as whole_files
from autoplan.answers.answer import Answer
from autoplan.errors import InputError, OutputError
from autoplan.files import check_folder, check_page, check_target, write_folder
from autoplan.output.folder import launch_size, read_answer, report_files
from autoplan.output.launch_scripts import launch_files, launch_line, slurm_script, torchrun_script, train_job

FILES = {"train.py": "print('hello')\n", "runtime/mesh.py": "x = 1\n", "trace.json.gz": b"\x00\x01"}


def _snapshot(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_manifest_lists_the_sha256_of_every_file(tmp_path: Path) -> None:
    write_folder(tmp_path / "out", FILES)
    manifest = json.loads((tmp_path / "out" / "MANIFEST.json").read_text())
    assert manifest["sha256"]["train.py"] == hashlib.sha256(b"print('hello')\n").hexdigest()
    assert set(_snapshot(tmp_path / "out")) == {*FILES, "MANIFEST.json"}
    check_folder(tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["../evil.py", "/etc/evil", "a/../../evil", "", "MANIFEST.json", "a\\b", "./a", "a//b"]
)
def test_names_that_leave_the_folder_are_refused_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError):
        write_folder(tmp_path / "out", {**FILES, name: "x"})
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_refused_without_force_and_untouched(tmp_path: Path) -> None:
    write_folder(tmp_path / "out", FILES)
    before = _snapshot(tmp_path / "out")
    with pytest.raises(OutputError, match="--force"):
        write_folder(tmp_path / "out", {"train.py": "new"})
    assert _snapshot(tmp_path / "out") == before
    assert OutputError.exit_code == 9


def test_force_replaces_what_autoplan_wrote(tmp_path: Path) -> None:
    write_folder(tmp_path / "out", FILES)
    write_folder(tmp_path / "out", {"train.py": "new"}, force=True)
    assert set(_snapshot(tmp_path / "out")) == {"train.py", "MANIFEST.json"}
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_force_never_replaces_a_folder_autoplan_did_not_write(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("important")
    with pytest.raises(OutputError, match="not written by autoplan"):
        write_folder(tmp_path / "home", FILES, force=True)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "important"


@pytest.mark.parametrize("force", [False, True])
def test_an_empty_folder_is_written_into(tmp_path: Path, force: bool) -> None:
    (tmp_path / "out").mkdir()
    check_target(tmp_path / "out", force=force)
    write_folder(tmp_path / "out", FILES, force=force)
    assert set(_snapshot(tmp_path / "out")) == {*FILES, "MANIFEST.json"}
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.parametrize("force", [False, True])
def test_force_is_not_advised_where_it_is_refused(tmp_path: Path, force: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").touch()
    write_folder(tmp_path / "trained", FILES)
    (tmp_path / "trained" / "checkpoint.pt").touch()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name, fix in (
        ("file", "choose another --charts"),
        ("foreign", "choose another --charts"),
        ("trained", "move it away, or choose another --charts"),
        ("here", f"choose another --charts, such as {tmp_path}/here/plan"),
    ):
        with pytest.raises(OutputError) as error:
            check_target(tmp_path / name, force=force, option="--charts")
        assert str(error.value).endswith(f"\n  fix: {fix}")


def test_force_is_not_advised_for_a_page_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="choose another --html$"):
        check_page(tmp_path, force=False)
    (tmp_path / "page.html").touch()
    with pytest.raises(OutputError, match="choose another --html, or add --force"):
        check_page(tmp_path / "page.html", force=False)


def test_force_never_loses_a_checkpoint_beside_the_program(tmp_path: Path) -> None:
    write_folder(tmp_path / "out", FILES)
    (tmp_path / "out" / "checkpoint.pt").write_bytes(b"weights")
    with pytest.raises(OutputError, match=r"checkpoint\.pt"):
        write_folder(tmp_path / "out", FILES, force=True)
    assert (tmp_path / "out" / "checkpoint.pt").read_bytes() == b"weights"


@pytest.mark.parametrize("force", [False, True])
def test_failure_in_the_middle_leaves_the_old_folder_and_no_scraps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    if force:
        write_folder(tmp_path / "out", FILES)
    before = _snapshot(tmp_path)
    write_one = whole_files._write_file

    def fail_on_manifest(path: Path, body: bytes) -> None:
        if path.name == "MANIFEST.json":
            raise OSError(28, "No space left on device")
        write_one(path, body)

    monkeypatch.setattr(whole_files, "_write_file", fail_on_manifest)
    with pytest.raises(OutputError, match="No space left"):
        write_folder(tmp_path / "out", {"train.py": "new"}, force=force)
    assert _snapshot(tmp_path) == before
    assert (tmp_path / "out").exists() == force


def test_failed_last_rename_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "out", FILES)
    before = _snapshot(tmp_path)
    rename = Path.rename

    def fail_on_new(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_on_new)
    with pytest.raises(OutputError, match="Input/output error"):
        write_folder(tmp_path / "out", {"train.py": "new"}, force=True)
    assert _snapshot(tmp_path) == before


def test_interrupt_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: Path, body: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(whole_files, "_write_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "out", FILES)
    assert list(tmp_path.iterdir()) == []


def test_missing_parents_are_made(tmp_path: Path) -> None:
    write_folder(tmp_path / "plans" / "today" / "out", FILES)
    assert (tmp_path / "plans" / "today" / "out" / "MANIFEST.json").is_file()


def test_a_parent_that_cannot_be_written_is_found_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file, which is no folder(.|\n)*expected: .*\n  fix: choose another --out"):
        check_target(tmp_path / "file" / "out", force=False)

    def refuse(**options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)  # root may write everywhere
    for out in ("out", "no/out"):
        with pytest.raises(OutputError, match=r"nothing can be written \(Permission denied\)"):
            check_target(tmp_path / out, force=False)
    with pytest.raises(OutputError, match="expected: .*\n  fix: choose another --html"):
        check_page(tmp_path / "page.html", force=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_permissions_say_is_writable_is_tried() -> None:
    with pytest.raises(
        OutputError, match="would be written into /proc(.|\n)*expected: .*\n  fix: choose another --out"
    ):
        check_target(Path("/proc/x"), force=False)
    with pytest.raises(
        OutputError, match="would be written into /proc(.|\n)*expected: .*\n  fix: choose another --html"
    ):
        check_page(Path("/proc/x"), force=False)


def test_symlinked_target_is_refused_even_with_force(tmp_path: Path) -> None:
    write_folder(tmp_path / "real", FILES)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OutputError, match="not a folder"):
        write_folder(tmp_path / "link", FILES, force=True)
    check_folder(tmp_path / "real")


def test_report_files_read_back_as_the_same_answer(tmp_path: Path, answer: Answer) -> None:
    write_folder(tmp_path / "out", report_files(answer))
    assert read_answer(tmp_path / "out") == answer
    assert read_answer(tmp_path / "out" / "plan.json") == answer
    trace = json.loads(gzip.decompress((tmp_path / "out" / "trace.json.gz").read_bytes()))
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 3


def test_predicted_trace_has_the_memory_of_each_rank(answer: Answer) -> None:
    files = report_files(answer, memory=(((0.0, 7), (0.4, 9)), ((0.4, 5),)))
    events = json.loads(gzip.decompress(files["trace.json.gz"]))["traceEvents"]
    assert [event["args"]["allocated_bytes"] for event in events if event["ph"] == "C"] == [7, 9, 5]


def test_report_files_are_the_same_bytes_each_time(answer: Answer) -> None:
    assert report_files(answer) == report_files(answer)


def test_changed_file_is_refused_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path / "out", FILES)
    (tmp_path / "out" / "train.py").write_text("edited")
    with pytest.raises(InputError, match=r"train\.py"):
        check_folder(tmp_path / "out")


def test_the_fix_for_an_edited_plan_works(tmp_path: Path, answer: Answer) -> None:
    write_folder(tmp_path / "out", report_files(answer))
    file = tmp_path / "out" / "plan.json"
    file.write_text(file.read_text().replace('"search_s": 0.5', '"search_s": 1.5'))
    with pytest.raises(InputError, match=r"changed after it was written(.|\n)*fix: .*--plan .*/out/plan\.json$"):
        read_answer(tmp_path / "out")
    assert read_answer(file).result.search_s == 1.5


@pytest.mark.parametrize("content", ["", "[]", '{"sha256": 3}', '{"sha256": {"a": 1}}', "[" * 100_000])
def test_damaged_manifest_is_an_input_error(tmp_path: Path, content: str) -> None:
    write_folder(tmp_path / "out", FILES)
    (tmp_path / "out" / "MANIFEST.json").write_text(content)
    with pytest.raises(InputError, match="MANIFEST"):
        check_folder(tmp_path / "out")


def test_folder_without_manifest_is_incomplete(tmp_path: Path) -> None:
    write_folder(tmp_path / "out", FILES)
    (tmp_path / "out" / "MANIFEST.json").unlink()
    with pytest.raises(InputError, match=r"no MANIFEST\.json"):
        read_answer(tmp_path / "out")


def test_launch_size_uses_whole_hosts_and_leaves_the_rest_idle(answer: Answer) -> None:
    # 2 x 2 = 4 devices on one host of 4
    assert launch_size(answer) == {"n_hosts": 1, "n_devices_per_host": 4}


def test_shell_scripts_are_valid_and_keep_a_hostile_name_as_one_word(tmp_path: Path) -> None:
    hostile = "x; rm -rf ~ $(touch pwned)\n`id`"
    for name, text in launch_files(hostile, n_hosts=2, n_devices_per_host=8):
        path = tmp_path / Path(name).name
        path.write_text(text)
        assert "$(touch" not in text and "`id`" not in text
        if not name.endswith(".yaml"):
            subprocess.run(["bash", "-n", str(path)], check=True)
    name_line = next(
        line for line in slurm_script(hostile, n_hosts=2, n_devices_per_host=8).splitlines() if "name=" in line
    )
    assert shlex.split(name_line, comments=False) == ["#SBATCH", "--job-name=autoplan-x-rm-rf-touch-pwned-id"]


def test_torchrun_script_passes_arguments_on_from_any_folder(tmp_path: Path) -> None:
    plan = tmp_path / "a plan"
    (plan / "launch").mkdir(parents=True)
    (plan / "launch" / "torchrun.sh").write_text(torchrun_script(n_hosts=1, n_devices_per_host=4))
    (tmp_path / "bin").mkdir()
    stub = tmp_path / "bin" / "torchrun"
    stub.write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    done = subprocess.run(
        ["bash", str(plan / "launch" / "torchrun.sh"), "--steps", "two words"],
        env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    expected = [
        str(plan),
        "--standalone",
        "--nproc-per-node",
        "4",
        "--max-restarts",
        "0",
        "train.py",
        "--steps",
        "two words",
    ]
    assert done.stdout.splitlines() == expected


def test_several_hosts_rendezvous_at_the_first() -> None:
    line = launch_line(n_hosts=2, n_devices_per_host=8)
    assert "--nnodes 2 --nproc-per-node 8" in line and "$MASTER_ADDR" in line
    assert ': "${MASTER_ADDR:?' in torchrun_script(n_hosts=2, n_devices_per_host=8)


def test_train_job_names_hosts_and_processes() -> None:
    text = train_job('a"b: {c}', n_hosts=2, n_devices_per_host=8)
    assert "numNodes: 2" in text and "numProcPerNode: 8" in text
    assert 'name: "autoplan-a-b-c"' in text


def test_a_folder_that_is_not_there_is_told_from_an_unreadable_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="missing: no such file\n[^$]*a folder that plan --out wrote"):
        read_answer(tmp_path / "missing")
