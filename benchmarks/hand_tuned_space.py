"""What someone who tunes by hand would try, and in which order; without torch.

The first tries are one of each strategy; then come the neighbours of the fastest so far, the nearest first, until time
or the whole space is used up. What needs at least as much memory as a try that did not fit is left out.
"""

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

# Strategies in the order in which they are tried first.
STRATEGIES = ("zero2", "ddp", "replicate", "zero1", "zero3", "tp2", "tp4")
TENSOR_PARALLEL_DEGREES = {"tp2": 2, "tp4": 4}  # 1 for the others
SWITCHES = ("recompute", "compile", "compile_loss", "channels_last")
ONLY_FIXED = ("gradient_norm", "whole")
SAVES_MEMORY = ("recompute", "compile", "compile_loss")
N_FIRST_PARTS = 4  # micro-batches per step of the first tries
# How far each change leads away from a fast program: the less likely it is to help, the farther.
DISTANCES = {"strategy": 1.0, "recompute": 1.0, "compile": 1.5, "compile_loss": 1.25, "channels_last": 1.5}
DISTANCE_OF_DOUBLING = 0.75  # of the micro-batch


@dataclass(frozen=True)
class Case:
    """One line of the cases: a model file, and what its engineer knows about it.

    Attributes:
        file: of the model, relative to the list of cases.
        set: `name=value` arguments of its `build_model`, separated by blanks.
        block: the class of the modules that are sharded, compiled and recomputed one by one.
        tensor_parallel: which names `parallelize_module` gets; empty where its styles do not fit the model.
    """

    name: str
    file: Path
    set: str
    global_batch: int
    block: str
    tensor_parallel: str

    @property
    def overrides(self) -> dict[str, object]:
        pairs = (item.split("=", 1) for item in self.set.split())
        return {name: int(value) if value.isdecimal() else value for name, value in pairs}


def read_cases(file: Path, only: Sequence[str] = ()) -> list[Case]:
    """All cases, or those with these names."""
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    found = [
        Case(**row | {"file": (file.parent / row["file"]).resolve(), "global_batch": int(row["global_batch"])})
        for row in rows
    ]
    known = [case.name for case in found]
    if unknown := [name for name in only if name not in known]:
        raise SystemExit(f"{file}: found no model {unknown[0]!r}, expected one of {', '.join(known)}")
    return [case for case in found if not only or case.name in only]


@dataclass(frozen=True)
class Configuration:
    """One hand-written program.

    Attributes:
        gradient_norm: whether it takes the norm of all gradients and looks whether it is finite before each update, as
            emitted programs do; tried only where that is fixed.
        whole: whether the model is compiled as one, not block by block; tried only where that is fixed.
    """

    strategy: str
    micro_batch: int
    recompute: bool = False
    compile: bool = True
    compile_loss: bool = True
    channels_last: bool = False
    gradient_norm: bool = False
    whole: bool = False

    def __str__(self) -> str:
        switches = [name for name in (*SWITCHES, *ONLY_FIXED) if getattr(self, name)]
        return " ".join(
            [self.strategy, f"micro-batch {self.micro_batch}", *(name.replace("_", " ") for name in switches)]
        )


FRUGAL = Configuration("zero3", 1, recompute=True)  # where to go on from when nothing fits


def parse_fixed(texts: Sequence[str]) -> tuple[tuple[str, object], ...]:
    """`name=value` texts as fields of a Configuration."""
    switches = dict.fromkeys((*SWITCHES, *ONLY_FIXED), {"on": True, "off": False}.__getitem__)
    readers = {"strategy": str, "micro_batch": int} | switches
    found = []
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found.append((name, readers[name](value)))
        except (KeyError, ValueError):
            names = ", ".join(readers)
            raise SystemExit(f"--fix: found {text!r}, expected NAME=VALUE with one of {names}; on or off") from None
    return tuple(found)


