"""Measure a model's segments on this machine: write what to measure, run it in a process of its own, read the results.

api.measurement_folder --> folder --> python measure.py --> measured.json, one line per result
                                            |  ^
                                            v  |
                                       SQLite, of all runs
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autoplan.errors import MeasureError, OutputError
from autoplan.files import read_text_file, write_folder
from autoplan.measured_profile.segment_times import STATUSES
from autoplan.processes import start_process
from autoplan.user_cache import cache_folder

Start = Callable[[Sequence[str]], int]


def cache_file(is_fresh: bool = False) -> Path | None:
    """Where results of all runs of this user are kept; none where all are to be measured again."""
    return None if is_fresh else cache_folder() / "measurements.sqlite"


def run_measurements(
    files: Mapping[str, str | bytes],
    *,
    out: Path,
    device: str,
    cache: Path | None = None,
    start: Start = start_process,
) -> list[dict[str, Any]]:
    """Measure what the folder `files` lists, append to `out`, and return all lines of `out`.

    What the SQLite file `cache` holds of earlier runs is not measured again.

    Raises: MeasureError when the process fails; what it measured until then stays in `out`.
    """
    if not out.absolute().parent.is_dir():
        raise OutputError(f"{out}: the folder {out.absolute().parent} does not exist\n  fix: create it first")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "measure"
        write_folder(folder, files)
        script = str(folder / "measure.py")
        kept = [] if cache is None else ["--cache", str(cache.absolute())]
        code = start([sys.executable, script, "--device", device, "--out", str(out.absolute()), *kept])
    if code:
        kept_text = f": what is in {out} is not measured again" if out.exists() else ""
        raise MeasureError(
            f"profile: measuring ended with exit code {code}; the lines above say why\n"
            f"  fix: mend that and profile again{kept_text}"
        )
    return [json.loads(line) for line in read_text_file(out).splitlines()]


def count_results(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many results of each status."""
    return {f"n_{status.replace(' ', '_')}": sum(row["status"] == status for row in rows) for status in STATUSES}
