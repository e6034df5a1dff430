"""What to measure, as a folder that runs by itself: segments, model.py, `measuring_program/`, `measurement.json`.

    regions = unique kinds of segments x (tensor-parallel degree, boundary layout), each at several micro-batch sizes,
              eager, compiled as the program compiles it, or both; what it does not compile is eager either way;
              what reads images with these contiguous, channels_last, or both;
              without tensor parallelism a block is also the user's own module of model.py, where it is called by itself

A region is left out when another one computes the same in the same layouts. Layouts are those that the tensor-parallel
program finds at micro-batch 1, as in a search, and at each micro-batch size by itself, as with `--fix micro_batch`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoplan.analysis.executions import compiled_kinds, image_kinds
from autoplan.analysis.float32_buffers import float32_buffers
from autoplan.codegen import runtime_files
from autoplan.codegen.segment_modules import SegmentClass, measuring_files, segment_modules
from autoplan.graph import GraphFacts, Input, OpGraph, PerSample, Segment, TensorSpec
from autoplan.hardware import HardwareProfile
from autoplan.layout import local_spec
from autoplan.measured_profile.segment_key import assignment_key, code_key, content_key
from autoplan.measured_profile.segment_times import SCHEMA_VERSION
from autoplan.options import MEMORY_FORMATS, Options
from autoplan.parallel_plan import SegmentSharding
from autoplan.rules import OpRule, load_rules
from autoplan.space.current_code import one_stage_plan
from autoplan.space.layouts import all_shardings, layout_size

Ranges = Mapping[tuple[str | int, ...], tuple[int, int]]  # path of an integer input -> least and largest value
MEASUREMENT = "measurement.json"
COMPILE_WAYS = {"off": (False,), "on": (True,), "both": (False, True)}
FORMAT_WAYS = {**{name: (name,) for name in MEMORY_FORMATS}, "both": MEMORY_FORMATS}


@dataclass(frozen=True, slots=True)
class MeasurementRequest:
    """What the user asks to be measured.

    Attributes:
        model: name of the model file, `model_text` what it says, `local_files` what it imports from beside it, by path,
            `overrides` the arguments of its build_model.
        degrees: of tensor parallelism; none stands for all that a host has and the model gains by.
        ranges: values that integer inputs take.
        compile: a key of COMPILE_WAYS, for what the program can compile.
        memory_format: a key of FORMAT_WAYS, for what reads images.
    """

    graph: OpGraph
    hardware: HardwareProfile
    options: Options
    model: str
    model_text: str
    local_files: Mapping[str, str]
    overrides: Mapping[str, Any]
    degrees: tuple[int, ...]
    micro_batch_sizes: tuple[int, ...]
    ranges: Ranges
    compile: str = "off"
    memory_format: str = MEMORY_FORMATS[0]


def measurement_files(request: MeasurementRequest) -> dict[str, str | bytes]:
    """Every file of the folder, by relative path.

    Raises: UsageError when a tensor-parallel degree is impossible.
    """
    rules = load_rules(request.options.rules)
    found: dict[str, str | bytes] = {}
    regions: dict[tuple[Any, ...], dict[str, Any]] = {}
    for (degree, boundary, assignments), sizes in _splits(request, rules).items():
        name = f"segments_{len(found)}"
        text, classes = segment_modules(
            request.graph,
            one_stage_plan(request.graph, request.options.precision, degree, boundary, assignments),
            rules=rules,
        )
        found[f"{name}.py"] = text
        for region in _regions(request, classes, degree, boundary, assignments):
            known = regions.setdefault(
                (region["content"], region["assignment"], degree), region | {"module": name, "micro_batch_sizes": []}
            )
            known["micro_batch_sizes"] = sorted({*known["micro_batch_sizes"], *sizes})
    has_own_ops = any(
        "." in op.target and op.target.split(".")[0] not in ("aten", "autoplan") for op in request.graph.ops
    )
    found[MEASUREMENT] = json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "model": request.model,
            "precision": request.options.precision,
            "device": request.hardware.device.name,
            "has_own_ops": has_own_ops,
            "overrides": dict(request.overrides),
            "beside_model": list(request.local_files),
            "inputs": _model_inputs(request),
            "float32_buffers": sorted(float32_buffers(request.graph)),
            "regions": list(regions.values()),
        },
        indent=1,
    )
    if has_own_ops or any(region["own"] for region in regions.values()):
        found |= {"model.py": request.model_text, **request.local_files}
    return {**found, **measuring_files(), **runtime_files()}


def value_ranges(batch: Any, path: tuple[str | int, ...] = ()) -> dict[tuple[str | int, ...], tuple[int, int]]:
    """The least and largest value, from 0 on, of each integer tensor of (inputs, targets), by its path in the graph."""
    if not path:
        inputs, targets = batch
        return value_ranges(inputs, ("inputs",)) | value_ranges(targets, ("targets",))
    if hasattr(batch, "is_floating_point"):
        known = batch[batch >= 0]  # below it are marks, such as the target that a loss leaves out
        return {path: (int(known.min()), int(known.max()))} if "int" in str(batch.dtype) and known.numel() else {}
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, list | tuple) else ()
    return {key: value for name, item in items for key, value in value_ranges(item, (*path, name)).items()}


def _splits(
    request: MeasurementRequest, rules: Mapping[str, OpRule]
) -> dict[tuple[int, str, tuple[SegmentSharding, ...]], tuple[int, ...]]:
    """(degree, boundary, assignment of each kind) -> the micro-batch sizes at which to measure it."""
    found: dict[tuple[int, str, tuple[SegmentSharding, ...]], tuple[int, ...]] = {}
    if 1 in (request.degrees or (1,)):
        found[1, "", ()] = request.micro_batch_sizes
    wanted: list[tuple[tuple[str, str], ...]] = [(("tp", str(n)),) for n in request.degrees if n > 1]
    for fix in [()] if not request.degrees else wanted:
        options = replace(request.options, fix=fix)
        for planned, size in sorted({(at, n) for n in request.micro_batch_sizes for at in (n, layout_size(n))}):
            splits = all_shardings(request.graph, request.hardware, options, rules, batch_size=planned)
            for (degree, boundary), assignments in splits.items():
                key = (degree, boundary, assignments)
                found[key] = tuple(sorted({*found.get(key, ()), size}))
    return found


def _regions(
    request: MeasurementRequest,
    classes: Mapping[int, SegmentClass],
    degree: int,
    boundary: str,
    assignments: Sequence[SegmentSharding],
) -> list[dict[str, Any]]:
    graph, facts, compiled = request.graph, GraphFacts.of(request.graph), compiled_kinds(request.graph)
    images = image_kinds(graph)
    has_blocks = any(segment.is_block for segment in graph.segments)
    by_kind = {assignment.kind: assignment for assignment in assignments}
    inputs = {item.name: item for item in graph.inputs}
    float32 = float32_buffers(graph)
    frozen = {parameter.name for parameter in graph.parameters if not parameter.is_trainable}
    found = []
    for kind, segment in graph.first_of_kind().items():
        called = classes[kind]
        prefix = f"{segment.module_path}." if segment.is_block else ""
        targets = [inputs[name] for name in segment.inputs if name in inputs and inputs[name].path[0] == "targets"]
        found.append(
            {
                "segment": segment.name,
                "content": content_key(graph, facts, segment),
                "assignment": assignment_key(graph, segment, by_kind.get(kind)),
                "tp": degree,
                "boundary": boundary,
                "compiled": list(COMPILE_WAYS[request.compile if kind in compiled else "off"]),
                "memory_formats": list(FORMAT_WAYS[request.memory_format] if kind in images else MEMORY_FORMATS[:1]),
                "compiles_forward": segment.is_block or not has_blocks,
                "class": called.name,
                "code": code_key(called.text),
                "instances": _instances(graph, segment),
                "own": _own_call(graph, segment) if degree == 1 and segment.is_block else None,
                "float32_buffers": [name.removeprefix(prefix) for name in segment.parameters if name in float32],
                "frozen": [name.removeprefix(prefix) for name in segment.parameters if name in frozen],
                "inputs": [
                    _input(request, facts, name, local_spec(facts.specs[name], layout, degree), inputs.get(name))
                    for name, layout in called.arguments
                ],
                "has_loss": called.has_loss,
                "targets": [
                    _input(request, facts, item.name, facts.specs[item.name], item) | {"path": list(item.path[1:])}
                    for item in (targets if called.has_loss else ())
                ],
            }
        )
    return found


def _own_call(graph: OpGraph, segment: Segment) -> dict[str, Any]:
    """Which module of the user's model a block is, how often it must be called, and all calls of its kind."""
    n_calls = sum(other.module_path == segment.module_path for other in graph.segments)
    return {"path": segment.module_path, "n_calls": n_calls, "instances": _instances(graph, segment)}


