"""Measure generated segments on one device: run by itself, beside a `runtime/` and the segments' sources.

    python measure.py [--device cuda|cpu] [--out measured.json] [--seconds 0.35] [--backend inductor]

`autoplan profile` writes this file into a folder with `measurement.json`, which says what to measure. It needs torch
and nothing else of autoplan. Each result is one line of JSON, appended as soon as it is there; what the file already
holds for the same device, torch and driver is not measured again.

    round = forward of n copies, then backward of n copies; each copy has weights of its own, as layers have
    forward_s = median over rounds of (time between CUDA events / n), while the device is kept busy

Before that, rounds run for as long (`--seconds`), so that clocks settle under load. Where the device may be waiting for
the host, it is made to wait until the host is ahead. If it then takes less, that is its own time, and the host's is
what they took together; so the longer of the two is always what was seen under load.

On one rank of a tensor-parallel group the collectives are replaced by copies that give the right shapes. These copies
are timed by themselves and subtracted: communication is priced by the hardware profile.

What is measured compiled is compiled as `runtime.parallel` does it: the forward pass of a block, of whose copies all
run the same compiled code, and the loss function. Compiling itself is over before anything is timed.
"""

import argparse
import contextlib
import functools
import gc
import importlib
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

SCHEMA_VERSION = 1
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
SECONDS = 0.35
BACKEND = "inductor"
MIN_ROUNDS, MAX_ROUNDS = 7, 400
MAX_SPREAD = 0.10
RESOLUTION_S = 2e-5
MAX_COPIES = 4
COPIED_WEIGHT_BYTES = 256 * 2**20  # enough copies to hold this much, so that no weight waits in the cache
MEMORY_SHARE = 0.4  # of what is free, for copies and what they save
# An interval shows the host where the device alone takes less than this share of it, and less than the host alone (a
# device that was let rest runs faster for a while); below the other share it cannot.
HOST_BOUND, MAYBE_HOST_BOUND = 0.9, 0.4
SLEEP_CYCLES_PER_S = 2e9
COPY_LAUNCH_S = 2e-5  # more than the host takes to launch a copy
WEIGHT_STD = 0.02
ADAM_ELEMENTS, ADAM_TENSORS = 2**22, 16
Pair = tuple[float, float]  # forward and backward
Loss = Callable[[Any], torch.Tensor]  # of the outputs
Compile = Callable[[Any], Any]  # torch.compile, or nothing where things run as they are


