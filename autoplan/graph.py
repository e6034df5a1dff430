"""OpGraph: what a training step computes, without torch.

One graph holds one forward pass of the model and its loss. Shapes are exact and polymorphic in the
batch size: an extent is an `int` (the same for every batch) or `PerSample(k)` (k x batch size). Dtypes are
polymorphic in the precision: `compute` is whatever the parameters are computed in.

    inputs, parameters --> ops in execution order --> model outputs --> loss
                           |-- segment 0 --|-- segment 1 --|-- ... --|

A **segment** is a run of consecutive ops: one call of one repeated block (`transformer.h.3`), or what
stands between blocks. Segments with the same `kind` are proved equal op by op, so each kind is priced,
sharded and generated once. A pipeline may be cut between any two segments.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

COMPUTE = "compute"
IMAGE_DIMS = 4  # [sample, channel, height, width]
# Ops that stand for all that a module does, in a graph of whole modules; see `tracing.module_level`.
MODULE_PRODUCTS, MODULE_OTHER = "module.products", "module.other"
PADDED_LINEAR = "autoplan.padded_linear.default"  # aten.linear as `runtime.stages.padded_head` computes it
LOSS_PATH = "loss_fn"  # the module path of ops that the loss function runs
IN_PLACE = "in-place write"  # of `OpGraph.dissolved`: across the borders of blocks
WRITES_BATCH = "write into the batch"  # of `OpGraph.dissolved`: in place, into inputs or targets
OWN_GRADIENTS = frozenset({"autograd.Function", "gradient hook"})  # of `OpGraph.dissolved`: the user's own gradients
N_ADAM_STATES = 2
WHOLE_OPTIMIZER = "whole-tensor optimizer"  # of `OpGraph.dissolved`: it computes with whole tensors
# Likewise, of torch's distributed tensors, which parameters are under ZeRO 1 to 3: it fails on them, or updates them
# otherwise than whole ones.
FAILS_SHARDED, DIFFERS_SHARDED = "optimizer that fails on shards", "optimizer that differs on shards"
OPTIMIZER_WORDS = frozenset({WHOLE_OPTIMIZER, FAILS_SHARDED, DIFFERS_SHARDED})
REPLACED = "functional_call"  # of `OpGraph.dissolved`: modules run with other weights than their own
WRITES = frozenset({"aten.copy_.default", "aten.batch_norm.default"})  # operators that change a buffer they read
COMPUTE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "tf32": "float32", "fp32": "float32", "fp64": "float64"}
DTYPE_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2,
    "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip
COMPLEX_DTYPES = frozenset({"complex32", "complex64", "complex128"})
FLOAT_DTYPES = frozenset({COMPUTE, "float64", "float32", "bfloat16", "float16"}) | COMPLEX_DTYPES


@dataclass(frozen=True, slots=True)
class PerSample:
    """An integer proportional to the batch size: `count` x batch size."""

    count: int


Extent = int | PerSample


def extent_at(extent: Extent, batch_size: int) -> int:
    """The extent as a number, at one batch size."""
    return extent.count * batch_size if isinstance(extent, PerSample) else extent


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor; `dtype` is torch's name without the `torch.`, or `compute`."""

    shape: tuple[Extent, ...]
    dtype: str

    def at(self, batch_size: int) -> tuple[int, ...]:
        """The shape as numbers, at one batch size."""
        return tuple(extent_at(extent, batch_size) for extent in self.shape)

    def n_elements(self, batch_size: int) -> int:
        """How many elements the tensor has at one batch size."""
        count = 1
        for extent in self.shape:
            count *= extent.count * batch_size if isinstance(extent, PerSample) else extent
        return count

    def n_bytes(self, batch_size: int, precision: str) -> int:
        """Its size in memory at one batch size and precision (a key of `COMPUTE_DTYPES`)."""
        dtype = COMPUTE_DTYPES[precision] if self.dtype == COMPUTE else self.dtype
        return self.n_elements(batch_size) * DTYPE_BYTES[dtype]

    @property
    def is_float(self) -> bool:
        """Whether the numbers are real or complex floating point, so that the tensor may carry a gradient."""
        return self.dtype in FLOAT_DTYPES

    @property
    def is_complex(self) -> bool:
        """Whether the numbers are complex."""
        return self.dtype in COMPLEX_DTYPES