def _instances(graph: OpGraph, segment: Segment) -> list[tuple[str, int]]:
    """Of all blocks of this kind, (module path, number of the call of this module); none for what is no block."""
    found, n_calls = [], Counter[str]()
    for other in graph.segments if segment.is_block else ():
        if other.kind == segment.kind:
            found.append((other.module_path, n_calls[other.module_path]))
        n_calls[other.module_path] += 1
    return found


def _model_inputs(request: MeasurementRequest) -> list[dict[str, Any]]:
    """What the whole model is called with."""
    facts, inputs = GraphFacts.of(request.graph), request.graph.inputs
    return [_input(request, facts, item.name, item.spec, item) for item in inputs if item.path[0] == "inputs"]


def _input(
    request: MeasurementRequest, facts: GraphFacts, name: str, spec: TensorSpec, item: Input | None
) -> dict[str, Any]:
    return {
        "shape": [{"per_sample": x.count} if isinstance(x, PerSample) else x for x in spec.shape],
        "dtype": spec.dtype,
        "requires_grad": name in facts.gradients,
        "is_weight": name in facts.parameters,
        "is_kept_once": name in facts.invariant or name in facts.parameters,
        "range": list(request.ranges.get(item.path, (0, 0)) if item is not None else (0, 0)),
    }