class Clock:
    """Times rounds on one device, for `seconds` after as long a time to settle."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.is_cuda, self.seconds = device, device.type == "cuda", seconds

    def wait(self) -> None:
        """Until the device has nothing to do."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def mark(self) -> Any:
        """The moment at which the device gets here."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def hold(self, seconds: float) -> None:
        """Make the device wait, so that the host gets ahead of it."""
        if self.is_cuda and seconds:
            torch.cuda._sleep(int(seconds * SLEEP_CYCLES_PER_S))  # type: ignore[no-untyped-call]

    def between_s(self, first: Any, second: Any) -> float:
        """Seconds between two marks."""
        return float(first.elapsed_time(second)) / 1e3 if self.is_cuda else float(second - first)

    def rounds(self, run: "Round", count: int, *, ahead_s: float = 0.0) -> list[Pair]:
        """The device time of `count` rounds in a row; with `ahead_s` the device waits that long before each."""
        marks = []
        for _ in range(count):
            self.hold(ahead_s)
            start = self.mark()
            run.forward()
            middle = self.mark()
            run.backward()
            marks.append((start, middle, self.mark()))
        self.wait()
        return [(self.between_s(a, b), self.between_s(b, c)) for a, b, c in marks]


class Round:
    """Forward passes of some calls, then their backward passes in the opposite order."""

    def __init__(self, calls: "list[Call]") -> None:
        self.calls = calls
        self._results: list[list[torch.Tensor]] = []

    def forward(self) -> None:
        self._results = [call.forward() for call in self.calls]

    def backward(self) -> None:
        for call in reversed(self.calls):
            call.backward(self._results.pop())

    def shortest(self) -> "Round":
        """The least of it that can be run by itself."""
        return Round(self.calls[:1])


class Call:
    """One copy of a segment with its weights and inputs."""

    def __init__(self, module: nn.Module, inputs: list[torch.Tensor], loss: Loss | None):
        self.module, self.inputs, self._loss = module, inputs, loss
        self._gradients: list[torch.Tensor] | None = None
        self._leaves = [t for t in (*module.parameters(), *inputs) if t.requires_grad]

    def forward(self) -> list[torch.Tensor]:
        """The results that have a gradient."""
        outputs = self.module(*self.inputs)
        if self._loss is not None:
            outputs = self._loss(outputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return [output for output in outputs if output.requires_grad]

    def backward(self, results: list[torch.Tensor]) -> None:
        """Gradients of weights and inputs, from random gradients of the results."""
        for leaf in self._leaves:
            leaf.grad = None
        if not results:
            return
        if self._gradients is None:
            self._gradients = [
                torch.randn_like(result) if result.dim() else torch.ones_like(result) for result in results
            ]
        torch.autograd.backward(results, self._gradients)

    def gradient_bytes(self, *, of_weights: bool) -> int:
        """Bytes of the gradients of weights, or of those of the results."""
        if not of_weights:
            return sum(map(_n_bytes, self._gradients or ()))
        return sum(_n_bytes(p.grad) for p in self.module.parameters() if p.grad is not None)


@torch.library.custom_op("autoplan::collective", mutates_args=("target",))
def _opaque_copy(target: torch.Tensor, source: torch.Tensor | None) -> None:
    """A copy that compiled code calls as it would a collective: it is not merged with what stands around it."""
    if source is not None:
        target.view(-1, *source.shape).copy_(source)


class LocalCollectives:
    """Stands in for torch.distributed on one device: copies with the right shapes, remembered unless compiled."""

    ReduceOp = dist.ReduceOp

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = []

    def all_reduce(self, x: torch.Tensor, **_: Any) -> None:
        """The partial sum stands for the sum."""
        if torch.compiler.is_compiling():
            _opaque_copy(x, None)

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor, **_: Any) -> None:
        """Copies of one part stand for all parts."""
        self._copy(whole, part)

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor, **_: Any) -> None:
        """The first part of the partial sum stands for that of the sum."""
        self._copy(part, whole[: part.shape[0]])

    def all_to_all_single(self, arriving: torch.Tensor, leaving: torch.Tensor, **_: Any) -> None:
        """What leaves stands for what arrives."""
        self._copy(arriving, leaving)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            _opaque_copy(target, source)
            return
        target = target.view(-1, *source.shape)
        self.seen.append((tuple(target.shape), tuple(source.shape), target.dtype))
        target.copy_(source)


class RankOfOne:
    """Stands in for a process group: the first of `n_ranks` ranks."""

    def __init__(self, n_ranks: int) -> None:
        self._n_ranks = n_ranks

    def size(self) -> int:
        return self._n_ranks

    def rank(self) -> int:
        return 0


# ------------------------------------------------------------------------------------------- one region


def measure_region(
    region: dict[str, Any], batch_size: int, plan: dict[str, Any], clock: Clock, *, compiled: Compile | None
) -> Any:
    """Times and bytes of one segment at one micro-batch size, as fields of a result line."""
    collectives = _replace_collectives()
    torch.compiler.reset()  # what was compiled for other regions counts against torch's limit of variants
    build = _builder(region, batch_size, DTYPES[plan["precision"]], clock.device, compiled)
    seen = None
    if compiled is not None and region["tp"] > 1:  # compiled code does not tell
        eager = _builder(region, batch_size, DTYPES[plan["precision"]], clock.device, None)
        seen = _memory(eager(), region, clock, collectives)["collectives"]
    call = build()
    memory = _memory(call, region, clock, collectives)
    memory["collectives"] = seen or memory["collectives"]
    copies = [call]
    for _ in range(_n_more_copies(call, memory, clock)):
        copies.append(build())
    times = _times(Round(copies), clock)
    if max(times["forward_spread"], times["backward_spread"]) > MAX_SPREAD:
        times = min(times, _times(Round(copies), clock), key=lambda t: max(t["forward_spread"], t["backward_spread"]))
    stand_ins = [_copies_s(seen, clock) for seen in memory.pop("collectives")]
    for way, copies_s in zip(("forward", "backward"), stand_ins, strict=True):
        times[f"{way}_s"] = max(0.0, times[f"{way}_s"] - copies_s)
    is_noisy = max(times["forward_spread"], times["backward_spread"]) > MAX_SPREAD
    return {"status": "noisy" if is_noisy else "measured", **times, **memory}


def _times(run: Round, clock: Clock) -> dict[str, float]:
    """Medians and spreads of device and host time per copy."""
    n_copies = len(run.calls) or 1
    clock.rounds(run, 2)
    started_s, n_settling = time.perf_counter(), 0
    while time.perf_counter() - started_s < clock.seconds or n_settling < 3:
        clock.rounds(run, 3)
        n_settling += 3
    round_s = (time.perf_counter() - started_s) / n_settling
    found = clock.rounds(run, min(MAX_ROUNDS, max(MIN_ROUNDS, math.ceil(clock.seconds / round_s))))
    host_s = _host_s(run, clock)
    times: dict[str, float] = {}
    alone, n_alone = _ahead(run, clock, host_s=host_s, loaded=found) if clock.is_cuda else ([], 1)
    for way, name in enumerate(("forward", "backward")):
        loaded_s = _median(found, way) / n_copies
        alone_s = _median(alone, way) / n_alone if alone else loaded_s
        waits = alone_s < min(HOST_BOUND * loaded_s, host_s[way] / n_copies)
        times[f"{name}_s"] = alone_s if waits else loaded_s
        times[f"{name}_spread"] = _spread(alone if waits else found, way)
        times[f"host_{name}_s"] = loaded_s if waits else min(host_s[way] / n_copies, loaded_s)
    return {**times, "n_rounds": len(found)}


def _ahead(run: Round, clock: Clock, *, host_s: Pair, loaded: list[Pair]) -> tuple[list[Pair], int]:
    """Device times while the host is ahead, where it may be what the device waits for; and of how many copies."""
    loaded_s = _median(loaded, 0), _median(loaded, 1)
    if not any(host > MAYBE_HOST_BOUND * device for host, device in zip(host_s, loaded_s, strict=True)):
        return [], 1
    short = run.shortest()
    n_short = len(short.calls) or 1
    share = n_short / (len(run.calls) or 1)
    ahead_s = 2 * share * max(sum(host_s), sum(loaded_s))
    return clock.rounds(short, 2 * MIN_ROUNDS, ahead_s=ahead_s), n_short


def _host_s(run: Round, clock: Clock) -> Pair:
    """How long the host takes to hand one round to the device; nothing where they are one."""
    if not clock.is_cuda:
        return 0.0, 0.0
    found = []
    for _ in range(MIN_ROUNDS):
        clock.wait()
        start_s = time.perf_counter()
        run.forward()
        middle_s = time.perf_counter()
        run.backward()
        found.append((middle_s - start_s, time.perf_counter() - middle_s))
    clock.wait()
    return _median(found, 0), _median(found, 1)


def _median(rounds: list[Pair], way: int) -> float:
    return statistics.median(pair[way] for pair in rounds)


def _spread(rounds: list[Pair], way: int) -> float:
    """The range of the middle four fifths, over the median; 0 for times that a clock cannot resolve."""
    values = sorted(pair[way] for pair in rounds)
    cut = len(values) // 10 + 1
    middle, median_s = values[cut:-cut] or values, statistics.median(values)
    return (middle[-1] - middle[0]) / median_s if median_s > RESOLUTION_S else 0.0


def _copies_s(seen: list[Any], clock: Clock) -> float:
    """Time of the copies that stood in for the collectives of one pass."""
    if not seen:
        return 0.0
    pairs = []
    for target, source, dtype in seen:
        whole = torch.zeros(target, dtype=dtype, device=clock.device)
        pairs.append((whole, torch.zeros(source, dtype=dtype, device=clock.device)))
    found = []
    for _ in range(MIN_ROUNDS):
        clock.hold(COPY_LAUNCH_S * (len(pairs) + 1))
        start = clock.mark()
        for whole, part in pairs:
            whole.copy_(part)
        found.append((start, clock.mark()))
    clock.wait()
    return statistics.median(clock.between_s(a, b) for a, b in found)


# ------------------------------------------------------------------------------------------- memory


def _memory(call: Call, region: dict[str, Any], clock: Clock, collectives: LocalCollectives) -> dict[str, Any]:
    """What one pass keeps and needs, and which collectives it asks for in each direction."""
    call.backward(call.forward())  # what is allocated once, such as workspaces, is there from now on
    kept: list[torch.Tensor] = [*call.module.parameters(), *call.module.buffers()]
    kept += [t for t, described in zip(call.inputs, region["inputs"], strict=True) if described["is_kept_once"]]
    left_out = {_storage(t) for t in kept}
    before = {_storage(t) for t in call.inputs}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in left_out:
            saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    for leaf in (*call.module.parameters(), *call.inputs):
        leaf.grad = None
    collectives.seen.clear()
    start_bytes = _restart_peak(clock)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = call.forward()
    for tensor in _kept_aside(results):
        pack(tensor)
    forward_peak_bytes = _restart_peak(clock, peak=True)
    forward_seen, n_forward = list(collectives.seen), len(collectives.seen)
    new_bytes = sum(size for storage, size in saved.items() if storage not in before)
    call.backward(results)
    del results
    backward_peak_bytes = _restart_peak(clock, peak=True)
    backward_seen = collectives.seen[n_forward:]
    working_bytes = None
    if clock.is_cuda:
        gradients = call.gradient_bytes(of_weights=True) - call.gradient_bytes(of_weights=False)
        peak_bytes = max(forward_peak_bytes, backward_peak_bytes - gradients)
        working_bytes = max(0, peak_bytes - start_bytes - new_bytes)
    saved_bytes = sum(saved.values())
    return {
        "saved_bytes": saved_bytes,
        "working_bytes": working_bytes,
        "collectives": (forward_seen, list(backward_seen)),
    }


def _kept_aside(results: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What compiled code keeps for its backward pass without autograd's hooks knowing (torch 2.12 and later)."""
    waiting, known = [result.grad_fn for result in results], set()
    while waiting:
        node: Any = waiting.pop()
        if node is not None and node not in known:
            known.add(node)
            yield from getattr(node, "_tensors_no_vc_check", None) or ()
            waiting.extend(before for before, _ in node.next_functions)


