"""What hosts take for launches, collectives, pipelines and sharding: medians of the machines that `hw measure` saw.

    python benchmarks/hosts.py [BEFORE]

A machine is a folder of `results/links_*` and counts once, with the median of its measurements, since one host differs
by up to 60 % from one to the next. BEFORE leaves out machines of that day and later. The medians over those before
2026-11-28 are the figures of hosts in `hardware_profiles/`.
"""

import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from autoplan.hardware import load_hardware_profile

RESULTS = Path(__file__).parent / "results"
FIELDS = ("launch", "kernel", "collective_launch", "pipeline_action", "pipeline_transfer")
GROUPS = {"H100 and H200": "links_", "H100": "links_h100", "H200": "links_h200"}


def main(before: str = "9999") -> None:
    folders = [path for path in sorted(RESULTS.glob("links_*")) if path.is_dir()]
    by_machine = {path.name: medians(path) for path in folders if re.findall(r"\d{4}-\d\d-\d\d", path.name)[0] < before}
    names = list(dict.fromkeys(name for figures in by_machine.values() for name in figures))
    print(f"{'us':32}" + "".join(f"{group:>37}" for group in GROUPS))
    print(" " * 32 + "machines  median    least to most".rjust(37) * len(GROUPS))
    for name in sorted(names, key=lambda name: (name.count("."), names.index(name))):
        print(f"{name:32}", end="")
        for start in GROUPS.values():
            values = [us[name] for folder, us in by_machine.items() if folder.startswith(start) and name in us]
            spread = f"{min(values):.3g} to {max(values):.3g}" if values else "-"
            print(f"{len(values):>12}{statistics.median(values):>8.3g}{spread:>17}", end="")
        print()


def medians(folder: Path) -> dict[str, float]:
    """Microseconds of each figure of a host that was measured there, by its name in a hardware profile."""
    found: dict[str, list[float]] = defaultdict(list)
    for path in sorted(folder.glob("*.toml")):
        profile = load_hardware_profile(str(path))
        for field, source in profile.sources:
            name = field.removeprefix("device.")
            if not source.startswith("assumed") and (name in FIELDS or name.startswith("sharding.")):
                of = profile.device.sharding if name.startswith("sharding.") else profile.device
                found[name].append(1e6 * getattr(of, f"{name.removeprefix('sharding.')}_s"))
    return {name: statistics.median(values) for name, values in found.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
