"""How long a program is held up by saving checkpoints, and how soon it trains after it is started.

    python benchmarks/checkpoint_times.py run FOLDER RESULTS.jsonl [--every 100] [--saves 2]    needs torch only
    python benchmarks/checkpoint_times.py table RESULTS.jsonl

FOLDER is what `autoplan plan ... --out FOLDER` wrote. It is started three times with torchrun, on the devices of this
machine: without checkpoints; with one every so many steps; and again from the newest of these. All take the same
batches. A launch is ended as soon as it has shown what it is for, so only the checkpoints that are timed are written.

    step     mean from the end of step --warm-up to the end, of both launches over the same steps
    stall    (all steps with saving - all steps without) / checkpoints; also as a part of 100 steps
    write    from the end of the step before a checkpoint until it is complete
    start    from the launch to the end of the first step, torchrun and imports among it

Every 20 steps gives the same stall sooner. Where the disk takes one checkpoint only, --saves 1.

Each launch is a JSON line, on stdout and in RESULTS.jsonl, whatever became of it. Files that were just written are read
from the memory of the host.
"""

import argparse
import datetime
import json
import os
import queue
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

STEP_LINE = re.compile(r"step +(\d+)  loss ")
RESUMED_LINE = re.compile(r"resumed from .*: (\d+) steps were done")
N_RESUMED_STEPS = 3
STEPS_PER_SAVE = 100  # of the table
POLL_S = 0.05
N_LINES_KEPT = 30


# ------------------------------------------------------------------------------------------------------- run


@dataclass
class Seen:
    """What a launch has shown so far; times are of `time.time`, by step its end."""

    started: float
    step_ends: dict[int, float] = field(default_factory=dict)
    resumed: float | None = None
    last_lines: list[str] = field(default_factory=list)

    def take(self, now: float, line: str) -> None:
        if match := STEP_LINE.match(line):
            self.step_ends[int(match[1])] = now
        elif RESUMED_LINE.match(line):
            self.resumed = now
        else:
            self.last_lines = [*self.last_lines, line.rstrip()][-N_LINES_KEPT:]


def run(
    folder: Path,
    results: Path,
    *,
    device: str,
    every: int,
    saves: int,
    warm_up: int,
    seconds: float,
    checkpoints: Path | None,
) -> None:
    """The three launches, one after the other, until one fails or the time is over."""
    if not 0 < warm_up < every:
        raise SystemExit(f"--warm-up: found {warm_up}, expected more than 0 and less than --every ({every})")
    stop = time.time() + seconds
    n_steps = every * (saves + 1)
    saved = (checkpoints or folder / "checkpoint_times").absolute()
    shutil.rmtree(saved, ignore_errors=True)
    common = {
        "program": folder.resolve().name,
        "ranks": n_ranks_of(folder),
        "device": device_name(device),
        "every": every,
        "saves": saves,
        "warm_up": warm_up,
        "date": datetime.date.today().isoformat(),
    }
    saving = ["--checkpoint-dir", str(saved), "--checkpoint-every", str(every), "--keep", "1"]
    resumed_steps = every * saves + N_RESUMED_STEPS

    def all_steps(seen: Seen) -> bool:
        return n_steps - 1 in seen.step_ends

    def all_steps_and_saves(seen: Seen) -> bool:
        return all_steps(seen) and (saved / f"step-{every * saves:08d}").is_dir()

    launches = [
        ("plain", [], all_steps, n_steps),
        ("saving", saving, all_steps_and_saves, n_steps + 1),
        ("resumed", saving, lambda seen: resumed_steps - 1 in seen.step_ends, resumed_steps + 1),
    ]
    try:
        for name, options, is_done, n_most in launches:
            written = Written(saved)
            command = ["--steps", str(n_most), "--device", device, "--repeat-batches", "4", *options]
            seen, status = launch(folder, common["ranks"], command, is_done=is_done, stop=stop, on_poll=written.look)
            row = common | {"launch": name, "status": status} | figures(seen, written)
            print(json.dumps(row), flush=True)
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            if status != "ok":
                print("\n".join(seen.last_lines), file=sys.stderr)
                raise SystemExit(1)
    finally:
        shutil.rmtree(saved, ignore_errors=True)


class Written:
    """Checkpoints of a folder as they become complete: by step, when, and of how many bytes."""

    def __init__(self, folder: Path) -> None:
        self.complete: dict[int, tuple[float, int]] = {}
        self._folder = folder
        self._known = {path.name for path in self._paths()}

    def look(self) -> None:
        """Look for new ones; they may be replaced by the next."""
        for path in self._paths():
            step = int(path.name.partition("-")[2])
            if step not in self.complete and path.name not in self._known:
                with suppress(FileNotFoundError):
                    manifest = path / "MANIFEST.json"
                    n_bytes = sum(json.loads(manifest.read_text())["bytes"].values())
                    self.complete[step] = (manifest.stat().st_mtime, n_bytes)

    def _paths(self) -> list[Path]:
        found = self._folder.iterdir() if self._folder.is_dir() else ()
        return [path for path in found if re.fullmatch(r"step-\d+", path.name)]


