"""Computed against measured: blocks with convolutions and batch norm, op by op, in both orders of images.

    python benchmarks/image_blocks.py RESULTS.jsonl HARDWARE [RESULTS.jsonl HARDWARE ...]
    python benchmarks/image_blocks.py fit RESULTS.jsonl HARDWARE [...]     the constants with the least errors, too

RESULTS is what `autoplan profile` wrote of models of cases.csv on devices of HARDWARE, a profile or what `hw measure`
wrote. Eager, unsplit blocks with batch norm are compared: as they were replayed in a CUDA graph, or, where they were
not, in a stream, if the device took longer than the host. The error is the root of the mean of log(computed /
measured)^2, of forward and backward passes alike.

`fit` looks for the values of the constants of cost_models/batch_norm.py and convolution.py that end in `_fit`, one
after another, in steps that become smaller.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import predictions
from autoplan.cost_models import batch_norm, convolution

from autoplan.api import trace_model
from autoplan.cost.local_segment import LocalSegment, local_segment
from autoplan.cost.segment_work import segment_work
from autoplan.cost.work_context import WorkContext, work_contexts
from autoplan.graph import GraphFacts
from autoplan.hardware import load_hardware_profile
from autoplan.measured_profile.segment_key import content_key
from autoplan.rules import load_rules
from autoplan.tensor_parallel.sharding import read_sharding

BATCH_NORM = "aten.batch_norm.default"
DIRECTIONS = "forward", "backward"
FIRST_STEP, LAST_STEP = 0.2, 0.02


@dataclass(frozen=True)
class Block:
    """One measured block in seconds, forward and backward, and what it is computed from."""

    results: str
    row: dict[str, Any]
    context: WorkContext
    local: LocalSegment
    measured_s: tuple[float, float]

    def computed_s(self) -> tuple[float, float]:
        work = segment_work(self.context, self.local, self.row["micro_batch_size"])
        return work.forward_s, work.backward_s

    def log_errors(self) -> tuple[float, float]:
        forward, backward = (
            math.log(own / other) for own, other in zip(self.computed_s(), self.measured_s, strict=True)
        )
        return forward, backward


def measured_s(row: dict[str, Any]) -> tuple[float, float] | None:
    """Forward and backward, where the device set them."""
    if row.get("graph_forward_s"):
        return row["graph_forward_s"], row["graph_backward_s"]
    is_of_device = all(row[f"{name}_s"] > row[f"host_{name}_s"] for name in DIRECTIONS)
    return (row["forward_s"], row["backward_s"]) if is_of_device else None


def is_compared(row: dict[str, Any]) -> bool:
    is_eager = row["what"] == "segment" and row["tp"] == 1 and row["status"] == "measured" and not row.get("compiled")
    return bool(is_eager and row["forward_s"] and row["backward_s"])


def blocks(results: Path, hw: str) -> Iterator[Block]:
    """Those of the models of cases.csv that have batch norm."""
    rows = [row for row in map(json.loads, results.read_text().splitlines()) if is_compared(row)]
    hardware, rules = load_hardware_profile(hw), load_rules()
    for case in {(case.model, case.set): case for case in predictions.cases()}.values():
        if not any(row["model"] == case.file.name for row in rows):
            continue
        graph = trace_model(case.file, overrides=case.overrides)
        facts, contexts = GraphFacts.of(graph), work_contexts(graph, hardware, "bf16", rules)
        for segment in graph.first_of_kind().values():
            if not any(op.target == BATCH_NORM for op in graph.ops_of(segment)):
                continue
            key = content_key(graph, facts, segment)
            layouts = read_sharding(graph, segment, None, degree=1, rules=rules, facts=facts)
            for row in rows:
                seconds = measured_s(row)
                if row["content"] == key and seconds is not None:
                    order = row.get("memory_format", "contiguous")
                    context = contexts(1, order, keeps_modules=row.get("module") == "own")
                    yield Block(results.stem, row, context, local_segment(context, segment, layouts), seconds)


def error(found: list[Block]) -> float:
    squares = [item**2 for block in found for item in block.log_errors()]
    return math.sqrt(sum(squares) / len(squares))


@dataclass(frozen=True)
class Constant:
    """A number of a cost model, or one of a pair of such numbers."""

    module: Any
    name: str
    place: int | None = None

    @property
    def value(self) -> float:
        found = getattr(self.module, self.name)
        return found if self.place is None else found[self.place]

    def set(self, value: float) -> None:
        pair = value if self.place is None else list(getattr(self.module, self.name))
        if self.place is not None:
            pair[self.place] = value
        setattr(self.module, self.name, pair if self.place is None else tuple(pair))


def constants() -> list[Constant]:
    found = []
    for module in (batch_norm, convolution):
        for name, value in vars(module).items():
            if name.endswith("_fit"):
                places = range(len(value)) if isinstance(value, tuple) else (None,)
                found += [Constant(module, name, place) for place in places]
    return found


def fit(of: list[Constant], error_now: Callable[[], float]) -> None:
    """Sets them to where the error is least."""
    step, least = FIRST_STEP, error_now()
    while step >= LAST_STEP:
        before = least
        for constant in of:
            for factor in (1 + step, 1 / (1 + step)):
                value = constant.value
                constant.set(value * factor)
                now = error_now()
                least = min(least, now)
                if now > least:
                    constant.set(value)
        if least == before:
            step /= 2


def table(found: list[Block]) -> None:
    for block in found:
        row = block.row
        way = "graph" if row.get("graph_forward_s") else "stream"
        cells = "".join(
            f"{measured * 1e6:12.0f}{computed * 1e6:10.0f}{computed / measured - 1:+8.0%}"
            for measured, computed in zip(block.measured_s, block.computed_s(), strict=True)
        )
        order = row.get("memory_format", "contiguous")
        name = row["segment"].removeprefix("resnet.encoder.")
        print(f"{block.results[8:]:34}{name:10}{order:14}{row['micro_batch_size']:5}{way:>7}{cells}")


def main(arguments: list[str]) -> None:
    asks_fit, files = arguments[0] == "fit", [item for item in arguments if item != "fit"]
    found = [item for results, hw in zip(files[::2], files[1::2], strict=True) for item in blocks(Path(results), hw)]
    head = "".join(f"{direction + ' us':>12}{'computed':>10}{'error':>8}" for direction in DIRECTIONS)
    print(" " * 70 + head)
    if asks_fit:
        fit(constants(), lambda: error(found))
    table(found)
    for order in sorted({block.row.get("memory_format", "contiguous") for block in found}):
        own = [block for block in found if block.row.get("memory_format", "contiguous") == order]
        print(f"{order}: {len(own)} blocks, error {error(own):.3f}")
    for constant in constants():
        print(f"{constant.name}{'' if constant.place is None else [constant.place]}: {constant.value:.3g}")


if __name__ == "__main__":
    main(sys.argv[1:])