@dataclass(frozen=True)
class Space:
    """All configurations of a model on so many ranks; `fixed` are (field, value) pairs that all of them have."""

    n_ranks: int
    global_batch: int
    has_tensor_parallel: bool
    is_convolutional: bool
    fixed: tuple[tuple[str, object], ...] = ()

    @property
    def configurations(self) -> tuple[Configuration, ...]:
        layouts = (True, False) if self.is_convolutional else (False,)
        only_fixed = ((bool(dict(self.fixed).get(name, False)),) for name in ONLY_FIXED)
        switches = tuple(product((False, True), (True, False), (True, False), layouts, *only_fixed))
        every = (
            Configuration(strategy, micro_batch, *values)
            for strategy in self.strategies
            for micro_batch in self.micro_batches(strategy)
            for values in switches
        )
        return tuple(item for item in every if item == replace(item, **dict(self.fixed)))

    @property
    def strategies(self) -> tuple[str, ...]:
        degrees = {name: TENSOR_PARALLEL_DEGREES.get(name, 1) for name in STRATEGIES}
        possible = [name for name, degree in degrees.items() if self.n_ranks % degree == 0]
        return tuple(name for name in possible if degrees[name] == 1 or self.has_tensor_parallel)

    def data_parallel_degree(self, strategy: str) -> int:
        return self.n_ranks // TENSOR_PARALLEL_DEGREES.get(strategy, 1)

    def micro_batches(self, strategy: str) -> tuple[int, ...]:
        """Powers of two, at the most what one data-parallel rank has in a step."""
        local_batch, rest = divmod(self.global_batch, self.data_parallel_degree(strategy))
        if rest:
            return ()
        powers = (2**exponent for exponent in range(local_batch.bit_length()))
        return tuple(size for size in powers if local_batch % size == 0)

    def first_tries(self) -> Iterator[Configuration]:
        for strategy in self.strategies:
            sizes = self.micro_batches(strategy)
            if sizes:
                part = self.global_batch // self.data_parallel_degree(strategy) // N_FIRST_PARTS
                micro_batch = max((size for size in sizes if size <= part), default=1)
                first = Configuration(strategy, micro_batch, channels_last=self.is_convolutional)
                yield replace(first, **dict(self.fixed))


@dataclass(frozen=True)
class Tried:
    """How one configuration fared; `step_s` is None where it did not run to its end."""

    configuration: Configuration
    status: str
    step_s: float | None = None


def next_try(space: Space, tried: Sequence[Tried]) -> Configuration | None:
    """What to run now; None when the space is used up."""
    done = {item.configuration for item in tried}
    too_big = [item.configuration for item in tried if item.status == "oom"]
    failed = [item.configuration for item in tried if item.status == "error"]
    left = [
        configuration
        for configuration in space.configurations
        if configuration not in done
        and not any(needs_as_much_memory(configuration, other) for other in too_big)
        and not any(is_like(configuration, other) for other in failed)
    ]
    first = [configuration for configuration in space.first_tries() if configuration in left]
    if first or not left:
        return first[0] if first else None
    centre = best_of(tried) or FRUGAL
    return min(left, key=lambda configuration: distance(configuration, centre))  # the first of equals


def best_of(tried: Sequence[Tried]) -> Configuration | None:
    finished = [item for item in tried if item.step_s is not None]
    return min(finished, key=lambda item: item.step_s).configuration if finished else None


def distance(one: Configuration, other: Configuration) -> float:
    """The changes that lead from one to the other, added up."""
    changed = sum(size for name, size in DISTANCES.items() if getattr(one, name) != getattr(other, name))
    return changed + DISTANCE_OF_DOUBLING * abs(math.log2(one.micro_batch / other.micro_batch))


def needs_as_much_memory(one: Configuration, other: Configuration) -> bool:
    """Whether `one` is like `other`, but for choices that take memory."""
    if one.micro_batch < other.micro_batch or any(getattr(one, n) > getattr(other, n) for n in SAVES_MEMORY):
        return False
    alike = {name: getattr(one, name) for name in (*SAVES_MEMORY, "micro_batch")}
    return one == replace(other, **alike)


def is_like(one: Configuration, other: Configuration) -> bool:
    """Whether they are the same code on other sizes."""
    return one == replace(other, micro_batch=one.micro_batch, recompute=one.recompute)


# ------------------------------------------------------------------------------------------------------- results


def read_rows(results: Path) -> list[dict]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def tried_of(rows: Sequence[dict]) -> list[Tried]:
    """The hand-written programs among the rows of one job; those that the end of the time cut off are open again."""
    return [
        Tried(Configuration(**row["options"]), row["status"], row["step_s"])
        for row in rows
        if row["baseline"] != "autoplan" and row["status"] != "out of time"
    ]
