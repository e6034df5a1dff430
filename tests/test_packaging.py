"""The wheel, installed where no checkout is, has everything and plans an example."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import autoplan

CHECKOUT = Path(__file__).parent.parent
SHIPPED = ("autoplan", "cost_models", "hardware_profiles", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
LINK = re.compile(r"\]\(([^)#:]+)[^):]*\)")  # to a file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout stays clean and no stale build folder leaks into the wheel."""
    source = _copy(SHIPPED, tmp_path_factory.mktemp("source"))
    target = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(source))
    (path,) = target.glob("*.whl")
    return path


def _copy(names: tuple[str, ...], target: Path) -> Path:
    target.mkdir(exist_ok=True)
    for name in names:
        if (CHECKOUT / name).is_dir():
            shutil.copytree(CHECKOUT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(CHECKOUT / name, target / name)
    return target


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel alone; it borrows the dependencies of this one, but no editable autoplan."""
    folder = tmp_path_factory.mktemp("clean") / "env"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    _pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    purelib = next((folder / "lib").glob("python*/site-packages"))
    (purelib / "dependencies.pth").write_text(_dependency_folders())
    return folder


def _dependency_folders() -> str:
    # A folder named in a .pth file does not have its own .pth files read: an editable autoplan stays invisible.
    here = sysconfig.get_path("purelib")
    return "\n".join([here, *(path for path in sys.path if path.endswith("-packages") and path != here)]) + "\n"


def _pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _run(installed: Path, *arguments: str, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(installed / "bin" / arguments[0]), *arguments[1:]],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_holds_every_source_file_and_nothing_outside_the_package(wheel: Path) -> None:
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = set()
    for top, inside in (("autoplan", ""), ("cost_models", "autoplan/"), ("hardware_profiles", "autoplan/")):
        for path in (CHECKOUT / top).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                expected.add(inside + path.relative_to(CHECKOUT).as_posix())
    assert found == expected


def test_sdist_holds_all_that_its_pages_link_to(tmp_path: Path) -> None:
    source = _copy((*SHIPPED, "docs", "benchmarks"), tmp_path / "source")
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as packed:
        packed.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (folder,) = tmp_path.glob("autoplan-*/")
    evidence = [folder / "benchmarks" / "README.md", *(folder / "benchmarks" / "evidence").glob("*.md")]
    pages = [folder / "README.md", *(folder / "docs").glob("*.md"), *evidence]
    missing = {link for page in pages for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()}
    assert len(pages) == 15 and not missing


def test_installed_wheel_finds_its_profiles_and_rules(installed: Path, tmp_path: Path) -> None:
    code = "import autoplan, pathlib; print(pathlib.Path(autoplan.__file__).parent); print(*autoplan.hardware_names())"
    where, names = _run(installed, "python", "-c", code, cwd=tmp_path).splitlines()
    assert Path(where).is_relative_to(installed)
    assert names.split() == list(autoplan.hardware_names())
    assert "dgx_a100_x8" in names.split()


def test_installed_wheel_plans_an_example(installed: Path, tmp_path: Path) -> None:
    shutil.copy(CHECKOUT / "examples" / "mlp.py", tmp_path / "model.py")
    arguments = ("plan", "model.py", "--hw", "dgx_a100_x8", "--global-batch", "64", "--format", "json", "--out", "out")
    found = json.loads(_run(installed, "autoplan", *arguments, cwd=tmp_path))
    assert found["status"] in ("optimal", "feasible") and found["gap"] < 1.01e-3
    runtime = CHECKOUT / "autoplan" / "runtime"
    modules = {path.relative_to(runtime) for path in runtime.rglob("*.py")}
    emitted = tmp_path / "out" / "runtime"
    assert {path.relative_to(emitted) for path in emitted.rglob("*.py")} == modules


def test_version_is_the_same_everywhere() -> None:
    assert tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"] == autoplan.__version__


def test_every_package_folder_is_listed_for_the_wheel() -> None:
    listed = set(tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {path.parent for path in (CHECKOUT / "autoplan").rglob("*.py")}
    assert {path.relative_to(CHECKOUT).as_posix().replace("/", ".") for path in folders} <= listed


@pytest.mark.parametrize("script", ["setup.sh", "demo.sh", "check.sh", ".ci/run"])
def test_scripts_are_executable_and_valid_shell(script: str) -> None:
    path = CHECKOUT / script
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert "set -euo pipefail" in path.read_text()


def test_continuous_integration_runs_the_contributors_command_and_nothing_else() -> None:
    lines = [line for line in (CHECKOUT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ["set -euo pipefail", 'exec "$(dirname "${BASH_SOURCE[0]}")/../check.sh"']
