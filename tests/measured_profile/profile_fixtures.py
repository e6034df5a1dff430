"""A small GPT measured on the CPU as one of four devices, once for all of these tests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
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
    out = tmp_path_factory.mktemp("measured") / "measured.json"
    cache = out.with_name("measurements.sqlite")
    rows = run_measurements(files, out=out, device="cpu", cache=cache, start=quick)
    return SimpleNamespace(out=out, rows=rows, text=out.read_text(), cache=cache)


@pytest.fixture
def problem(hw, measured):
    options = Options(precision="fp32", global_batch=8, profile=str(measured.out), fix=(("pp", "1"),))
    return api.make_problem(GPT, hw=hw, overrides=SIZES, options=options)