@dataclass(frozen=True, slots=True)
class Ref:
    """An op argument that is the value of this name: an input, a parameter, or an op's result."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """An op argument that is a torch constant, such as `torch.float32`."""

    text: str


Argument = Any  # Ref | Symbol | PerSample | int | float | bool | str | None | tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Op:
    """One call of an ATen operator.

    Attributes:
        name: the name of its result; unique in the graph.
        target: the operator, such as `aten.linear.default`, or `getitem`.
        args, kwargs: as torch takes them.
        outputs: one spec per result; an op with several results is read through `getitem`.
        module_path: the innermost module that called it, as in `named_modules()`.
        label: what the user's source calls its result; "" where it has no name there.
    """

    name: str
    target: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    outputs: tuple[TensorSpec, ...]
    module_path: str
    label: str = ""

    def input_names(self) -> tuple[str, ...]:
        """Names of the values it reads, in order, each once."""
        found: dict[str, None] = {}
        _collect_refs(self.args, found)
        _collect_refs(tuple(value for _, value in self.kwargs), found)
        return tuple(found)


def dtypes_said(op: Op) -> frozenset[str]:
    """The dtypes that a call of the op names, as `TensorSpec` has them."""
    return frozenset(_dtypes((op.args, op.kwargs)))


def _dtypes(argument: Argument) -> Iterator[str]:
    if isinstance(argument, tuple):
        for item in argument:
            yield from _dtypes(item)
    elif isinstance(argument, Symbol) and argument.text.startswith("dtype:"):
        yield argument.text.removeprefix("dtype:")


def is_convolution(op: Op) -> bool:
    """Whether it is a convolution, transposed or not, of any number of dims."""
    return op.target.startswith("aten.conv")


def _collect_refs(argument: Argument, found: dict[str, None]) -> None:
    if isinstance(argument, Ref):
        found[argument.name] = None
    elif isinstance(argument, tuple):
        for item in argument:
            _collect_refs(item, found)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or buffer of the model.

    Attributes:
        name: the value's name in the graph, which is its first name in `named_parameters()`.
        aliases: all its names; more than one when the weight is tied.
        is_trainable: false for buffers and frozen parameters.
        is_buffer: whether it is a buffer; `is_persistent` whether it is part of the checkpoint.
    """

    name: str
    spec: TensorSpec
    aliases: tuple[str, ...]
    is_trainable: bool = True
    is_buffer: bool = False
    is_persistent: bool = True


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor of the batch. `path` leads to it: ("inputs",), ("inputs", "tokens"), ("targets",)."""

    name: str
    spec: TensorSpec
    path: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive ops `ops[start:stop]` of a graph.

    Attributes:
        name: the module path of the block (`transformer.h.3`), or `outer.0`, `outer.1`, ... between blocks.
        kind: segments of equal kind are equal up to names.
        inputs: names of values it reads that earlier segments (or the batch) produced; of the last segment, if that is
            no block, also those that only leave the graph.
        outputs: names of its values that later segments read, or that leave the graph.
        parameters: names of the parameters and buffers it reads, or that leave the graph from it.
        class_name: the class of the block; "" between blocks.
    """

    name: str
    kind: int
    start: int
    stop: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    class_name: str = ""

    @property
    def is_block(self) -> bool:
        """Whether it is one call of one module, which can be recomputed and wrapped by itself."""
        return self.class_name != ""

    @property
    def module_path(self) -> str:
        """The module it calls, as in `named_modules()`; "" between blocks."""
        return self.name.split("@")[0] if self.is_block else ""


