"""A predicted step beside measured ones: where the time of each rank goes, and how long each pass of a stage takes.

    python benchmarks/compare_trace.py FOLDER/trace.json.gz rank0.json.gz [rank1.json.gz ...]

The first file is the trace that `plan --out` writes, the others those of `train.py --profile-steps A:B --profile-dir`,
one of each pipeline rank at least; of several steps the last counts. At every moment of a measured step one thing
counts, the first of these that runs on the device:

    optimizer   forward   backward   other computation   communication alone (a receive waits for its sender)   idle

A kernel belongs to what the host was in when it launched it: a pass of the schedule (torch marks those of pipelines
with several stages on a rank), else the autograd engine or not. "gaps" is what a pass leaves idle between its kernels.
On CPU the operators stand for the kernels. Times are in milliseconds; recomputing belongs to the backward pass.
"""

import bisect
import gzip
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from autoplan.runtime.step_profile import OPTIMIZER_MARK, STEP_MARK
from autoplan.schedules import Action

KIND_NAMES = {"F": "forward", "B": "backward", "I": "backward (inputs)", "W": "backward (weights)"}
OPTIMIZER, OTHER, TRANSFERS, COLLECTIVES, IDLE = "optimizer", "other computation", "transfers", "collectives", "idle"
ORDER = (*KIND_NAMES.values(), OPTIMIZER, OTHER, TRANSFERS, COLLECTIVES, IDLE)
ALONE = {TRANSFERS: "transfers alone, waiting", COLLECTIVES: "collectives alone"}
PASS_MARK = "PP:"
ENGINE_MARK = "autograd::engine::evaluate_function"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
CPU_OPERATORS = ("aten::", "fsdp::")
IS_TRANSFER = re.compile(r"send|recv", flags=re.IGNORECASE)
MS_PER_US = 1e-3


class Stretch(NamedTuple):
    """A stretch of time, in microseconds, in which `what` runs; `action` is the pass it belongs to, "" if not known."""

    start_us: float
    stop_us: float
    what: str
    action: str = ""


@dataclass
class Passes:
    """The passes of one stage in one direction: their number, what they take on the device, and their gaps."""

    n: int = 0
    busy_us: float = 0.0
    gaps_us: float = 0.0


@dataclass
class RankStep:
    """One step of a pipeline rank.

    Attributes:
        parts_us: what counts, and for how long; they sum to the step.
        passes: by (stage, kind).
    """

    step_us: float = 0.0
    parts_us: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    passes: dict[tuple[int, str], Passes] = field(default_factory=lambda: defaultdict(Passes))

    def add_pass(self, action: str, *, busy_us: float, gaps_us: float = 0.0) -> None:
        """Count a pass that is written as in a schedule, such as 2F0."""
        found = read_action(action)
        if found is not None:
            own = self.passes[found.stage, found.kind]
            own.n, own.busy_us, own.gaps_us = own.n + 1, own.busy_us + busy_us, own.gaps_us + gaps_us


def read_action(text: str) -> Action | None:
    """The action that prints as `text`; None when there is none."""
    match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text, flags=re.ASCII)
    return None if match is None else Action(int(match[1]), match[2], int(match[3]))


def load(path: Path) -> dict:
    """A trace; names of kernels may hold any character."""
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content, strict=False)


def complete(trace: dict) -> list[dict]:
    """Its complete events."""
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


# -------------------------------------------------------------------------------------------------------- predicted


def predicted_steps(trace: dict) -> dict[int, RankStep]:
    """The step of each pipeline rank; all last as long as the longest, as the optimizer waits for the gradient norm."""
    boxes = complete(trace)
    stop_us = max(box["ts"] + box["dur"] for box in boxes)
    steps: dict[int, RankStep] = defaultdict(lambda: RankStep(step_us=stop_us))
    stretches: dict[int, list[Stretch]] = defaultdict(list)
    for box in boxes:
        if box["cat"] == "copy":  # beside the step
            continue
        stretches[box["pid"]].append(Stretch(box["ts"], box["ts"] + box["dur"], _predicted_kind(box), box["name"]))
        if box["cat"] == "compute":
            steps[box["pid"]].add_pass(box["name"], busy_us=box["dur"])
    for rank, found in stretches.items():
        steps[rank].parts_us.update(parts(found, start_us=0.0, stop_us=stop_us))
    return steps