def _restart_peak(clock: Clock, *, peak: bool = False) -> int:
    """Bytes allocated now, or at most since the last call."""
    if not clock.is_cuda:
        return 0
    clock.wait()
    found = torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _n_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _n_more_copies(call: Call, memory: dict[str, Any], clock: Clock) -> int:
    weight_bytes = sum(_n_bytes(p) for p in call.module.parameters())
    wanted = min(MAX_COPIES, -(-COPIED_WEIGHT_BYTES // weight_bytes)) if weight_bytes else 1
    if not clock.is_cuda:
        return min(1, wanted - 1)
    free_bytes = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    input_bytes = sum(map(_n_bytes, call.inputs))
    each = 2 * weight_bytes + memory["saved_bytes"] + 3 * input_bytes
    room = (MEMORY_SHARE * free_bytes - (memory["working_bytes"] or 0)) // each if each else wanted
    return int(max(0, min(wanted - 1, room)))


# ------------------------------------------------------------------------------------------- building


def _replace_collectives() -> LocalCollectives:
    """From now on generated code communicates with nobody."""
    module: Any = importlib.import_module("runtime.collectives")
    local = LocalCollectives()
    module.dist = local
    module._all_gather_tensor, module._reduce_scatter_tensor = local.all_gather, local.reduce_scatter
    return local


def _builder(
    region: dict[str, Any], batch_size: int, dtype: torch.dtype, device: torch.device, compiled: Compile | None
) -> Callable[[], Call]:
    """Makes copies of a region; all share one loss function, as micro-batches do."""
    loss = _loss(region, batch_size, dtype, device, compiled)
    return lambda: _build_call(region, batch_size, dtype, device, compiled, loss)


def _build_call(
    region: dict[str, Any],
    batch_size: int,
    dtype: torch.dtype,
    device: torch.device,
    compiled: Compile | None,
    loss: Loss | None,
) -> Call:
    generated = importlib.import_module(region["module"])
    tp = RankOfOne(region["tp"]) if region["tp"] > 1 else None
    with _default_dtype(dtype), device:
        module = getattr(generated, region["class"])(tp).train()
    frozen = set(region["frozen"])
    for name, parameter in module.named_parameters():
        _fill(parameter)
        parameter.requires_grad_(name not in frozen)
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = (buffer.to(dtype) if buffer.is_floating_point() else buffer).fill_(1)
    if compiled is not None and region["compiles_forward"]:
        module.forward = compiled(module.forward)
    inputs = [_input(described, batch_size, dtype, device) for described in region["inputs"]]
    return Call(module, inputs, loss)


def _loss(
    region: dict[str, Any], batch_size: int, dtype: torch.dtype, device: torch.device, compiled: Compile | None
) -> Loss | None:
    """The loss of a region's outputs and targets of its own; None where it has none."""
    if not region["has_loss"]:
        return None
    generated: Any = importlib.import_module(region["module"])
    parallel: Any = importlib.import_module("runtime.parallel")
    tp = RankOfOne(region["tp"]) if region["tp"] > 1 else None
    targets = _structure([(d["path"], _input(d, batch_size, dtype, device)) for d in region["targets"]])

    def loss_fn(outputs: Any, targets: Any) -> Any:
        return generated.loss_fn(outputs, targets, tp)

    loss_of = functools.partial(parallel.loss_of, loss_fn)
    loss_of = loss_of if compiled is None else compiled(loss_of)
    return lambda outputs: loss_of(outputs, targets)


def _structure(leaves: list[tuple[list[Any], Any]]) -> Any:
    """The tuple or dict whose leaves have these paths."""
    if len(leaves) == 1 and not leaves[0][0]:
        return leaves[0][1]
    groups: dict[Any, list[Any]] = {}
    for (key, *rest), leaf in leaves:
        groups.setdefault(key, []).append((rest, leaf))
    return {key: _structure(group) for key, group in groups.items()}


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def _fill(weight: torch.Tensor) -> None:
    """Values of the size that training has: what a device draws, and so how fast it runs, depends on them."""
    weight.normal_(std=WEIGHT_STD) if weight.dim() > 1 else weight.fill_(1.0)


def _input(described: dict[str, Any], batch_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    shape = [extent["per_sample"] * batch_size if isinstance(extent, dict) else extent for extent in described["shape"]]
    wanted = dtype if described["dtype"] == "compute" else getattr(torch, described["dtype"])
    if wanted.is_floating_point:
        tensor = torch.randn(shape, dtype=wanted, device=device)
        if described["is_weight"]:
            _fill(tensor)
        return tensor.requires_grad_(described["requires_grad"])
    if wanted == torch.bool:
        return torch.ones(shape, dtype=wanted, device=device)
    if wanted.is_complex:
        return torch.randn(shape, dtype=wanted, device=device)
    low, high = described["range"]
    return torch.randint(low, high + 1, shape, dtype=wanted, device=device)


# ------------------------------------------------------------------------------------------- the optimizer


class OptimizerStep(Round):
    """The gradient norm in place of a forward pass, the optimizer in place of a backward pass."""

    def __init__(self, weights: list[nn.Parameter], *, is_fused: bool) -> None:
        super().__init__([])
        self._weights = weights
        self._optimizer = torch.optim.AdamW(weights, fused=is_fused or None)

    def forward(self) -> None:
        torch.nn.utils.get_total_norm([weight.grad for weight in self._weights if weight.grad is not None])

    def backward(self) -> None:
        self._optimizer.step()

    def shortest(self) -> Round:
        return self


def measure_optimizer(plan: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """Seconds per element of the gradient norm and one fused AdamW step, as the program does them."""
    dtype = DTYPES[plan["precision"]]
    master = torch.float32 if dtype.itemsize < 4 else dtype
    n_elements = ADAM_ELEMENTS if clock.is_cuda else ADAM_ELEMENTS // 256
    weights = []
    for _ in range(ADAM_TENSORS):
        weight = nn.Parameter(torch.randn(n_elements, dtype=master, device=clock.device))
        weight.grad = torch.randn_like(weight)
        weights.append(weight)
    times = _times(OptimizerStep(weights, is_fused=clock.is_cuda), clock)
    per_element_s = (times["forward_s"] + times["backward_s"]) / (n_elements * ADAM_TENSORS)
    return {"status": "measured", "per_element_s": per_element_s}


# ------------------------------------------------------------------------------------------- results


def environment(device: torch.device) -> dict[str, str]:
    """What a time depends on besides the code."""
    if device.type == "cpu":
        return {"device": "CPU", "torch": torch.__version__, "driver": ""}
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "driver": _driver()}


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.split("\n")[0].strip()


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What identifies a result."""
    names = ("what", "content", "assignment", "tp", "micro_batch_size", "precision", "device", "torch", "driver")
    return (*(row.get(name) for name in names), bool(row.get("compiled")))


def read_results(path: Path) -> set[tuple[Any, ...]]:
    """The keys of the results that a file holds; a last line that was cut off is removed."""
    if not path.exists():
        return set()
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return {key_of(json.loads(line)) for line in whole.splitlines()}


def tasks(plan: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any], int]]:
    """(fields that identify it, region, micro-batch size) of everything to measure: optimizer, eager, compiled."""
    common = {"schema_version": SCHEMA_VERSION, "model": plan["model"], "precision": plan["precision"]}
    yield {**common, "what": "optimizer"}, {}, 0
    names = ("segment", "content", "assignment", "tp", "boundary")
    for compiled in (False, True):
        for region in (region for region in plan["regions"] if compiled in region["compiled"]):
            described = {"what": "segment", **{name: region[name] for name in names}, "compiled": compiled}
            for batch_size in region["micro_batch_sizes"]:
                yield {**common, **described, "micro_batch_size": batch_size}, region, batch_size


def measure(folder: Path, out: Path, device: torch.device, *, seconds: float = SECONDS, backend: str = BACKEND) -> None:
    """Measure everything that `out` does not hold yet; `backend` is that of torch.compile."""
    plan = json.loads((folder / "measurement.json").read_text())
    found = environment(device)
    if plan["device"].lower() != found["device"].lower():
        sys.exit(f"measure: found device {found['device']!r}\n  expected: {plan['device']!r}, the device of --hw")
    sys.path.insert(0, str(folder))
    if plan["has_own_ops"]:
        importlib.import_module("model")
    clock, done, everything = Clock(device, seconds), read_results(out), list(tasks(plan))
    compiled = functools.partial(torch.compile, backend=backend, dynamic=False)
    torch.manual_seed(0)
    with out.open("a") as file:
        for number, (row, region, batch_size) in enumerate(everything, 1):
            row |= found
            is_known = key_of(row) in done
            if not is_known:
                row |= _measured(region, batch_size, plan, clock, compiled if row.get("compiled") else None)
                done.add(key_of(row))
                file.write(json.dumps(row) + "\n")
                file.flush()
            _show(f"[{number}/{len(everything)}] {_described(row)}: {'known' if is_known else _result(row)}")


def _measured(
    region: dict[str, Any], batch_size: int, plan: dict[str, Any], clock: Clock, compiled: Compile | None
) -> Any:
    try:
        if not region:
            return measure_optimizer(plan, clock)
        return measure_region(region, batch_size, plan, clock, compiled=compiled)
    except torch.OutOfMemoryError:
        return {"status": "out of memory"}
    except RuntimeError as error:  # what torch.compile raises, whichever part of it fails
        if compiled is None:
            raise
        return {"status": "not compiled", "why": str(error).strip().split("\n")[0]}
    finally:
        gc.collect()
        if clock.is_cuda:
            torch.cuda.empty_cache()


def _described(row: dict[str, Any]) -> str:
    if row["what"] == "optimizer":
        return "optimizer"
    boundary = f" {row['boundary']}" if row["boundary"] else ""
    way = ", compiled" if row["compiled"] else ""
    return f"{row['segment']}, tp {row['tp']}{boundary}, micro-batch {row['micro_batch_size']}{way}"


def _result(row: dict[str, Any]) -> str:
    if row["status"] not in ("measured", "noisy"):
        return f"{row['status']} {row.get('why', '')}".strip()
    if row["what"] == "optimizer":
        return f"{row['per_element_s'] * 1e12:.2f} ps per element"
    times = f"forward {row['forward_s'] * 1e3:.3f} ms, backward {row['backward_s'] * 1e3:.3f} ms"
    return times + (" (noisy)" if row["status"] == "noisy" else "")


def _show(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def main(arguments: list[str]) -> None:
    """The command line; see the module docstring."""
    parser = argparse.ArgumentParser(description="Measure what measurement.json lists, on one device.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=Path("measured.json"))
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--backend", default=BACKEND, help="Of torch.compile.")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("measure: found no CUDA device\n  expected: one GPU of the target\n  fix: run on it, or --device cpu")
    folder, device = Path(__file__).resolve().parent, torch.device(given.device)
    measure(folder, given.out, device, seconds=given.seconds, backend=given.backend)


if __name__ == "__main__":
    main(sys.argv[1:])