def launch(folder: Path, n_ranks: int, options: list[str], *, is_done, stop: float, on_poll) -> tuple[Seen, str]:
    """Start the program and look at what it prints until `is_done`, its end, or the time `stop`; then end it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    seen = Seen(time.time())
    process = subprocess.Popen(
        [*command, "train.py", *options],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: queue.Queue = queue.Queue()
    reader = threading.Thread(target=read_lines, args=(process.stdout, lines), daemon=True)
    reader.start()
    try:
        while True:
            has_ended = process.poll() is not None and not reader.is_alive()
            on_poll()
            while not lines.empty():
                seen.take(*lines.get())
            if is_done(seen):
                return seen, "ok"
            if has_ended:
                return seen, f"ended with code {process.returncode}"
            if time.time() > stop:
                return seen, "out of time"
            time.sleep(POLL_S)
    finally:
        kill(process)


def read_lines(stream, lines: queue.Queue) -> None:
    for line in stream:
        lines.put((time.time(), line))


def kill(process: subprocess.Popen) -> None:
    """End torchrun and its processes at once; told to stop, they would save first."""
    process.send_signal(signal.SIGSTOP)  # else it would see them die, and report that
    for pid in [*descendants(process.pid), process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and they, as far as they live."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *descendants(child)]
    return found


def figures(seen: Seen, written: Written) -> dict:
    """What a launch has shown, in seconds."""
    ends = sorted(seen.step_ends.items())
    return {
        "first_step": ends[0][0] if ends else None,
        "start_to_first_step_s": ends[0][1] - seen.started if ends else None,
        "start_to_resumed_s": seen.resumed - seen.started if seen.resumed else None,
        "step_end_s": [end - seen.started for _, end in ends],
        "write_s": [
            end - seen.step_ends[step - 1]
            for step, (end, _) in sorted(written.complete.items())
            if step - 1 in dict(ends)
        ],
        "checkpoint_bytes": max((n_bytes for _, n_bytes in written.complete.values()), default=None),
    }


def n_ranks_of(folder: Path) -> int:
    mesh = json.loads((folder / "plan.json").read_text())["best"]["plan"]["mesh"]
    return mesh["dp"] * mesh["tp"] * mesh["pp"]


def device_name(device: str) -> str:
    """Of the first GPU; this process leaves CUDA alone."""
    if device == "cpu":
        return "cpu"
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.splitlines()
    return listed[0].split(": ")[1].split(" (")[0]


# ----------------------------------------------------------------------------------------------------- table

HEAD = (
    "program", "ranks", "step", "saving", "stall", f"of {STEPS_PER_SAVE} steps", "longest", "write", "GB", "start",
    "resume",
)  # fmt: skip


def table(results: Path) -> str:
    """One line per program and interval; of several launches of the same the last counts."""
    groups: dict[tuple, dict[str, dict]] = {}
    for row in map(json.loads, results.read_text().splitlines()):
        groups.setdefault((row["program"], row["ranks"], row["device"], row["every"]), {})[row["launch"]] = row
    lines = [HEAD, *(table_line(rows) for rows in groups.values())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    return "\n".join(text)


def table_line(rows: dict[str, dict]) -> tuple[str, ...]:
    plain, saving, resumed = (rows.get(name) for name in ("plain", "saving", "resumed"))
    any_row = next(iter(rows.values()))
    stall = stall_of(plain, saving)
    return (
        any_row["program"],
        str(any_row["ranks"]),
        seconds_text(mean_step_s(plain)),
        seconds_text(mean_step_s(saving)),
        seconds_text(stall and stall["stall_s"]),
        f"{stall['share']:.2%}" if stall else "-",
        seconds_text(longest_s(saving)),
        seconds_text(statistics.mean(saving["write_s"]) if saving and saving["write_s"] else None),
        f"{saving['checkpoint_bytes'] / 1e9:.2f}" if saving and saving["checkpoint_bytes"] else "-",
        seconds_text(plain and plain["start_to_first_step_s"]),
        seconds_text(resumed and resumed["start_to_first_step_s"]),
    )


def mean_step_s(row: dict | None) -> float | None:
    steps_s = timed_steps(row)
    return statistics.mean(steps_s) if steps_s else None


def timed_steps(row: dict | None) -> list[float]:
    """From the end of a step to that of the next, after the warm-up, with what happens in between."""
    ends = row["step_end_s"][row["warm_up"] :] if row else []
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]


def stall_of(plain: dict | None, saving: dict | None) -> dict[str, float] | None:
    """What one checkpoint adds to the steps, as a part of so many steps, and `longest_s`.

    Over the steps that both launches came to; None when there is no checkpoint among them.
    """
    without, with_saves = timed_steps(plain), timed_steps(saving)
    n = min(len(without), len(with_saves))
    n_saves = (saving["warm_up"] + n) // saving["every"] if n else 0
    if n_saves == 0:
        return None
    stall_s = (sum(with_saves[:n]) - sum(without[:n])) / n_saves
    return {
        "stall_s": stall_s,
        "share": stall_s / (STEPS_PER_SAVE * statistics.mean(without)),
        "longest_s": longest_s(saving),
    }


def longest_s(row: dict | None) -> float | None:
    """The longest step over the median of its launch: what a checkpoint adds where it holds up one step."""
    steps_s = timed_steps(row)
    return max(steps_s) - statistics.median(steps_s) if steps_s else None


def seconds_text(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s:.3f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    running = actions.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("results", type=Path)
    running.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    running.add_argument("--every", type=int, default=STEPS_PER_SAVE, metavar="K", help="steps between checkpoints")
    running.add_argument("--saves", type=int, default=2, help="checkpoints to time; two may be on disk at once")
    running.add_argument("--warm-up", type=int, default=4, help="steps that are not timed")
    running.add_argument("--seconds", type=float, default=540.0, help="for all launches")
    running.add_argument("--checkpoints", type=Path, metavar="DIR", help="write them here; it is removed afterwards")
    actions.add_parser("table").add_argument("results", type=Path)
    given = vars(parser.parse_args())
    action = given.pop("action")
    if action == "table":
        print(table(given["results"]))
    else:
        try:
            run(**given)
        finally:
            print(table(given["results"]) if given["results"].is_file() else "nothing was measured")


if __name__ == "__main__":
    main()