def _predicted_kind(box: dict) -> str:
    if box["cat"] != "compute":
        return TRANSFERS if box["cat"].startswith("send") else COLLECTIVES
    action = read_action(box["name"])
    return OPTIMIZER if action is None else KIND_NAMES[action.kind]


# --------------------------------------------------------------------------------------------------------- measured


def measured_step(trace: dict) -> RankStep:
    """The last step in a trace of torch's profiler."""
    events = complete(trace)
    host = [event for event in events if event.get("cat") == "user_annotation"]
    step = max((event for event in host if event["name"] == STEP_MARK), key=lambda event: event["ts"])
    start_us, stop_us = step["ts"], step["ts"] + step["dur"]
    within = [event for event in host if start_us <= event["ts"] < stop_us]
    found = [s for s in measured_stretches(events, within) if s.start_us < stop_us and s.stop_us > start_us]
    measured = RankStep(step_us=stop_us - start_us)
    measured.parts_us.update(parts(found, start_us=start_us, stop_us=stop_us))
    of_action: dict[str, list[Stretch]] = defaultdict(list)
    for stretch in found:
        if stretch.action:
            of_action[stretch.action].append(stretch)
    for action, own in of_action.items():
        first, last = min(s.start_us for s in own), max(s.stop_us for s in own)
        covered = parts(own, start_us=first, stop_us=last)
        idle_us = last - first - sum(parts(found, start_us=first, stop_us=last, without=(IDLE,)).values())
        measured.add_pass(action, busy_us=sum(covered.values()) - covered[IDLE], gaps_us=max(0.0, idle_us))
    return measured


def measured_stretches(events: Sequence[dict], host: Sequence[dict]) -> Iterator[Stretch]:
    """What ran on the device; `host` are the marks of one step."""
    passes = Marks((e for e in host if e["name"].startswith(PASS_MARK)), is_of_thread=False)
    optimizer = Marks((e for e in host if e["name"] == OPTIMIZER_MARK), is_of_thread=False)
    engine = Marks((e for e in events if e["name"].startswith(ENGINE_MARK)), is_of_thread=True)
    launches = {e["args"]["correlation"]: e for e in events if e.get("cat") in LAUNCHES and "correlation" in e["args"]}
    for event, launch in _device_events(events, host, launches):
        times = event["ts"], event["ts"] + event["dur"]
        if is_communication(event):
            yield Stretch(*times, TRANSFERS if IS_TRANSFER.search(_called(event)) else COLLECTIVES)
            continue
        action = passes.around(launch).removeprefix(PASS_MARK)
        known = read_action(action)
        if optimizer.around(launch):
            yield Stretch(*times, OPTIMIZER)
        elif known is not None:
            yield Stretch(*times, KIND_NAMES[known.kind], action)
        elif passes and not engine.around(launch):
            yield Stretch(*times, OTHER)
        else:
            yield Stretch(*times, KIND_NAMES["B" if engine.around(launch) else "F"])


def _device_events(events: Sequence[dict], host: Sequence[dict], launches: dict) -> Iterator[tuple[dict, dict]]:
    """(what ran on the device, where the host launched it); on CPU they are the same."""
    on_device = [event for event in events if event.get("cat") in ON_DEVICE]
    for event in on_device:
        yield event, launches.get(event["args"].get("correlation"), event)
    if not on_device:
        yield from ((e, e) for e in events if e.get("cat") == "cpu_op" and e["name"].startswith(CPU_OPERATORS))
        yield from ((e, e) for e in host if e["name"].startswith("gloo:"))


def is_communication(event: dict) -> bool:
    return event["name"].lower().startswith(("nccl", "gloo:"))


