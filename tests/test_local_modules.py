"""Modules beside a model file that it imports: found, used, copied beside the program, and cached with it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from distributed.launch import run_program

from autoplan import api, trace
from autoplan.errors import InputError
from autoplan.options import Options
from autoplan.tracing.local_modules import files_beside, local_files

MODEL = """
from torch import nn
from layers import Wide
from parts.heads import Head


def build_model():
    return nn.Sequential(Wide(), Head())


def make_batch(batch_size):
    import batches

    return batches.make(batch_size)


def loss_fn(outputs, targets):
    return nn.functional.mse_loss(outputs, targets)
"""
BESIDE = {
    "layers.py": "from torch import nn\nclass Wide(nn.Linear):\n    def __init__(self): super().__init__(4, WIDTH)\n",
    "parts/__init__.py": "",
    "parts/heads.py": "from torch import nn\nfrom .sizes import WIDTH\nclass Head(nn.Linear):\n"
    "    def __init__(self): super().__init__(WIDTH, 4)\n",
    "parts/sizes.py": "WIDTH = 8\n",
    "batches.py": "import torch\ndef make(n): return torch.zeros(n, 4), torch.zeros(n, 4)\n",
    "unused.py": "raise SystemExit\n",
}


def written(folder: Path, *, width: int = 8, model: str = MODEL) -> Path:
    for name, text in BESIDE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace("WIDTH = 8", f"WIDTH = {width}").replace("(4, WIDTH)", f"(4, {width})"))
    (folder / "tiny.py").write_text(model)
    return folder / "tiny.py"


def n_parameters(path: Path) -> int:
    return sum(parameter.spec.n_elements(1) for parameter in trace(path).parameters)


def test_those_that_a_file_imports_are_found_wherever_the_import_stands(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert list(local_files(path)) == [
        "batches.py",
        "layers.py",
        "parts/__init__.py",
        "parts/heads.py",
        "parts/sizes.py",
    ]


def test_models_of_two_folders_do_not_take_each_others_modules_and_a_change_is_seen(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a", width=8), written(tmp_path / "b", width=16)
    # (4 x width + width) + (width x 4 + 4)
    assert [n_parameters(path) for path in (first, second, first)] == [76, 148, 76]
    written(tmp_path / "a", width=32)
    assert n_parameters(first) == 292


def test_the_folder_of_the_program_holds_them_and_runs_elsewhere(tmp_path: Path) -> None:
    path = written(tmp_path / "mine")
    problem = api.make_problem(
        path, hw="dgx_a100_x8/2", options=Options(global_batch=4, fix=(("dp", "2"), ("zero", "0")))
    )
    api.emit(problem, api.solve(problem), tmp_path / "out")
    assert (tmp_path / "out" / "parts" / "sizes.py").read_text() == "WIDTH = 8\n"
    assert not (tmp_path / "out" / "unused.py").exists()
    run_program(tmp_path / "out", 2, "--device", "cpu", "--steps", "1")


def test_a_module_with_the_name_of_a_part_of_the_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    path = written(tmp_path, model="import train\n" + MODEL)
    with pytest.raises(InputError, match=r"found 'import of train.py'(.|\n)*fix: rename the module"):
        files_beside(path)


def test_what_is_installed_is_not_local(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text("import torch.nn\nimport json\n")
    assert local_files(tmp_path / "tiny.py") == {} and torch.nn is sys.modules["torch.nn"]