@dataclass(frozen=True, slots=True)
class OpGraph:
    """A traced model with its loss. See the module docstring.

    Attributes:
        model_outputs: what the user's model returns, before the loss; empty when the model returns its loss.
        loss: the name of the scalar that is minimized.
        dissolved: what the user's forward does that the graph does not hold: "checkpoint", "autocast", `IN_PLACE`,
            `WRITES_BATCH`, `REPLACED`, and the words of `OWN_GRADIENTS`; and of the user's optimizer `OPTIMIZER_WORDS`.
        optimizer_failure: `ERROR at FILE:LINE: TEXT` with which a trial of the user's optimizer failed; "" it did not.
        n_optimizer_states: tensors of its size that the optimizer keeps for a parameter.
        waits_at: `FILE:LINE: TEXT` where the user's own forward waits for the device; "" nowhere, as far as known.
        synchronizes_batch_norm: whether the user's model has an `nn.SyncBatchNorm` in training, of which the ops do not
            tell that it takes the samples of all ranks.
    """

    name: str
    inputs: tuple[Input, ...]
    parameters: tuple[Parameter, ...]
    ops: tuple[Op, ...]
    segments: tuple[Segment, ...]
    model_outputs: tuple[str, ...]
    loss: str
    dissolved: tuple[str, ...] = ()
    waits_at: str = ""
    optimizer_failure: str = ""
    synchronizes_batch_norm: bool = False
    n_optimizer_states: int = N_ADAM_STATES

    def __hash__(self) -> int:
        """Of a few fields: what is remembered per graph must not read all its ops each time."""
        return hash((self.name, self.loss, len(self.ops), self.parameters[-1:]))

    def specs(self) -> dict[str, TensorSpec]:
        """The first spec of every value by name: inputs, parameters, op results."""
        table: dict[str, TensorSpec] = {item.name: item.spec for item in self.inputs}
        table.update({item.name: item.spec for item in self.parameters})
        table.update({op.name: op.outputs[0] for op in self.ops})
        return table

    def ops_of(self, segment: Segment) -> tuple[Op, ...]:
        """The ops of one segment."""
        return self.ops[segment.start : segment.stop]

    def first_of_kind(self) -> dict[int, Segment]:
        """The first segment of each kind, in order of appearance."""
        table: dict[int, Segment] = {}
        for segment in self.segments:
            table.setdefault(segment.kind, segment)
        return table

    @property
    def is_module_level(self) -> bool:
        """Whether its ops are whole modules, so that nothing can be split or cut inside of them."""
        return any(op.target == MODULE_OTHER for op in self.ops)

    @property
    def has_own_gradients(self) -> bool:
        """Whether the user's code defines gradients, which the ops do not hold: its classes cannot be replaced."""
        return not OWN_GRADIENTS.isdisjoint(self.dissolved)

    @property
    def replaces_weights(self) -> bool:
        """Whether modules run with other weights: what wraps the user's modules would run them with their own."""
        return REPLACED in self.dissolved

    def n_parameters(self) -> int:
        """Trainable elements, a tied weight counted once."""
        return sum(p.spec.n_elements(1) for p in self.parameters if p.is_trainable)

    def content_hash(self) -> str:
        """SHA-256 of the graph's text form without its name, optimizer and lines of files.

        Equal graphs have equal hashes.
        """
        return _content_hash(self)


_CLASSES = {cls.__name__: cls for cls in (PerSample, TensorSpec, Ref, Symbol, Op, Parameter, Input, Segment, OpGraph)}
# Newer than plans that are kept with the hash of their graph: left out where they are as they would have been then.
_NEWER = ("waits_at", "optimizer_failure", "synchronizes_batch_norm", "n_optimizer_states")
_AS_BEFORE = {field.name: field.default for field in fields(OpGraph) if field.name in _NEWER}
_FIELDS = {name: tuple(field.name for field in fields(cls)) for name, cls in _CLASSES.items()}


@lru_cache(maxsize=4)
def _content_hash(graph: OpGraph) -> str:
    dissolved = tuple(word for word in graph.dissolved if word not in OPTIMIZER_WORDS)
    model = replace(
        graph, name="", dissolved=dissolved, waits_at="", optimizer_failure="", n_optimizer_states=N_ADAM_STATES
    )
    return hashlib.sha256(graph_to_json(model).encode()).hexdigest()


def graph_to_json(graph: OpGraph) -> str:
    """The graph as JSON text; `graph_from_json` reads it back."""
    return json.dumps(graph, default=_encode, separators=(",", ":"), allow_nan=True)


def graph_from_json(text: str) -> OpGraph:
    """The graph that `graph_to_json` wrote."""
    graph = _decode(json.loads(text))
    assert isinstance(graph, OpGraph)
    return graph


