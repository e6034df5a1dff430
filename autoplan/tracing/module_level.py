"""Model -> OpGraph of whole modules, for models that `torch.export` cannot follow: one small run instead of a trace.

The model runs forward on the CPU, in bfloat16, with batches of 2 and 3 samples. What runs is counted per block (an
element of a container, as in `segments.block_path`), and everything outside of blocks is put before or after them:

    before -> blocks.0 -> blocks.1 -> ... -> after -> loss

Each becomes two ops: `module.products`, the matrix products of it, and `module.other`, everything else. Their numbers
(FLOPs, memory traffic, kernels, what autograd keeps) are written as fixed + per sample, laid through the two runs:

    n(batch) = fixed + per_sample * batch

`before` reads all parameters: a forward that branches on data may use other modules on each rank, so the program
gathers and reduces them all at once, and the price says so. Where forward freezes parameters or runs modules with
other weights, which recomputing a block would not repeat, nothing is a block. What the graph does not know: a branch
that neither run took is not counted, and values are taken to pass from block to block. So nothing is split inside of
modules and no pipeline is cut: data parallelism, ZeRO and recomputation remain.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from autoplan.errors import TraceError
from autoplan.graph import (
    COMPUTE,
    LOSS_PATH,
    MODULE_OTHER,
    MODULE_PRODUCTS,
    REPLACED,
    WRITES_BATCH,
    Extent,
    Input,
    Op,
    OpGraph,
    PerSample,
    Ref,
    TensorSpec,
)
from autoplan.tracing.batches import BATCH_A, BATCH_B, as_given, check_samples, check_written
from autoplan.tracing.dissolved import FREEZING, watch_dissolved
from autoplan.tracing.model_source import ModelSource
from autoplan.tracing.overlaid_graph import DTYPE, graph_parameters, input_path
from autoplan.tracing.returned_loss import check_returned
from autoplan.tracing.segments import block_path, split_segments
from autoplan.tracing.sync_batch_norm import batch_norm_of_one_process, synchronizes_batch_norm
from autoplan.tracing.trace import call_model, check_parameters, in_traced_dtype, meta_batch, refuse_written
from autoplan.units import GiB
from autoplan.user_errors import USERS_ERRORS, module_place, users_place, what_failed

BEFORE, AFTER, LOSS = "before", "after", "loss"
_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
Affine = tuple[int, int]  # (fixed, per sample)


def trace_modules(source: ModelSource) -> OpGraph:
    """The graph of a model's blocks, for every batch size and precision; it runs the model twice on the CPU.

    Raises: TraceError when the model does not run, or does not fit into this machine's memory.
    """
    _check_memory(source)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = source.build_model()
        with torch.random.fork_rng(devices=[]):  # the runs below draw as if nothing had been looked at
            check_samples(functools.partial(meta_batch, source), where=source.where)
        check_parameters(model, source.where)
        model = in_traced_dtype(model).train()
        first, second = _run(source, model, BATCH_A), _run(source, model, BATCH_B)
    order = tuple(dict.fromkeys((*first.order, *second.order)))
    graph = _graph(source, model, first, second, order)
    return replace(graph, synchronizes_batch_norm=synchronizes_batch_norm(model))


# ---------------------------------------------------------------- one run


@dataclass(slots=True)
class _Tally:
    """What ran in one place: `elements` are of the compute dtype, `bytes` those of other dtypes."""

    flops: int = 0
    n_products: int = 0
    product_elements: int = 0
    product_bytes: int = 0
    n_others: int = 0
    other_elements: int = 0
    other_bytes: int = 0
    saved_elements: int = 0
    saved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Run:
    """One run: the counts and the result of each place, blocks in the order of their first call.

    `dissolved` is what of the run would not be repeated by recomputing a block.
    """

    batch: tuple[Any, Any]
    order: tuple[str, ...]
    tallies: Mapping[str, _Tally]
    results: Mapping[str, torch.Tensor]
    dissolved: frozenset[str]

    def tally(self, place: str) -> _Tally:
        """The counts of a place; zeros where this run did not come by."""
        return self.tallies.get(place) or _Tally()


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every operator, and every tensor that autograd keeps, where it happens."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = [BEFORE]
        self.tallies: dict[str, _Tally] = {}
        self.written: set[int] = set()  # storages
        self._known_storages = known

    @property
    def here(self) -> _Tally:
        return self.tallies.setdefault(self.places[-1], _Tally())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            written = [x for x, own in zip(args, func._schema.arguments, strict=False) if own.is_write]
            tensors = [x for x in pytree.tree_leaves(written) if isinstance(x, torch.Tensor)]
            self.written.update(x.untyped_storage().data_ptr() for x in tensors)
        if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            return result  # a view
        tensors = [t for t in pytree.tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        elements, n_bytes = _elements_and_bytes(tensors)
        flops = _flops_of(func, args, kwargs or {}, result)
        if flops is None:
            self.here.n_others += 1
            self.here.other_elements += elements
            self.here.other_bytes += n_bytes
        else:
            self.here.flops += flops
            self.here.n_products += 1
            self.here.product_elements += elements
            self.here.product_bytes += n_bytes
        return result

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that autograd saves; parameters, the batch, and what is saved already cost nothing."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known_storages:
            self._known_storages.add(storage.data_ptr())
            if tensor.dtype == DTYPE:
                self.here.saved_elements += storage.nbytes() // tensor.itemsize
            else:
                self.here.saved_bytes += storage.nbytes()
        return tensor


def _elements_and_bytes(tensors: list[torch.Tensor]) -> tuple[int, int]:
    elements = sum(t.numel() for t in tensors if t.dtype == DTYPE)
    return elements, sum(t.numel() * t.itemsize for t in tensors if t.dtype != DTYPE)


def _flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """FLOPs of a matrix product, convolution or attention; None for any other operator."""
    if func._overloadpacket == _CPU_ATTENTION:
        return int(sdpa_flop_count(*(t.shape for t in args[:3])))  # type: ignore[no-untyped-call]
    formula = flop_registry.get(func._overloadpacket)
    return None if formula is None else int(formula(*args, **kwargs, out_val=result))


def _run(source: ModelSource, model: nn.Module, batch_size: int) -> _Run:
    meta_batch(source, batch_size)  # checks what make_batch returns
    batch = pytree.tree_map(
        lambda t: t.to(DTYPE) if isinstance(t, torch.Tensor) and t.is_floating_point() else t,
        tuple(as_given(source.make_batch(batch_size))),
    )
    inputs, targets = batch
    held = [*model.parameters(), *model.buffers(), *(t for t in pytree.tree_leaves(batch) if hasattr(t, "shape"))]
    counter = _Counter({t.untyped_storage().data_ptr() for t in held})
    places = {id(p): p.data_ptr() for p in model.parameters()}
    results: dict[str, torch.Tensor] = {}
    order: list[str] = []
    watching = watch_dissolved(model)
    with _hooks(model, counter, results, order), _errors_of_the_model(source, model), watching as dissolved:
        keeping = torch.autograd.graph.saved_tensors_hooks(counter.keep, lambda tensor: tensor)
        with keeping, counter, batch_norm_of_one_process():
            outputs = call_model(model, inputs)
            counter.places[-1] = LOSS
            loss = outputs if source.loss_fn is None else source.loss_fn(outputs, targets)
    of = list(model.parameters()) if source.loss_fn is None else outputs
    check_returned(loss, of=of, where=source.where, has_loss_fn=source.loss_fn is not None)
    refuse_written(source.where, [name for name, p in model.named_parameters() if _is_written(p, counter, places)])
    for place, value in ((AFTER, outputs), (LOSS, loss)):
        results[place] = _first_tensor(value, results.get(BEFORE))
    dissolved &= {FREEZING, REPLACED}
    written = [i for i, own in enumerate(pytree.tree_leaves(batch)) if _is_in(own, counter.written)]
    if written:
        check_written(batch, written, where=source.where)
        dissolved.add(WRITES_BATCH)
    return _Run(batch, tuple(order), counter.tallies, results, frozenset(dissolved))


def _is_in(value: Any, memories: Collection[int]) -> bool:
    return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in memories


def _is_written(parameter: nn.Parameter, counter: _Counter, places: Mapping[int, int]) -> bool:
    """Whether a run wrote into it, or gave it other data than it had at the places before."""
    is_moved = places.get(id(parameter), parameter.data_ptr()) != parameter.data_ptr()
    return is_moved or parameter.untyped_storage().data_ptr() in counter.written


@contextmanager
def _hooks(model: nn.Module, counter: _Counter, results: dict[str, torch.Tensor], order: list[str]) -> Iterator[None]:
    """While it is open, every call of a block is a place of its own, and what follows a block is after the blocks."""

    def enter(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not order:
                results[BEFORE] = _first_tensor((args, kwargs), None)
            order.append(path)
            counter.places.append(path)

        return hook

    def leave(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            counter.places.pop()
            counter.places[0] = AFTER
            results[path] = _first_tensor(output, results[BEFORE])

        return hook

    handles = []
    for path, module in _blocks(model):
        handles.append(module.register_forward_pre_hook(enter(path), with_kwargs=True))
        handles.append(module.register_forward_hook(leave(path), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if path and block_path(path) == path:
            yield path, module


def _first_tensor(value: Any, otherwise: torch.Tensor | None) -> torch.Tensor:
    """The first floating-point tensor in a structure; a scalar where there is none."""
    found = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    floats = [t for t in found if t.is_floating_point()]
    if floats:
        return floats[0]
    return torch.zeros((), dtype=DTYPE) if otherwise is None else otherwise


@contextmanager
def _errors_of_the_model(source: ModelSource, model: nn.Module) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except USERS_ERRORS as error:  # whatever the user's code raises
        raise TraceError(
            f"{source.where}: the model does not run{users_place(error)}{module_place(error, model)}\n"
            f"  found: {what_failed(error)}\n"
            "  expected: a forward that runs in bfloat16 on the CPU, on the batch of make_batch\n"
            "  fix: call the model on one batch yourself, outside of autoplan, and mend what fails there"
        ) from error


def _check_memory(source: ModelSource) -> None:
    with torch.device("meta"):
        model = source.build_model()
    needed_bytes = sum(t.numel() for t in (*model.parameters(), *model.buffers())) * DTYPE.itemsize
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed_bytes > free_bytes:
        raise TraceError(
            f"{source.where}: planning at module level runs the model once on this machine\n"
            f"  found: {needed_bytes / GiB:.1f} GiB of weights, {free_bytes / GiB:.1f} GiB of free memory\n"
            "  expected: weights that fit\n  fix: plan on a larger machine, or make the model traceable"
        )


# ---------------------------------------------------------------- two runs, one graph


def _graph(source: ModelSource, model: nn.Module, first: _Run, second: _Run, order: tuple[str, ...]) -> OpGraph:
    parameters = graph_parameters(model, model)
    inputs = _inputs(first, second)
    ops: list[Op] = []
    previous: tuple[Ref, ...] = tuple(Ref(item.name) for item in inputs if item.path[0] == "inputs")
    for place in (BEFORE, *order, AFTER, LOSS):
        read = (*previous, *(Ref(p.name) for p in parameters)) if place == BEFORE else previous
        ops += _ops(place, first, second, read)
        previous = (Ref(ops[-1].name),)
    before_loss = next(op for op in reversed(ops) if op.module_path != LOSS_PATH).name
    outputs = (before_loss,) if source.loss_fn is not None else ()
    class_names = {path: type(module).__name__ for path, module in model.named_modules()}
    kept = (*outputs, ops[-1].name)
    segments = split_segments(tuple(ops), inputs=inputs, parameters=parameters, kept=kept, class_names=class_names)
    dissolved = tuple(sorted(first.dissolved | second.dissolved))
    if set(dissolved) - {WRITES_BATCH}:  # then nothing may be recomputed
        segments = tuple(replace(segment, class_name="") for segment in segments)
    return OpGraph(source.name, inputs, parameters, tuple(ops), segments, outputs, ops[-1].name, dissolved)


def _ops(place: str, first: _Run, second: _Run, read: tuple[Ref, ...]) -> list[Op]:
    """The matrix products of a place, if it has any, and everything else in it."""
    a, b = first.tally(place), second.tally(place)
    counts = {f.name: _affine(getattr(a, f.name), getattr(b, f.name)) for f in fields(_Tally)}
    spec = TensorSpec((), COMPUTE) if place == LOSS else _spec(first.results.get(place), second.results.get(place))
    path = {BEFORE: "", AFTER: "", LOSS: LOSS_PATH}.get(place, place)
    name = f"call_{place.replace('.', '_')}"
    found = []
    if counts["n_products"] != (0, 0):
        numbers = ("flops", "product_elements", "product_bytes", "n_products")
        found.append(_op(f"{name}_products", MODULE_PRODUCTS, read, _numbers(counts, *numbers), spec, path))
        read = (Ref(found[0].name),)
    rest = ("other_elements", "other_bytes", "n_others", "saved_elements", "saved_bytes")
    found.append(_op(name, MODULE_OTHER, read, _numbers(counts, *rest), spec, path))
    return found


def _op(name: str, target: str, read: tuple[Ref, ...], numbers: Any, spec: TensorSpec, path: str) -> Op:
    return Op(name=name, target=target, args=read, kwargs=numbers, outputs=(spec,), module_path=path)


def _numbers(counts: Mapping[str, Affine], *names: str) -> tuple[tuple[str, Affine], ...]:
    """The counts under names that are the same for both ops of a place."""
    return tuple((name.removeprefix("product_").removeprefix("other_"), counts[name]) for name in names)


def _affine(a: int, b: int) -> Affine:
    """The line through both runs; where they took different ways, the larger of the two per sample."""
    per_sample = b - a
    fixed = a - BATCH_A * per_sample
    if per_sample >= 0 and fixed >= 0:
        return fixed, per_sample
    return 0, max(-(-a // BATCH_A), -(-b // BATCH_B))


def _spec(a: torch.Tensor | None, b: torch.Tensor | None) -> TensorSpec:
    """The shape of a result in both runs, or in the one that came by; an extent that depends on data is the larger."""
    a, b = (b if a is None else a), (a if b is None else b)
    if a is None or b is None or a.dim() != b.dim():
        return TensorSpec((), COMPUTE)
    shape = tuple(_extent(x, y) for x, y in zip(a.shape, b.shape, strict=True))
    return TensorSpec(shape, COMPUTE if a.dtype == DTYPE else str(a.dtype).removeprefix("torch."))


def _extent(a: int, b: int) -> Extent:
    return a if a == b else PerSample(max(-(-a // BATCH_A), -(-b // BATCH_B)))


def _inputs(first: _Run, second: _Run) -> tuple[Input, ...]:
    found = []
    leaves = pytree.tree_flatten_with_path(first.batch)[0]
    for (path, a), b in zip(leaves, pytree.tree_leaves(second.batch), strict=True):
        if isinstance(a, torch.Tensor):
            names = input_path(path, first.batch)
            found.append(Input("_".join(map(str, names)), _spec(a, b), names))
    return tuple(found)
