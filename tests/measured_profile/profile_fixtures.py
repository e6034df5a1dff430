"""A small GPT measured on the CPU as one of four devices, once for all of these tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_once import made_once
from profile_rows import (
    BATCHES,
    CHECKOUT,
    DEGREES,
    GPT,
    SIZES,
    quick,
)

from autoplan import api
from autoplan.measure_model.run import run_measurements
from autoplan.options import Options


@pytest.fixture(scope="session")
def hw(tmp_path_factory) -> str:
    """Four devices that are CPUs."""
    text = (CHECKOUT / "hardware_profiles" / "h200_x4.toml").read_text()
    path = tmp_path_factory.mktemp("hw") / "cpu_x4.toml"
    path.write_text(text.replace('name = "NVIDIA H200"', 'name = "CPU"'))
    return str(path)


@pytest.fixture(scope="session")
def files(hw):
    return api.measurement_folder(
        GPT, hw=hw, overrides=SIZES, degrees=DEGREES, micro_batch_sizes=BATCHES, precision="fp32", compile="both"
    )


@pytest.fixture(scope="session")
def measured(files, tmp_path_factory) -> SimpleNamespace:
    def measure(folder: Path) -> None:
        cache = folder / "measurements.sqlite"
        run_measurements(files, out=folder / "measured.json", device="cpu", cache=cache, start=quick)

    # Tests add to what they measure with: each process has a copy.
    folder = tmp_path_factory.mktemp("profile") / "own"
    shutil.copytree(made_once(tmp_path_factory, "measured_profile", measure), folder)
    text = (folder / "measured.json").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    cache = folder / "measurements.sqlite"
    return SimpleNamespace(out=folder / "measured.json", rows=rows, text=text, cache=cache)


@pytest.fixture
def problem(hw, measured):
    options = Options(precision="fp32", global_batch=8, profile=str(measured.out), fix=(("pp", "1"),))
    return api.make_problem(GPT, hw=hw, overrides=SIZES, options=options)