def _called(event: dict) -> str:
    """By what it was called; several transfers in one batch are "coalesced", and only pipelines send batches."""
    called = str(event.get("args", {}).get("Collective name", "")) or event["name"]
    return event["name"] if "coalesced" in called.lower() else called


class Marks:
    """Stretches of the host that do not overlap, or the outermost of those that do; of each thread, or of all."""

    def __init__(self, events: Iterable[dict], *, is_of_thread: bool) -> None:
        self._is_of_thread = is_of_thread
        self._found: dict[object, list[tuple[float, float, str]]] = defaultdict(list)
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            own = self._found[self._thread(event)]
            if not own or event["ts"] >= own[-1][1]:
                own.append((event["ts"], event["ts"] + event["dur"], event["name"]))

    def __bool__(self) -> bool:
        return bool(self._found)

    def _thread(self, event: dict) -> object:
        return event["tid"] if self._is_of_thread else None

    def around(self, event: dict) -> str:
        """The name of the stretch in which the event begins; "" if there is none."""
        own = self._found.get(self._thread(event), [])
        place = bisect.bisect_right(own, event["ts"], key=lambda mark: mark[0]) - 1
        return own[place][2] if place >= 0 and event["ts"] < own[place][1] else ""


def parts(
    stretches: Iterable[Stretch], *, start_us: float, stop_us: float, without: Sequence[str] = ()
) -> dict[str, float]:
    """How long each thing counts between two moments; the first of `ORDER` that runs does."""
    changes: dict[float, list[tuple[int, str]]] = defaultdict(list, {start_us: [], stop_us: []})
    for stretch in stretches:
        first, last = max(start_us, stretch.start_us), min(stop_us, stretch.stop_us)
        if first < last:
            changes[first].append((1, stretch.what))
            changes[last].append((-1, stretch.what))
    running, found = dict.fromkeys(ORDER, 0), dict.fromkeys(ORDER, 0.0)
    for now_us, then_us in pairwise(sorted(changes)):
        for change, what in changes[now_us]:
            running[what] += change
        found[next((what for what in ORDER if running[what]), IDLE)] += then_us - now_us
    return {what: us for what, us in found.items() if what not in without}


# ------------------------------------------------------------------------------------------------------------ table


def rank_of(trace: dict, *, n_ranks: int) -> int:
    """The pipeline rank of a measured trace; ranks of one pipeline rank follow one another."""
    world = trace.get("distributedInfo", {})
    return world.get("rank", 0) * n_ranks // world.get("world_size", 1)


def table(predicted: RankStep, measured: RankStep) -> Iterator[str]:
    """Lines of one rank."""
    yield f"{'':28}{'predicted':>11}{'measured':>11}{'difference':>12}"
    for what in ORDER:
        pair = predicted.parts_us.get(what, 0.0), measured.parts_us.get(what, 0.0)
        if any(pair):
            yield _line(ALONE.get(what, what), *pair)
    yield _line("step", predicted.step_us, measured.step_us)
    for (stage, kind), own in sorted(measured.passes.items()):
        expected = predicted.passes.get((stage, kind))
        if expected is not None:
            name = f"stage {stage} {KIND_NAMES[kind]}, each of {own.n}"
            gaps = f"   gaps {own.gaps_us / own.n * MS_PER_US:.3f}"
            yield _line(name, expected.busy_us / expected.n, own.busy_us / own.n) + gaps


def _line(name: str, predicted_us: float, measured_us: float) -> str:
    difference = f"{measured_us / predicted_us - 1:+.1%}" if predicted_us else ""
    return f"{name:28}{predicted_us * MS_PER_US:11.3f}{measured_us * MS_PER_US:11.3f}{difference:>12}"


def main(predicted_file: Path, *measured_files: Path) -> None:
    predicted = predicted_steps(load(predicted_file))
    for path in measured_files:
        trace = load(path)
        rank = rank_of(trace, n_ranks=len(predicted))
        print(f"{path}: pipeline rank {rank}")
        print("\n".join(table(predicted[rank], measured_step(trace))) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