def _encode(value: Any) -> dict[str, Any]:
    """What `json` does not know by itself: the fields of a dataclass, and its name."""
    name = type(value).__name__
    found = {field: getattr(value, field) for field in _FIELDS[name]}
    return {"_": name, **{field: item for field, item in found.items() if item != _AS_BEFORE.get(field, ...)}}


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        cls = _CLASSES[value["_"]]
        return cls(**{key: _decode(item) for key, item in value.items() if key != "_"})
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    return value


def crossing_values(graph: OpGraph, start: int, *, invariant: frozenset[str]) -> tuple[str, ...]:
    """What a pipeline stage that begins with segment `start` receives: values made before it and read in or after it.

    Invariants (`invariant_values`) are computed again on each stage, and targets are given to the last one directly.
    """
    return () if start == len(graph.segments) else crossings(graph, invariant=invariant)[start]


def crossings(graph: OpGraph, *, invariant: frozenset[str]) -> list[tuple[str, ...]]:
    """The `crossing_values` of every segment."""
    last_read = {name: number for number, segment in enumerate(graph.segments) for name in segment.inputs}
    alive = {item.name for item in graph.inputs if item.path[0] != "targets"} & last_read.keys() - invariant
    found = []
    for number, segment in enumerate(graph.segments):
        alive = {name for name in alive if last_read[name] >= number}
        found.append(tuple(sorted(alive)))
        alive |= {op.name for op in graph.ops_of(segment)} & last_read.keys() - invariant
    return found


def gradient_values(ops: tuple[Op, ...], parameters: tuple[Parameter, ...]) -> frozenset[str]:
    """Names of the values a gradient flows through: floating point, and computed from a trainable parameter."""
    found = {p.name for p in parameters if p.is_trainable}
    for op in ops:
        if op.outputs[0].is_float and op.target != "aten.detach.default" and not found.isdisjoint(op.input_names()):
            found.add(op.name)
    return frozenset(found)


def values_with_loss_gradient(graph: OpGraph, gradients: frozenset[str]) -> frozenset[str]:
    """Names of the `gradient_values` that get a gradient from the loss: not what is only returned, or detached."""
    found = {graph.loss}
    for op in reversed(graph.ops):
        if op.name in found and op.name in gradients:
            found.update(op.input_names())
    return gradients & found


def computes_in_float32(graph: OpGraph) -> bool:
    """Whether forward casts to float32 where gradients flow, whatever the precision of the plan."""
    gradients = gradient_values(graph.ops, graph.parameters)
    before_loss = (op for op in graph.ops if op.module_path != LOSS_PATH)
    return any(op.name in gradients and op.outputs[0].dtype in ("float32", "complex64") for op in before_loss)


def changing_buffers(graph: OpGraph) -> frozenset[str]:
    """Names of the buffers that forward writes: running statistics, counts."""
    read = {name for op in graph.ops if op.target in WRITES for name in op.input_names()}
    return frozenset(parameter.name for parameter in graph.parameters if parameter.is_buffer and parameter.name in read)


def invariant_values(graph: OpGraph) -> frozenset[str]:
    """Names of the values that depend on no input and on nothing that training changes: rotary tables, causal masks.

    A pipeline stage computes them again instead of receiving them; it holds the buffers that this takes.
    """
    constant = {p.name for p in graph.parameters if p.is_buffer} - changing_buffers(graph)
    found: set[str] = set()
    for op in graph.ops:
        if all(name in found or name in constant for name in op.input_names()):
            found.add(op.name)
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What follows from a graph and every sum needs.

    Attributes:
        specs: of every value by name.
        gradients: the `gradient_values`, for which the forward pass keeps what a backward pass would read.
        from_loss: those of them that get a gradient from the loss.
        invariant: the `invariant_values`.
        parameters: names of parameters and buffers.
    """

    specs: Mapping[str, TensorSpec]
    gradients: frozenset[str]
    from_loss: frozenset[str]
    invariant: frozenset[str]
    parameters: frozenset[str]

    @classmethod
    def of(cls, graph: OpGraph) -> GraphFacts:
        """The facts of one graph."""
        return _facts(graph)


@lru_cache(maxsize=4)
def _facts(graph: OpGraph) -> GraphFacts:
    names = frozenset(parameter.name for parameter in graph.parameters)
    gradients = gradient_values(graph.ops, graph.parameters)
    from_loss = values_with_loss_gradient(graph, gradients)
    return GraphFacts(graph.specs(), gradients, from_loss, invariant_values(graph), names)
